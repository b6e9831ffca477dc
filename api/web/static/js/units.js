/** Numbers as text, formatted as in the pictures: units that suit the size, thousands separated. */

/** @typedef {{name: string, size: number}} Unit */

/** @type {Unit[]} */
const TIME_UNITS = [
  { name: "s", size: 1e6 },
  { name: "ms", size: 1e3 },
  { name: "µs", size: 1 },
];

/** @type {Unit[]} */
const MEMORY_UNITS = [
  { name: "TiB", size: 2 ** 40 },
  { name: "GiB", size: 2 ** 30 },
  { name: "MiB", size: 2 ** 20 },
  { name: "KiB", size: 2 ** 10 },
  { name: "B", size: 1 },
];

const NO_BREAK_SPACE = "\u00a0";

/** Shown instead of a missing number. */
export const NONE = "–";

/**
 * The largest unit of which `spanUs` holds at least one.
 *
 * @param {number} spanUs
 */
export function timeUnit(spanUs) {
  return fitting(TIME_UNITS, Math.abs(spanUs));
}

/**
 * A time with four significant digits.
 *
 * @param {number | null | undefined} timeUs
 * @param {Unit} [unit] default: the one that suits the time itself
 */
export function timeText(timeUs, unit) {
  if (timeUs === null || timeUs === undefined) return NONE;
  const chosen = unit ?? timeUnit(timeUs);
  return `${rounded(timeUs / chosen.size, 4)}${NO_BREAK_SPACE}${chosen.name}`;
}

/**
 * Idle times of a device before, within and after its ops, with two decimals at most: ``20 + 4 + 0 ms``.
 *
 * @param {number[]} idleUs
 * @param {Unit} unit
 */
export function idleText(idleUs, unit) {
  const times = idleUs.map((us) => us / unit.size);
  const decimals = (/** @type {number} */ time) => (time >= 100 ? 0 : time >= 10 ? 1 : 2);
  const texts = times.map((time) => time.toLocaleString("en-US", { maximumFractionDigits: decimals(time) }));
  return `${texts.join(" + ")}${NO_BREAK_SPACE}${unit.name}`;
}

/**
 * The largest unit of which `sizeBytes` holds at least one.
 *
 * @param {number} sizeBytes
 */
export function memoryUnit(sizeBytes) {
  return fitting(MEMORY_UNITS, sizeBytes);
}

/**
 * A size with three significant digits; whole bytes.
 *
 * @param {number | null | undefined} sizeBytes
 * @param {Unit} [unit]
 */
export function bytesText(sizeBytes, unit) {
  if (sizeBytes === null || sizeBytes === undefined) return NONE;
  const chosen = unit ?? memoryUnit(sizeBytes);
  return `${rounded(sizeBytes / chosen.size, chosen.size === 1 ? 0 : 3)}${NO_BREAK_SPACE}${chosen.name}`;
}

/**
 * A share as a percentage: one decimal, two below one percent; never 0 for what is above 0.
 *
 * @param {number | null | undefined} share
 */
export function percentText(share) {
  if (share === null || share === undefined) return NONE;
  const percent = 100 * share;
  if (percent > 0 && percent < 0.01) return `<${NO_BREAK_SPACE}0.01${NO_BREAK_SPACE}%`;
  return `${percent.toFixed(percent > 0 && percent < 1 ? 2 : 1)}${NO_BREAK_SPACE}%`;
}

/**
 * A count with its thousands separated and its noun in the right number.
 *
 * @param {number} count
 * @param {string} noun
 * @param {string} [plural]
 */
export function countText(count, noun, plural = `${noun}s`) {
  return `${count.toLocaleString("en-US")} ${count === 1 ? noun : plural}`;
}

/**
 * @param {Unit[]} units
 * @param {number} amount
 */
function fitting(units, amount) {
  return units.find((unit) => amount >= unit.size) ?? units[units.length - 1];
}

/**
 * @param {number} value
 * @param {number} digits
 */
function rounded(value, digits) {
  const whole = value ? Math.floor(Math.log10(Math.abs(value))) + 1 : digits;
  const decimals = Math.max(0, digits - Math.max(1, whole));
  if (!Number(value.toFixed(decimals))) return "0";
  return value.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
}
