/** Where everything stands on the chart, in CSS pixels from the top of its content. */

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
 */

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
export function layoutOf(model, width, shown) {
  const labels = width >= 900 ? "wide" : width >= 560 ? "medium" : "narrow";
  const stretch = stretchOf(model.devices.length);
  /** @type {Row[]} */
  const rows = [];
  let top = TOP_PX;
  for (const device of model.devices) {
    const row = rowOf(device, top, stretch, shown.memory);
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
function stretchOf(devices) {
  return Math.min(1.2, Math.max(0.5, Math.sqrt(8 / devices)));
}

/**
 * @param {import("./model.js").Device} device
 * @param {number} top
 * @param {number} stretch
 * @param {boolean} withMemory
 * @returns {Row}
 */
function rowOf(device, top, stretch, withMemory) {
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
