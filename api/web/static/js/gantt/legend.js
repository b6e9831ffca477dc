/** The legend: kinds of op present, shades of a device's stages, idle time, memory and budget. */

import { element } from "../elements.js";
import { KIND, KINDS, lookOf } from "../kinds.js";
import { cssColour, opColour, readTheme } from "../palette.js";

const MOST_SHADES = 6;

/**
 * @param {HTMLElement} legend
 * @param {import("./model.js").Model} model
 * @param {boolean} withMemory
 * @param {boolean} withFigures true where idle times stand beside the rows
 */
export function fillLegend(legend, model, withMemory, withFigures) {
  const passes = [...model.kinds].filter((kind) => !KIND[kind]).sort();
  const kinds = [...KINDS.filter((kind) => model.kinds.has(kind)), ...passes];
  const entries = kinds.map((kind) => entry(`${kind} ${KIND[lookOf(kind)].label}`, `op-${lookOf(kind).toLowerCase()}`));
  if (model.mostStages > 1) entries.push(shades(legend, model.mostStages));
  entries.push(entry(withFigures ? "idle before + within + after" : "idle", "idle"));
  if (withMemory) entries.push(entry("memory", "memory"));
  const limited = model.devices.some((device) => device.budgetBytes !== null);
  if (withMemory && limited) entries.push(entry("budget", "budget"));
  legend.replaceChildren(...entries);
}

/**
 * @param {string} text
 * @param {string} look name of its style
 */
function entry(text, look) {
  const item = element("li");
  item.append(element("span", "", `swatch swatch-${look}`), text);
  return item;
}

/**
 * @param {HTMLElement} legend
 * @param {number} stages
 */
function shades(legend, stages) {
  const item = element("li");
  const theme = readTheme(legend);
  for (let rank = 0; rank < Math.min(stages, MOST_SHADES); rank += 1) {
    const swatch = element("span", "", "swatch swatch-shade");
    swatch.style.backgroundColor = cssColour(opColour(theme, "F", rank, Math.min(stages, MOST_SHADES)));
    item.append(swatch);
  }
  item.append("first to last stage");
  return item;
}
