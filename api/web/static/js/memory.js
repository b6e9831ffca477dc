/** The memory of a device over time, from a schedule and the sizes in its problem (docs/reference/contract.md). */

/**
 * A step function: the level is `bytes[k]` from `timesUs[k]` until the next time; 0 before the first.
 *
 * @typedef {{timesUs: Float64Array, bytes: Float64Array}} Curve
 */

/** @typedef {import("./types.js").Stage} Stage */

/**
 * Bytes that an op takes at its start, and the signed change at its end.
 *
 * @param {Stage} stage
 * @param {import("./types.js").Kind} kind
 * @returns {[number, number]}
 */
export function deviceEffect(stage, kind) {
  const moved = stage.offload?.bytes ?? 0;
  if (kind === "O") return [0, -moved];
  if (kind === "R") return [moved, 0];
  const held = stage.activation_bytes;
  const kept = stage.backward_weight_bytes;
  const work = stage.workspace_bytes?.[kind] ?? 0;
  const atEnd = { F: 0, B: kept - held, W: -kept, BW: -held }[kind];
  return [work + (kind === "F" ? held : 0), atEnd - work];
}

/**
 * The memory of one device at the predicted times. At one instant ends count before starts.
 *
 * @param {import("./types.js").Schedule} schedule
 * @param {number} device
 * @returns {Curve}
 */
export function plannedMemory(schedule, device) {
  const plan = schedule.devices[device];
  const ops = [...plan.compute, ...(plan.offload ?? []), ...(plan.reload ?? [])];
  /** @type {[number, number][]} */
  const changes = [];
  for (const op of ops) {
    const [atStart, atEnd] = deviceEffect(schedule.problem.stages[op.stage], op.op);
    if (atStart) changes.push([op.start_us, atStart]);
    if (atEnd) changes.push([op.end_us, atEnd]);
  }
  changes.sort((one, other) => one[0] - other[0]);
  return levels(changes);
}

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

/**
 * @param {[number, number][]} changes in order of time
 * @returns {Curve} one step for each instant
 */
function levels(changes) {
  /** @type {number[]} */
  const times = [];
  /** @type {number[]} */
  const bytes = [];
  let level = 0;
  for (const [time, change] of changes) {
    level += change;
    if (times[times.length - 1] === time) bytes[bytes.length - 1] = level;
    else {
      times.push(time);
      bytes.push(level);
    }
  }
  return { timesUs: Float64Array.from(times), bytes: Float64Array.from(bytes) };
}
