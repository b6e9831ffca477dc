/** A schedule as columns that can be searched and drawn quickly. */

import { KINDS, lookOf } from "../kinds.js";
import { deviceName } from "../schedule.js";

/** @typedef {import("../types.js").Schedule} Schedule */
/** @typedef {import("../types.js").Analysis} Analysis */
/** @typedef {import("../types.js").PlannedOp} PlannedOp */

/**
 * The ops of one stream of a device in order of time. `look` is the index of an op's colour: see `lookIndex`.
 *
 * @typedef {object} Lane
 * @property {import("../types.js").StreamName} stream
 * @property {PlannedOp[]} ops
 * @property {Float64Array} startUs
 * @property {Float64Array} endUs
 * @property {Uint16Array} look
 * @property {number[]} shortestUs the least duration by look, 0 where there is none
 *
 * @typedef {object} Device
 * @property {number} index
 * @property {string} name
 * @property {number[]} stages
 * @property {Lane[]} lanes
 * @property {number[] | null} idleUs before, within and after its ops; null, and no step of memory, without an analysis
 * @property {import("../memory.js").Curve} memory
 * @property {number | null} budgetBytes
 * @property {import("../types.js").DevicePlan} plan
 *
 * @typedef {object} Model
 * @property {Schedule} schedule
 * @property {Analysis | null} analysis null: the service has not answered
 * @property {Device[]} devices
 * @property {number} beginUs first start on any stream
 * @property {number} endUs last end on any stream
 * @property {number} ops how many there are
 * @property {Set<import("../types.js").Kind>} kinds
 * @property {number} mostStages on one device
 * @property {number} topBytes upper end of the memory scale, the same on all devices
 */

/** Streams with the name of each, in the order in which they are drawn. */
const STREAMS = /** @type {const} */ (["compute", "offload", "reload"]);
/** Room above the highest peak, as in the pictures. */
const HEADROOM = 1.06;
/** A budget beyond this many times the highest peak is named but not drawn: the curves would be flat. */
const FARTHEST_BUDGET = 3;

/**
 * @param {Schedule} schedule
 * @param {Analysis | null} analysis
 * @returns {Model}
 */
export function buildModel(schedule, analysis) {
  const stagesByDevice = schedule.problem.devices.map((_, device) =>
    schedule.problem.stages.flatMap((stage, index) => (stage.device === device ? [index] : [])),
  );
  const devices = schedule.devices.map((_, device) => buildDevice(schedule, analysis, device, stagesByDevice[device]));
  const lanes = devices.flatMap((device) => device.lanes);
  return {
    schedule,
    analysis,
    devices,
    beginUs: lanes.reduce((least, lane) => Math.min(least, lane.startUs[0] ?? least), Infinity),
    endUs: lanes.reduce((most, lane) => Math.max(most, lane.endUs[lane.endUs.length - 1] ?? most), 0),
    ops: lanes.reduce((sum, lane) => sum + lane.ops.length, 0),
    kinds: new Set(lanes.flatMap((lane) => lane.ops.map((op) => op.op))),
    mostStages: Math.max(...stagesByDevice.map((stages) => stages.length)),
    topBytes: memoryTop(devices),
  };
}

/**
 * Index of a colour: kinds side by side, repeated for each stage of a device.
 *
 * @param {import("../types.js").Kind} kind
 * @param {number} rank of the stage on its device
 */
export function lookIndex(kind, rank) {
  return rank * KINDS.length + KINDS.indexOf(lookOf(kind));
}

/**
 * @param {Schedule} schedule
 * @param {Analysis | null} analysis
 * @param {number} index
 * @param {number[]} stages
 * @returns {Device}
 */
function buildDevice(schedule, analysis, index, stages) {
  const plan = schedule.devices[index];
  const facts = analysis?.devices[index] ?? null;
  const { memory_bytes: budgetBytes } = schedule.problem.devices[index];
  const rank = new Map(stages.map((stage, position) => [stage, position]));
  const streams = STREAMS.filter((stream) => stream === "compute" || plan[stream]?.length);
  return {
    index,
    name: deviceName(schedule.problem, index),
    stages,
    plan,
    lanes: streams.map((stream) => buildLane(stream, plan[stream] ?? [], rank)),
    idleUs: facts && [facts.idle_before_us, facts.idle_within_us, facts.idle_after_us],
    memory: { timesUs: Float64Array.from(facts?.memory.times_us ?? []), bytes: Float64Array.from(facts?.memory.bytes ?? []) },
    budgetBytes: budgetBytes ?? null,
  };
}

/**
 * @param {import("../types.js").StreamName} stream
 * @param {PlannedOp[]} ops
 * @param {Map<number, number>} rank
 * @returns {Lane}
 */
function buildLane(stream, ops, rank) {
  const startUs = Float64Array.from(ops, (op) => op.start_us);
  const endUs = Float64Array.from(ops, (op) => op.end_us);
  const look = Uint16Array.from(ops, (op) => lookIndex(op.op, rank.get(op.stage ?? -1) ?? 0));
  const shortestUs = new Array(lookIndex("F", Math.max(1, rank.size))).fill(0);
  look.forEach((colour, index) => {
    const duration = endUs[index] - startUs[index];
    shortestUs[colour] = shortestUs[colour] ? Math.min(shortestUs[colour], duration) : duration;
  });
  return { stream, ops, startUs, endUs, look, shortestUs };
}

/** @param {Device[]} devices */
function memoryTop(devices) {
  const peak = Math.max(...devices.map((device) => device.plan.peak_bytes));
  const drawn = devices.flatMap(({ budgetBytes }) =>
    budgetBytes !== null && budgetBytes <= FARTHEST_BUDGET * peak ? [budgetBytes] : [],
  );
  return HEADROOM * Math.max(peak, 1, ...drawn);
}
