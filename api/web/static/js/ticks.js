/** Marks of the time scale at round numbers. */

/**
 * @param {number} fromUs
 * @param {number} toUs
 * @param {number} most how many there is room for
 * @returns {number[]} times in us
 */
export function ticksIn(fromUs, toUs, most) {
  const step = roundStep((toUs - fromUs) / Math.max(1, most));
  const ticks = [];
  for (let n = Math.ceil(fromUs / step - 1e-9); n * step <= toUs * (1 + 1e-12); n += 1) ticks.push(n * step);
  return ticks;
}

/**
 * The smallest of 1, 2, 5 times a power of ten that is not below `step`.
 *
 * @param {number} step
 */
export function roundStep(step) {
  const power = 10 ** Math.floor(Math.log10(step));
  return [1, 2, 5, 10].map((factor) => factor * power).find((round) => round >= step * (1 - 1e-9)) ?? 10 * power;
}

/**
 * A time on the scale, with just as many decimals as tell one mark from the next.
 *
 * @param {number} timeUs
 * @param {number} stepUs
 * @param {import("./units.js").Unit} unit
 */
export function tickText(timeUs, stepUs, unit) {
  const rounded = timeUs / unit.size || 0; // no "-0"
  const decimals = Math.min(6, Math.max(0, -Math.floor(Math.log10(stepUs / unit.size) + 1e-9)));
  return rounded.toLocaleString("en-US", {
    minimumFractionDigits: decimals,
    maximumFractionDigits: decimals,
  });
}
