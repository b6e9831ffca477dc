/** Figures of a schedule document that several views show. */

/** @typedef {import("./types.js").Schedule} Schedule */
/** @typedef {import("./types.js").PlannedOp} PlannedOp */

/**
 * The schedule's bubble rate, which is that of its busiest device, and whose it is.
 *
 * @param {Schedule} schedule
 * @returns {{bubble: number, whose: string}}
 */
export function bubbleRate({ devices, problem }) {
  const index = devices.reduce((most, plan, device) => (plan.busy_us > devices[most].busy_us ? device : most), 0);
  const { bubble, busy_us: busyUs } = devices[index];
  const isShared = devices.length > 1 && devices.every((plan) => plan.busy_us === busyUs);
  return { bubble, whose: isShared ? "every device" : `${deviceName(problem, index)}, the busiest` };
}

/** @param {Schedule} schedule */
export function highestPeakBytes({ devices }) {
  return Math.max(...devices.map((plan) => plan.peak_bytes));
}

/**
 * @param {import("./types.js").Problem} problem
 * @param {number} index
 */
export function deviceName(problem, index) {
  return problem.devices[index].name || `device ${index}`;
}

/** @param {Schedule} schedule */
function beginUs({ devices }) {
  return Math.min(...devices.map(({ compute }) => compute[0]?.start_us ?? Infinity));
}

/** @param {Schedule} schedule */
export function durationUs(schedule) {
  const ends = schedule.devices.map(({ compute }) => compute[compute.length - 1]?.end_us ?? 0);
  return Math.max(...ends) - beginUs(schedule);
}

/**
 * The schedule moved so that its first op begins at 0.
 *
 * @param {Schedule} schedule
 * @returns {Schedule}
 */
export function fromZero(schedule) {
  const begin = beginUs(schedule);
  if (!begin) return schedule;
  /** @param {PlannedOp[] | undefined} ops */
  const moved = (ops) => (ops ?? []).map((op) => ({ ...op, start_us: op.start_us - begin, end_us: op.end_us - begin }));
  const devices = schedule.devices.map((plan) => ({
    ...plan,
    compute: moved(plan.compute),
    offload: moved(plan.offload),
    reload: moved(plan.reload),
  }));
  return { ...schedule, devices };
}

/**
 * A key that problems with the same work share, whatever their budgets: their values can be compared.
 *
 * @param {import("./types.js").Problem} problem
 */
export function workKey({ microbatches, objective, stages, transfer_us: transferUs, ...more }) {
  const unequal = [more.microbatch_factors, more.microbatch_order, more.slices];
  return JSON.stringify([microbatches, objective, transferUs, stages, unequal]);
}
