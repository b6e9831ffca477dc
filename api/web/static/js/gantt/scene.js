/** What a chart draws: a model, where it stands, the stretch of time in view and the colours. */

/**
 * @typedef {object} Scene
 * @property {import("./model.js").Model} model
 * @property {import("./layout.js").Layout} layout
 * @property {import("./time_window.js").TimeWindow} time
 * @property {import("./looks.js").Looks[]} looks by device
 * @property {import("../palette.js").Theme} theme
 * @property {number} width in CSS pixels
 * @property {number} height in CSS pixels
 * @property {number} scrollTop how far the rows are scrolled up
 */

/** Height of the time scale above the rows. */
export const SCALE_PX = 26;

export const FONT = "system-ui, sans-serif";

/**
 * @param {Scene} scene
 * @param {number} timeUs
 */
export function xOf({ layout, time }, timeUs) {
  return layout.left + ((timeUs - time.fromUs) / time.spanUs) * (layout.right - layout.left);
}

/**
 * @param {Scene} scene
 * @param {number} x
 */
export function timeAt({ layout, time }, x) {
  return time.fromUs + ((x - layout.left) / (layout.right - layout.left)) * time.spanUs;
}
