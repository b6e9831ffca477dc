/** The memory of a device over time, from a schedule and the sizes in its problem (docs/reference/contract.md). */

import { KIND } from "./kinds.js";
import { unitStage } from "./slices.js";

/**
 * A step function: the level is `bytes[k]` from `timesUs[k]` until the next time; 0 before the first.
 *
 * @typedef {{timesUs: Float64Array, bytes: Float64Array}} Curve
 */

/** @typedef {import("./types.js").Stage & {takenBytes?: number, freedBytes?: number}} Stage */

/**
 * Bytes that an op takes at its start, and the signed change at its end.
 *
 * @param {Stage} stage
 * @param {import("./types.js").Kind} kind
 * @param {import("./types.js").Mode | null} mode of the microbatch on that stage; null: kept, or offloaded whole
 * @returns {[number, number]}
 */
export function deviceEffect(stage, kind, mode) {
  const activation = stage.activation_bytes;
  const kept = stage.backward === "none" ? 0 : (mode?.kept_bytes ?? activation);
  /** @type {Record<string, number>} */
  const sizes = {
    kept,
    activation,
    backward_weight: stage.backward_weight_bytes,
    recomputed: activation - kept,
    segment: mode?.segment_bytes ?? 0,
    copied: (mode ? mode.offload : stage.offload)?.bytes ?? 0,
    gradients_taken: stage.takenBytes ?? 0,
    gradients_freed: stage.freedBytes ?? 0,
    forward_workspace: mode?.forward_workspace_bytes ?? activation - kept,
    recompute_workspace: mode?.workspace_bytes ?? 0,
  };
  for (const [of, bytes] of Object.entries(stage.workspace_bytes ?? {})) sizes[`workspace_${of}`] = bytes;
  /** @param {string[]} names */
  const sum = (names) => names.reduce((bytes, name) => bytes + (sizes[name] ?? 0), 0);
  const { takes, leaves, frees } = KIND[kind];
  return [sum(takes), sum(leaves) - sum(frees)];
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
  const { problem } = schedule;
  const names = modeNames(plan.compute);
  /** @type {Map<string, Stage>} */
  const stages = new Map();
  /** @type {[number, number][]} */
  const changes = [];
  for (const op of ops) {
    const unit = `${op.stage}.${op.microbatch}`;
    const stage = stages.get(unit) ?? unitStage(problem, op.stage, op.microbatch);
    stages.set(unit, stage);
    const mode = stage.modes?.find((other) => other.name === names.get(unit)) ?? null;
    const [atStart, atEnd] = deviceEffect(stage, op.op, mode);
    if (atStart) changes.push([op.start_us, atStart]);
    if (atEnd) changes.push([op.end_us, atEnd]);
  }
  changes.sort((one, other) => one[0] - other[0]);
  return levels(changes);
}

/**
 * @param {import("./types.js").PlannedOp[]} ops of one device
 * @returns {Map<string, string>} names of modes by stage and unit, where an F names one
 */
function modeNames(ops) {
  /** @type {Map<string, string>} */
  const names = new Map();
  for (const { stage, microbatch, mode } of ops) {
    if (mode) names.set(`${stage}.${microbatch}`, mode);
  }
  return names;
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
