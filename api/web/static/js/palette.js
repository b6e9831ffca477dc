/** Colours of the chart: one for each kind of op, lighter for later stages of a device, with legible ink. */

import { KINDS } from "./kinds.js";

/** @typedef {[number, number, number]} Rgb shares of red, green and blue */

/**
 * The colours that stand in the style sheet at this moment, for drawing on a canvas.
 *
 * @typedef {object} Theme
 * @property {Record<import("./types.js").Kind, Rgb>} kinds
 * @property {number} lightest share of white in the last of a device's stages
 * @property {Rgb} idle
 * @property {Rgb} memoryFill
 * @property {Rgb} memoryEdge
 * @property {Record<"surface" | "ink" | "faintInk" | "grid" | "budget" | "path", string>} plain
 */

const PLAIN = {
  surface: "--surface",
  ink: "--ink",
  faintInk: "--faint-ink",
  grid: "--grid",
  budget: "--budget",
  path: "--danger",
};

/**
 * Read the colours where `element` stands. A custom property may hold a choice between dark and light that only a
 * real property resolves, hence the probe.
 *
 * @param {HTMLElement} element
 * @returns {Theme}
 */
export function readTheme(element) {
  const probe = document.createElement("span");
  probe.hidden = true;
  element.append(probe);
  /** @param {string} name */
  const resolve = (name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  };
  const plain = /** @type {Theme["plain"]} */ (
    Object.fromEntries(Object.entries(PLAIN).map(([name, property]) => [name, resolve(property)]))
  );
  const kinds = /** @type {Theme["kinds"]} */ (
    Object.fromEntries(KINDS.map((kind) => [kind, parseRgb(resolve(`--plot-op-${kind.toLowerCase()}`))]))
  );
  const [idle, memoryFill, memoryEdge] = ["--idle", "--memory-fill", "--memory-edge"].map((name) => parseRgb(resolve(name)));
  probe.remove();
  const lightest = Number(getComputedStyle(element).getPropertyValue("--plot-lightest"));
  return { kinds, lightest, idle, memoryFill, memoryEdge, plain };
}

/**
 * The colour of an op whose stage is the `rank`-th of the `stages` on its device: later stages are lighter.
 *
 * @param {Theme} theme
 * @param {import("./types.js").Kind} kind
 * @param {number} rank
 * @param {number} stages
 * @returns {Rgb}
 */
export function opColour(theme, kind, rank, stages) {
  const white = stages > 1 ? (theme.lightest * rank) / (stages - 1) : 0;
  const [red, green, blue] = theme.kinds[kind];
  return [red + (1 - red) * white, green + (1 - green) * white, blue + (1 - blue) * white];
}

/**
 * White or black, whichever has the higher contrast on `colour` (WCAG 2 relative luminance).
 *
 * @param {Rgb} colour
 */
export function inkOn(colour) {
  const [red, green, blue] = colour.map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  const luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  return 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 ? "#fff" : "#000";
}

/** @param {Rgb} colour */
export function cssColour(colour) {
  return `rgb(${colour.map((share) => Math.round(255 * share)).join(" ")})`;
}

/**
 * @param {string} text such as ``rgb(0, 114, 178)``
 * @returns {Rgb}
 */
function parseRgb(text) {
  const [red, green, blue] = (text.match(/[\d.]+/g) ?? []).map(Number);
  return [red / 255, green / 255, blue / 255];
}
