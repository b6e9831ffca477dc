/** Ops as boxes on their lanes, with microbatch numbers where the boxes are wide enough. */

import { lastAtOrBefore } from "../memory.js";
import { sliceCount, unitName } from "../slices.js";
import { asSource, picture, toPixel } from "./pixels.js";
import { FONT, stripOf } from "./layout.js";

/** @typedef {import("./layout.js").Scene} Scene */
/** @typedef {import("./layout.js").Row} Row */
/** @typedef {import("./model.js").Lane} Lane */

const LARGEST_NUMBER_PX = { compute: 12, offload: 10, reload: 10 };
const SMALLEST_NUMBER_PX = 8;
/** Width of a digit as a share of the font size, and the share of a box that a number may fill. */
const DIGIT_WIDTH = 0.62;
const ROOM = 0.82;
/** Boxes from this width on are told apart by a gap. */
const ROOM_FOR_GAP_PX = 4;

/**
 * Draw all lanes of `rows`. A lane is one row of pixels, stretched to its height: that costs the same however many
 * ops there are.
 *
 * @param {CanvasRenderingContext2D} context whose origin is the top of the content
 * @param {Scene} scene
 * @param {Row[]} rows
 */
export function drawBoxes(context, scene, rows) {
  const { layout } = scene;
  const width = Math.round((layout.right - layout.left) * devicePixelRatio);
  const lanes = rows.flatMap((row) => row.device.lanes.map((lane, index) => ({ row, lane, strip: row.lanes[index] })));
  const lines = lanes.flatMap(({ row, lane, strip }) => halves(lane, strip).map((half) => ({ row, lane, ...half })));
  const made = picture(width, lines.length);
  made.pixels.fill(toPixel(scene.theme.idle));
  lines.forEach(({ row, lane, without }, line) => {
    const pixels = made.pixels.subarray(line * width, (line + 1) * width);
    paintLane(pixels, scene.time, lane, scene.looks[row.device.index].pixels, without);
  });
  const source = asSource(made);
  context.imageSmoothingEnabled = false;
  lines.forEach(({ top, height }, line) => {
    context.drawImage(source, 0, line, width, 1, layout.left, top, layout.right - layout.left, height);
  });
  for (const { row, lane, strip } of lanes) drawNumbers(context, scene, row, lane, strip);
}

/** @param {Lane} lane */
const hasBlocks = (lane) => lane.ops.some((op) => op.with);

/**
 * The strip of a lane, or its upper and lower half where it has blocks: above without their backwards, below without
 * their forwards.
 *
 * @param {Lane} lane
 * @param {import("./layout.js").Strip} strip
 * @returns {{top: number, height: number, without?: string}[]}
 */
function halves(lane, strip) {
  if (!hasBlocks(lane)) return [strip];
  const blocks = lane.ops.filter((op) => op.with);
  return blocks.slice(0, 2).map((op) => ({ ...stripOf(op, strip), without: op.op === "F" ? "BW" : "F" }));
}

/**
 * @param {Uint32Array} pixels of one lane, from left to right
 * @param {{fromUs: number, spanUs: number}} time in view
 * @param {Lane} lane
 * @param {Uint32Array} colours by look
 * @param {string} [without] kind of the ops of blocks that are left out
 */
export function paintLane(pixels, time, lane, colours, without) {
  const { startUs, endUs, look, ops } = lane;
  const width = pixels.length;
  const scale = width / time.spanUs;
  const roomForGap = ROOM_FOR_GAP_PX * devicePixelRatio;
  const gap = Math.round(devicePixelRatio);
  for (let index = Math.max(0, lastAtOrBefore(startUs, time.fromUs)); index < startUs.length; index += 1) {
    if (without && ops[index].with && ops[index].op === without) continue;
    const begin = Math.round((startUs[index] - time.fromUs) * scale);
    if (begin >= width) return;
    const end = Math.round((endUs[index] - time.fromUs) * scale);
    if (end < 0) continue;
    const to = end - begin >= roomForGap ? end - gap : Math.max(end, begin + 1);
    pixels.fill(colours[look[index]], Math.max(0, begin), to);
  }
}

/**
 * Microbatch numbers: all boxes of a kind and stage have theirs or none has.
 *
 * @param {CanvasRenderingContext2D} context
 * @param {Scene} scene
 * @param {Row} row
 * @param {Lane} lane
 * @param {import("./layout.js").Strip} strip
 */
function drawNumbers(context, scene, row, lane, strip) {
  const { time, layout } = scene;
  const scale = (layout.right - layout.left) / time.spanUs;
  const sizes = numberSizes(scene, lane, strip, scale);
  if (!sizes.some(Boolean)) return;
  const { problem } = scene.model.schedule;
  const { ink } = scene.looks[row.device.index];
  context.textAlign = "center";
  context.textBaseline = "middle";
  let font = 0;
  for (let index = Math.max(0, lastAtOrBefore(lane.startUs, time.fromUs)); index < lane.ops.length; index += 1) {
    const start = lane.startUs[index];
    if (start > time.toUs) return;
    const size = sizes[lane.look[index]];
    if (!size || lane.endUs[index] < time.fromUs) continue;
    if (size !== font) context.font = `${(font = size)}px ${FONT}`;
    context.fillStyle = ink[lane.look[index]];
    const x = layout.left + ((start + lane.endUs[index]) / 2 - time.fromUs) * scale - 0.5;
    const { top, height } = stripOf(lane.ops[index], strip);
    context.fillText(unitName(problem, lane.ops[index].microbatch), x, top + height / 2 + 0.5);
  }
}

/**
 * The font size of each look's numbers in CSS pixels, 0 where its narrowest box has no room.
 *
 * @param {Scene} scene
 * @param {Lane} lane
 * @param {import("./layout.js").Strip} strip
 * @param {number} pxPerUs
 */
function numberSizes({ model }, lane, strip, pxPerUs) {
  const room = hasBlocks(lane) ? strip.height / 2 : strip.height;
  const largest = Math.min(LARGEST_NUMBER_PX[lane.stream], Math.floor(room * 0.78));
  const { problem } = model.schedule;
  const digits = unitName(problem, problem.microbatches * sliceCount(problem) - 1).length;
  return lane.shortestUs.map((shortestUs) => {
    const size = Math.min(largest, Math.floor((shortestUs * pxPerUs * ROOM) / (digits * DIGIT_WIDTH)));
    return size >= SMALLEST_NUMBER_PX ? size : 0;
  });
}
