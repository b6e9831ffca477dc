/** The memory of devices over time, with their budgets, on a strip below the lanes of each. */

import { lastAtOrBefore } from "../memory.js";
import { asSource, picture, toPixel } from "./pixels.js";

/** @typedef {import("./layout.js").Scene} Scene */

/**
 * Draw the strips of all `rows`, from one picture in which they stand below each other.
 *
 * @param {CanvasRenderingContext2D} context
 * @param {Scene} scene
 * @param {import("./layout.js").Row[]} rows
 */
export function drawMemory(context, scene, rows) {
  const { model, theme, layout } = scene;
  const strips = rows.flatMap(({ device, memory }) => (memory ? [{ device, strip: memory }] : []));
  if (!strips.length) return;
  const shownWidth = layout.right - layout.left;
  const width = Math.round(shownWidth * devicePixelRatio);
  const height = Math.round(strips[0].strip.height * devicePixelRatio);
  const made = picture(width, height * strips.length);
  strips.forEach(({ device }, index) => {
    const pixels = made.pixels.subarray(index * width * height, (index + 1) * width * height);
    paintCurve(pixels, height, columnLevels(device.memory, scene.time, width), model.topBytes, theme);
  });
  const source = asSource(made);
  strips.forEach(({ device, strip }, index) => {
    context.drawImage(source, 0, index * height, width, height, layout.left, strip.top, shownWidth, strip.height);
    drawBudget(context, scene, device, strip);
  });
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Scene} scene
 * @param {import("./model.js").Device} device
 * @param {import("./layout.js").Strip} strip
 */
function drawBudget(context, { model, theme, layout }, device, strip) {
  if (device.budgetBytes === null || device.budgetBytes > model.topBytes) return;
  const y = Math.round(strip.top + strip.height * (1 - device.budgetBytes / model.topBytes)) - 0.5;
  context.beginPath();
  context.setLineDash([5, 3]);
  context.moveTo(layout.left, y);
  context.lineTo(layout.right, y);
  context.strokeStyle = theme.plain.budget;
  context.lineWidth = 1.25;
  context.stroke();
  context.setLineDash([]);
}

/**
 * The highest level within each column: a peak is never hidden, however short it is.
 *
 * @param {import("../memory.js").Curve} curve
 * @param {import("./time_window.js").TimeWindow} time
 * @param {number} columns
 * @returns {Float64Array} bytes
 */
export function columnLevels({ timesUs, bytes }, time, columns) {
  const highest = new Float64Array(columns);
  const usPerColumn = time.spanUs / columns;
  let index = lastAtOrBefore(timesUs, time.fromUs);
  let level = index < 0 ? 0 : bytes[index];
  for (let column = 0; column < columns; column += 1) {
    const untilUs = time.fromUs + (column + 1) * usPerColumn;
    highest[column] = level;
    while (index + 1 < timesUs.length && timesUs[index + 1] < untilUs) {
      index += 1;
      level = bytes[index];
      if (level > highest[column]) highest[column] = level;
    }
  }
  return highest;
}

/**
 * @param {Uint32Array} pixels of one strip, row by row
 * @param {number} height
 * @param {Float64Array} levels one for each column
 * @param {number} topBytes at the upper edge
 * @param {import("../palette.js").Theme} theme
 */
function paintCurve(pixels, height, levels, topBytes, theme) {
  const width = levels.length;
  const fill = toPixel(theme.memoryFill);
  const edge = toPixel(theme.memoryEdge);
  const thick = Math.max(1, Math.round(devicePixelRatio));
  const lowest = height - thick;
  let before = Math.round(lowest * (1 - levels[0] / topBytes));
  for (let column = 0; column < width; column += 1) {
    const top = Math.round(lowest * (1 - levels[column] / topBytes));
    const edgeFrom = Math.min(top, before);
    const edgeTo = Math.max(top + thick, before);
    for (let y = edgeFrom; y < height; y += 1) {
      pixels[y * width + column] = y < edgeTo || y >= lowest ? edge : fill;
    }
    before = top;
  }
}
