/** The memory of a device over time, as the service finds it (`POST /v1/analyze`). */

/**
 * A step function: the level is `bytes[k]` from `timesUs[k]` until the next time; 0 before the first.
 *
 * @typedef {{timesUs: Float64Array, bytes: Float64Array}} Curve
 */

/**
 * @param {Curve} curve
 * @param {number} timeUs
 * @returns {number} bytes held at that time
 */
export function levelAt(curve, timeUs) {
  return curve.bytes[lastAtOrBefore(curve.timesUs, timeUs)] ?? 0;
}

/**
 * @param {Float64Array} times ascending
 * @param {number} time
 * @returns {number} the last index whose time is not after `time`, or -1
 */
export function lastAtOrBefore(times, time) {
  let low = 0;
  let high = times.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] <= time) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}
