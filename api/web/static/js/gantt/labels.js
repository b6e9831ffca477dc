/** Labels beside the rows: device and stages to the left, figures to the right. */

import { bytesText, idleText, memoryUnit, timeUnit } from "../units.js";
import { FONT } from "./layout.js";

/** @typedef {import("./layout.js").Scene} Scene */
/** @typedef {import("./layout.js").Row} Row */

/** Between the labels and the chart. */
const GAP_PX = 14;
const LOWEST_LANE_PX = 10;
/** Rows closer than this leave out labels, so that those drawn do not overlap. */
const LOWEST_LABEL_PX = 12;
const LOWEST_STRIP_PX = 12;
/** Lanes below this height have smaller labels. */
const LOW_PX = 24;

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Scene} scene
 * @param {Row} row
 */
export function drawLabels(context, scene, row) {
  const { layout, theme } = scene;
  const { device } = row;
  const right = layout.left - GAP_PX;
  const isLow = row.lanes[0].height < LOW_PX;
  context.textAlign = "right";
  context.textBaseline = "middle";
  context.fillStyle = theme.plain.ink;
  context.font = `600 ${isLow ? 11 : 13}px ${FONT}`;
  if (layout.rowPitch >= LOWEST_LABEL_PX || device.index % Math.ceil(LOWEST_LABEL_PX / layout.rowPitch) === 0) {
    context.fillText(deviceLabel(context, device, right - 4), right, middleY(row.lanes[0]));
  }
  context.fillStyle = theme.plain.faintInk;
  context.font = `${isLow ? 10 : 11}px ${FONT}`;
  if (row.memory && row.memory.height >= LOWEST_STRIP_PX && layout.labels !== "narrow") {
    context.fillText(stagesText(device.stages), right, middleY(row.memory), right - 8);
  }
  device.lanes.forEach(({ stream }, index) => {
    const strip = row.lanes[index];
    if (stream !== "compute" && strip.height >= LOWEST_LANE_PX) context.fillText(stream, right, middleY(strip), right - 4);
  });
  if (layout.labels === "wide" && layout.rowPitch >= LOWEST_LABEL_PX) drawFigures(context, scene, row, isLow ? 11 : 12);
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Scene} scene
 * @param {Row} row
 * @param {number} size of the font
 */
function drawFigures(context, { layout, theme, model, width }, row, size) {
  const { plan, budgetBytes, idleUs } = row.device;
  const left = layout.right + GAP_PX;
  context.textAlign = "left";
  context.font = `${size}px ${FONT}`;
  const unit = timeUnit(model.endUs - model.beginUs);
  if (idleUs) context.fillText(`idle ${idleText(idleUs, unit)}`, left, middleY(row.lanes[0]), width - left);
  if (!row.memory || row.memory.height < LOWEST_STRIP_PX) return;
  if (budgetBytes !== null && plan.peak_bytes > budgetBytes) context.fillStyle = theme.plain.budget;
  const sizeUnit = memoryUnit(model.topBytes);
  const limit = budgetBytes === null ? "" : ` of ${bytesText(budgetBytes, sizeUnit)}`;
  context.fillText(`peak ${bytesText(plan.peak_bytes, sizeUnit)}${limit}`, left, middleY(row.memory), width - left);
}

/**
 * The longest form of a device's name that fits: whole, with its number alone, or cut in the middle.
 *
 * @param {CanvasRenderingContext2D} context with the font in which it will be drawn
 * @param {import("./model.js").Device} device
 * @param {number} most its width
 */
export function deviceLabel(context, { name, index }, most) {
  const isDefault = name === `device ${index}`;
  const forms = isDefault ? [name, `dev ${index}`, `d${index}`, String(index)] : [name];
  return forms.find((form) => context.measureText(form).width <= most) ?? fitted(context, name, most);
}

/**
 * A text cut in the middle to the room there is: names of devices differ at their end more often than not.
 *
 * @param {CanvasRenderingContext2D} context with the font in which it will be drawn
 * @param {string} text
 * @param {number} most its width
 */
export function fitted(context, text, most) {
  if (context.measureText(text).width <= most) return text;
  const letters = [...text];
  let low = 1;
  let high = letters.length;
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (context.measureText(cut(letters, middle)).width <= most) low = middle;
    else high = middle - 1;
  }
  return cut(letters, low);
}

/**
 * @param {string[]} letters
 * @param {number} shown
 */
function cut(letters, shown) {
  const head = Math.floor(shown / 3);
  return `${letters.slice(0, head).join("")}…${letters.slice(letters.length - (shown - head)).join("")}`;
}

/** @param {import("./layout.js").Strip} strip */
function middleY({ top, height }) {
  return top + height / 2;
}

/** @param {number[]} stages */
function stagesText(stages) {
  if (!stages.length) return "no stage";
  if (stages.length > 3) return `${stages.length} stages`;
  return `${stages.length > 1 ? "stages" : "stage"} ${stages.join(", ")}`;
}
