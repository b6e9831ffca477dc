/** The layer above the chart: outlines of a microbatch's ops and the time under the pointer. */

import { tickText } from "../ticks.js";
import { timeUnit } from "../units.js";
import { opAt } from "./hit.js";
import { FONT, SCALE_PX, timeAt, xAt } from "./layout.js";

/** @typedef {import("./layout.js").Scene} Scene */

/**
 * @param {CanvasRenderingContext2D} context scaled to CSS pixels
 * @param {Scene} scene
 * @param {import("./hit.js").Spot | null} spot
 * @param {number | null} pointerX
 */
export function drawHighlight(context, scene, spot, pointerX) {
  context.clearRect(0, 0, scene.width, scene.height);
  if (pointerX !== null) drawPointerTime(context, scene, pointerX);
  if (!spot) return;
  context.save();
  context.beginPath();
  context.rect(scene.layout.left - 2, SCALE_PX, scene.layout.right - scene.layout.left + 4, scene.height - SCALE_PX);
  context.clip();
  drawMicrobatch(context, scene, spot);
  context.restore();
}

/**
 * Outlines the op at `spot`, and every other op of its microbatch more thinly.
 *
 * @param {CanvasRenderingContext2D} context
 * @param {Scene} scene
 * @param {import("./hit.js").Spot} spot
 */
function drawMicrobatch(context, scene, spot) {
  const { microbatch } = opAt(scene, spot);
  context.strokeStyle = scene.theme.plain.ink;
  scene.layout.rows.forEach(({ device, lanes }, row) => {
    device.lanes.forEach((lane, laneIndex) => {
      lane.ops.forEach((op, index) => {
        if (op.microbatch !== microbatch) return;
        if (op.end_us < scene.time.fromUs || op.start_us > scene.time.toUs) return;
        const chosen = row === spot.row && laneIndex === spot.lane && index === spot.index;
        outline(context, scene, op, lanes[laneIndex], chosen ? 3 : 1.25);
      });
    });
  });
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Scene} scene
 * @param {import("../types.js").PlannedOp} op
 * @param {import("./layout.js").Strip} strip
 * @param {number} width of the line
 */
function outline(context, scene, op, strip, width) {
  const left = xAt(scene, op.start_us);
  const top = strip.top + SCALE_PX - scene.scrollTop;
  context.lineWidth = width;
  context.strokeRect(left, top + 0.5, Math.max(1, xAt(scene, op.end_us) - left - 1), strip.height - 1);
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Scene} scene
 * @param {number} x
 */
function drawPointerTime(context, scene, x) {
  const { layout, theme, time } = scene;
  if (x < layout.left || x > layout.right) return;
  const stepUs = time.spanUs / (layout.right - layout.left);
  const text = tickText(timeAt(scene, x) - time.beginUs, stepUs, timeUnit(time.endUs - time.beginUs));
  context.fillStyle = theme.plain.faintInk;
  context.fillRect(Math.round(x), SCALE_PX - 2, 1, scene.height);
  context.font = `600 11px ${FONT}`;
  const width = context.measureText(text).width + 10;
  const left = Math.min(Math.max(x - width / 2, layout.left), layout.right - width);
  context.fillRect(left, 3, width, SCALE_PX - 8);
  context.fillStyle = theme.plain.surface;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillText(text, left + width / 2, SCALE_PX / 2);
}
