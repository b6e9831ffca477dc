/** Which op stands at a point of the chart, and which is the next one. */

import { lastAtOrBefore } from "../memory.js";
import { SCALE_PX, timeAt } from "./scene.js";

/**
 * An op by its places: row of the layout, lane of the row, place in the lane.
 *
 * @typedef {{row: number, lane: number, place: number}} Spot
 */

/** How far beside an op a pointer may be, in CSS pixels: ops can be narrower than a pointer is exact. */
const TOLERANCE_PX = 2;

/**
 * @param {import("./scene.js").Scene} scene
 * @param {number} x
 * @param {number} y from the top of the canvas
 * @returns {Spot | null}
 */
export function spotAt(scene, x, y) {
  const { layout } = scene;
  const contentY = y - SCALE_PX + scene.scrollTop;
  if (x < layout.left || x > layout.right || y < SCALE_PX) return null;
  const row = layout.rows.findIndex(({ top, bottom }) => top <= contentY && contentY <= bottom);
  if (row < 0) return null;
  const lane = layout.rows[row].lanes.findIndex(({ top, height }) => top <= contentY && contentY < top + height + 2);
  if (lane < 0) return null;
  const place = placeAt(scene, layout.rows[row].device.lanes[lane], timeAt(scene, x));
  return place < 0 ? null : { row, lane, place };
}

/**
 * @param {import("./scene.js").Scene} scene
 * @param {import("./model.js").Lane} lane
 * @param {number} timeUs
 */
function placeAt(scene, lane, timeUs) {
  const { time, layout } = scene;
  const toleranceUs = (TOLERANCE_PX * time.spanUs) / (layout.right - layout.left);
  const place = lastAtOrBefore(lane.startUs, timeUs);
  if (place >= 0 && timeUs <= lane.endUs[place]) return place;
  if (place + 1 < lane.ops.length && lane.startUs[place + 1] - timeUs <= toleranceUs) return place + 1;
  return place >= 0 && timeUs - lane.endUs[place] <= toleranceUs ? place : -1;
}

/**
 * Where the same op stands in another schedule.
 *
 * @param {import("./scene.js").Scene} scene
 * @param {import("../types.js").PlannedOp} op
 * @returns {Spot | null} null where there is no such op
 */
export function spotOf(scene, { op: kind, stage, microbatch }) {
  for (const [row, { device }] of scene.layout.rows.entries()) {
    for (const [lane, { ops }] of device.lanes.entries()) {
      const place = ops.findIndex((op) => op.op === kind && op.stage === stage && op.microbatch === microbatch);
      if (place >= 0) return { row, lane, place };
    }
  }
  return null;
}

/**
 * The spot a step away: along its lane, or on another lane at about the same time.
 *
 * @param {import("./scene.js").Scene} scene
 * @param {Spot | null} from none: the first op that can be seen
 * @param {"next" | "previous" | "below" | "above"} step
 * @returns {Spot | null} null where there is none
 */
export function stepFrom(scene, from, step) {
  if (!from) return firstVisible(scene);
  const { rows } = scene.layout;
  const lane = rows[from.row].device.lanes[from.lane];
  if (step === "next") return from.place + 1 < lane.ops.length ? { ...from, place: from.place + 1 } : null;
  if (step === "previous") return from.place > 0 ? { ...from, place: from.place - 1 } : null;
  const lanes = rows.flatMap(({ device }, row) => device.lanes.map((_, index) => ({ row, lane: index })));
  const at = lanes.findIndex(({ row, lane: index }) => row === from.row && index === from.lane);
  const other = lanes[at + (step === "below" ? 1 : -1)];
  if (!other) return null;
  const target = rows[other.row].device.lanes[other.lane];
  const middleUs = (lane.startUs[from.place] + lane.endUs[from.place]) / 2;
  return target.ops.length ? { ...other, place: Math.max(0, lastAtOrBefore(target.startUs, middleUs)) } : null;
}

/**
 * @param {import("./scene.js").Scene} scene
 * @returns {Spot | null}
 */
function firstVisible(scene) {
  const { rows } = scene.layout;
  const row = Math.max(0, rows.findIndex(({ top }) => top >= scene.scrollTop));
  const lane = rows[row]?.device.lanes[0];
  if (!lane?.ops.length) return null;
  const before = lastAtOrBefore(lane.startUs, scene.time.fromUs);
  const place = before >= 0 && lane.endUs[before] > scene.time.fromUs ? before : before + 1;
  return { row, lane: 0, place: Math.min(place, lane.ops.length - 1) };
}
