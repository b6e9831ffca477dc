/** The visible part of a chart on a canvas: time scale, labels, boxes, memory. */

import { timeUnit } from "../units.js";
import { drawBoxes } from "./boxes.js";
import { drawLabels } from "./labels.js";
import { drawMemory } from "./memory_strip.js";
import { FONT, SCALE_PX, xAt } from "./layout.js";
import { roundStep, tickText, ticksIn } from "../ticks.js";

/** @typedef {import("./layout.js").Scene} Scene */

/** Room that a mark of the time scale takes. */
const TICK_PX = { wide: 90, medium: 80, narrow: 60 };

/**
 * @param {CanvasRenderingContext2D} context scaled to CSS pixels
 * @param {Scene} scene
 */
export function drawChart(context, scene) {
  const { layout, theme, width, height, scrollTop } = scene;
  context.fillStyle = theme.plain.surface;
  context.fillRect(0, 0, width, height);
  drawScale(context, scene);
  context.save();
  context.beginPath();
  context.rect(0, SCALE_PX, width, height - SCALE_PX);
  context.clip();
  context.translate(0, SCALE_PX - scrollTop);
  const rows = layout.rows.filter(({ top, bottom }) => bottom >= scrollTop && top <= scrollTop + height);
  for (const row of rows) drawLabels(context, scene, row);
  context.beginPath();
  context.rect(layout.left, 0, layout.right - layout.left, layout.height);
  context.clip();
  drawBoxes(context, scene, rows);
  drawMemory(context, scene, rows);
  context.restore();
}

/**
 * The time scale, with its lines behind the rows.
 *
 * @param {CanvasRenderingContext2D} context
 * @param {Scene} scene
 */
function drawScale(context, scene) {
  const { layout, time, theme, height } = scene;
  const most = Math.max(2, Math.floor((layout.right - layout.left) / TICK_PX[layout.labels]));
  const step = roundStep(time.spanUs / most);
  const unit = timeUnit(time.endUs - time.beginUs);
  context.font = `11px ${FONT}`;
  context.textBaseline = "middle";
  context.textAlign = "center";
  for (const tick of ticksIn(time.fromUs - time.beginUs, time.toUs - time.beginUs, most)) {
    const x = Math.round(xAt(scene, tick + time.beginUs));
    context.fillStyle = theme.plain.grid;
    context.fillRect(x, SCALE_PX - 4, 1, height);
    context.fillStyle = theme.plain.faintInk;
    const text = tickText(tick, step, unit);
    const half = context.measureText(text).width / 2;
    context.fillText(text, Math.min(x, scene.width - half), SCALE_PX / 2); // whole, where the scale ends at the edge
  }
  context.textAlign = "right";
  context.fillText(layout.labels === "narrow" ? unit.name : `time (${unit.name})`, layout.left - 14, SCALE_PX / 2);
}
