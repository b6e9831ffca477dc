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
 * @property {number} rowPitch from one row to the next, on average
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
const LARGEST_SCALE = 1.2;

/** Room to the left and right of the time scale. */
const GUTTERS = { wide: [124, 168], medium: [100, 12], narrow: [58, 8] };

/**
 * @param {Model} model
 * @param {number} width of the chart
 * @param {boolean} withMemory
 * @param {number} scale of the height of rows
 * @returns {Layout}
 */
export function buildLayout(model, width, withMemory, scale) {
  const labels = width >= 900 ? "wide" : width >= 560 ? "medium" : "narrow";
  /** @type {Row[]} */
  const rows = [];
  let top = TOP_PX;
  for (const device of model.devices) {
    const row = buildRow(device, top, scale, withMemory);
    rows.push(row);
    top = row.bottom + Math.max(1, Math.floor(scale * (withMemory ? ROW_GAP_PX : ROW_GAP_PX / 2)));
  }
  const [left, right] = GUTTERS[labels];
  const rowPitch = (top - TOP_PX) / rows.length;
  return { rows, height: top, left, right: Math.max(left + 40, width - right), labels, rowPitch };
}

/**
 * The largest scale at which all rows fit into `room`.
 *
 * @param {Model} model
 * @param {boolean} withMemory
 * @param {number} room in CSS pixels
 * @param {number} least scale, at which rows may no longer fit
 */
export function fittingScale(model, withMemory, room, least) {
  let low = least;
  let high = LARGEST_SCALE;
  if (buildLayout(model, 0, withMemory, high).height <= room) return high;
  for (let step = 0; step < 12; step += 1) {
    const middle = (low + high) / 2;
    if (buildLayout(model, 0, withMemory, middle).height <= room) low = middle;
    else high = middle;
  }
  return low;
}

/**
 * @param {import("./model.js").Device} device
 * @param {number} top
 * @param {number} scale
 * @param {boolean} withMemory
 * @returns {Row}
 */
function buildRow(device, top, scale, withMemory) {
  const spread = Math.min(1, 2 * scale);
  let next = top;
  const lanes = device.lanes.map((lane) => {
    const height = Math.max(1, Math.floor(scale * (lane.stream === "compute" ? COMPUTE_PX : TRANSFER_PX)));
    const strip = { top: next, height };
    next += height + Math.floor(spread * LANE_GAP_PX);
    return strip;
  });
  const memoryTop = next + Math.floor(spread * MEMORY_GAP_PX);
  const memory = withMemory ? { top: memoryTop, height: Math.max(1, Math.floor(scale * MEMORY_PX)) } : null;
  const last = lanes[lanes.length - 1];
  return { device, lanes, memory, top, bottom: memory ? memory.top + memory.height : last.top + last.height };
}

/**
 * The part of a lane's strip that an op is drawn in. Of a block the forward has the upper half, the backward the lower.
 *
 * @param {import("../types.js").PlannedOp} op
 * @param {Strip} strip
 * @returns {Strip}
 */
export function stripOf({ op, with: partner }, { top, height }) {
  if (!partner) return { top, height };
  const upper = Math.round(height / 2);
  return op === "F" ? { top, height: upper } : { top: top + upper, height: height - upper };
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
