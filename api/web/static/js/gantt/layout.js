/** Geometry of the chart: rows of devices, lanes of streams, and the mapping between time and pixels. */

/** @typedef {import("./model.js").Model} Model */

/**
 * @typedef {object} Strip
 * @property {number} top
 * @property {number} height
 *
 * @typedef {object} Row one device: its streams, and its memory where that is shown
 * @property {import("./model.js").Device} device
 * @property {Strip[]} lanes one for each of the device's
 * @property {Strip | null} memory
 * @property {number} top
 * @property {number} bottom
 *
 * @typedef {object} Layout
 * @property {Row[]} rows
 * @property {number} height of all rows
 * @property {number} left where the time scale begins
 * @property {number} right where it ends
 * @property {"wide" | "medium" | "narrow"} labels how much is written beside the rows
 *
 * @typedef {object} Scene everything that drawing needs
 * @property {import("./model.js").Model} model
 * @property {Layout} layout in CSS pixels from the top of the content
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

const COMPUTE_PX = 32;
const TRANSFER_PX = 14;
const MEMORY_PX = 34;
const ROW_GAP_PX = 20;
const LANE_GAP_PX = 2;
const MEMORY_GAP_PX = 4;
const TOP_PX = 8;

/** Room to the left and right of the time scale. */
const GUTTERS = { wide: [124, 168], medium: [100, 12], narrow: [58, 8] };

/**
 * @param {Model} model
 * @param {number} width of the chart
 * @param {{memory: boolean}} shown
 * @returns {Layout}
 */
export function buildLayout(model, width, shown) {
  const labels = width >= 900 ? "wide" : width >= 560 ? "medium" : "narrow";
  const stretch = rowStretch(model.devices.length);
  /** @type {Row[]} */
  const rows = [];
  let top = TOP_PX;
  for (const device of model.devices) {
    const row = buildRow(device, top, stretch, shown.memory);
    rows.push(row);
    top = row.bottom + Math.round(stretch * (shown.memory ? ROW_GAP_PX : ROW_GAP_PX / 2));
  }
  const [left, right] = GUTTERS[labels];
  return { rows, height: top, left, right: Math.max(left + 40, width - right), labels };
}

/**
 * Fewer devices are drawn taller, more of them flatter.
 *
 * @param {number} devices
 */
function rowStretch(devices) {
  return Math.min(1.2, Math.max(0.5, Math.sqrt(8 / devices)));
}

/**
 * @param {import("./model.js").Device} device
 * @param {number} top
 * @param {number} stretch
 * @param {boolean} withMemory
 * @returns {Row}
 */
function buildRow(device, top, stretch, withMemory) {
  let next = top;
  const lanes = device.lanes.map((lane) => {
    const height = Math.round(stretch * (lane.stream === "compute" ? COMPUTE_PX : TRANSFER_PX));
    const strip = { top: next, height };
    next += height + LANE_GAP_PX;
    return strip;
  });
  const memory = withMemory ? { top: next + MEMORY_GAP_PX, height: Math.round(stretch * MEMORY_PX) } : null;
  return { device, lanes, memory, top, bottom: memory ? memory.top + memory.height : next - LANE_GAP_PX };
}

/**
 * @param {Scene} scene
 * @param {number} timeUs
 */
export function xAt({ layout, time }, timeUs) {
  return layout.left + ((timeUs - time.fromUs) / time.spanUs) * (layout.right - layout.left);
}

/**
 * @param {Scene} scene
 * @param {number} x
 */
export function timeAt({ layout, time }, x) {
  return time.fromUs + ((x - layout.left) / (layout.right - layout.left)) * time.spanUs;
}
