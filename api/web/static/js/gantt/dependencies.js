/** Dependencies between ops by the rules of the model (docs/reference/contract.md), and the critical path. */

import { KIND, KINDS } from "../kinds.js";
import { lastAtOrBefore } from "../memory.js";
import { factorOf } from "../slices.js";

/** @typedef {import("./hit.js").Spot} Spot */
/** @typedef {import("./model.js").Model} Model */
/** @typedef {import("../types.js").PlannedOp} PlannedOp */

/**
 * A reason why an op cannot start earlier than `earliestUs`.
 *
 * @typedef {object} Cause
 * @property {Spot} spot of the op that has to end before
 * @property {"data" | "order" | "wait" | "channel"} rule
 * @property {number} earliestUs
 */

/** Times of a schedule are sums of floating-point numbers: equal within this share of the whole. */
const TOLERANCE = 1e-9;

export class Dependencies {
  /** @type {Map<string, Spot>} */
  #spots = new Map();

  /** @param {Model} model */
  constructor(model) {
    this.model = model;
    this.toleranceUs = TOLERANCE * Math.max(1, model.endUs);
    model.devices.forEach(({ lanes }, row) => {
      lanes.forEach(({ ops }, lane) => {
        ops.forEach((op, index) => this.#spots.set(opName(op), { row, lane, index }));
      });
    });
  }

  /**
   * @param {string} name such as ``F0.3``
   * @returns {Spot | null}
   */
  find(name) {
    return this.#spots.get(name) ?? null;
  }

  /** @param {Spot} spot */
  op({ row, lane, index }) {
    return this.model.devices[row].lanes[lane].ops[index];
  }

  /**
   * Everything that an op waits for.
   *
   * @param {Spot} spot
   * @returns {Cause[]}
   */
  causes(spot) {
    const op = this.op(spot);
    /** @type {Cause[]} */
    const causes = [];
    for (const { name, delayUs } of this.#inputs(op)) this.#add(causes, name, "data", delayUs);
    for (const name of op.waits ?? []) this.#add(causes, name, "wait", 0);
    if (spot.index > 0) {
      const before = { ...spot, index: spot.index - 1 };
      causes.push({ spot: before, rule: "order", earliestUs: this.op(before).end_us });
    }
    causes.push(...this.#channelCauses(spot, op));
    return causes;
  }

  /**
   * The cause that fixes the start of an op: the last one to be fulfilled. Null where the op starts later than all.
   *
   * @param {Spot} spot
   * @returns {Cause | null}
   */
  bindingCause(spot) {
    const startUs = this.op(spot).start_us;
    return this.causes(spot).find(({ earliestUs }) => earliestUs >= startUs - this.toleranceUs) ?? null;
  }

  /**
   * Ops that need the result of an op.
   *
   * @param {Spot} spot
   * @returns {Spot[]}
   */
  effects(spot) {
    const { op, stage, microbatch } = this.op(spot);
    return KINDS.flatMap((kind) =>
      KIND[kind].needs
        .filter(({ kinds }) => kinds.includes(op))
        .flatMap(({ stage: offset }) => this.find(`${kind}${stage - offset}.${microbatch}`) ?? []),
    );
  }

  /**
   * The chain of ops without slack that determines the objective, in order of time.
   *
   * @returns {Spot[]}
   */
  criticalPath() {
    /** @type {Spot[]} */
    const path = [];
    for (let spot = this.#lastOp(); spot; spot = this.bindingCause(spot)?.spot ?? null) path.unshift(spot);
    return path;
  }

  /** @returns {Spot | null} the op whose end is that of the objective */
  #lastOp() {
    const { devices, schedule } = this.model;
    /** @type {{spot: Spot, us: number} | null} */
    let last = null;
    devices.forEach(({ lanes: [{ startUs, endUs }] }, row) => {
      if (!endUs.length) return;
      const index = endUs.length - 1;
      const us = endUs[index] - (schedule.objective === "device_span" ? startUs[0] : 0);
      if (!last || us > last.us) last = { spot: { row, lane: 0, index }, us };
    });
    return /** @type {{spot: Spot} | null} */ (last)?.spot ?? null;
  }

  /**
   * @param {PlannedOp} op
   * @returns {{name: string, delayUs: number}[]} names of ops whose results it needs; not all of them exist
   */
  #inputs({ op, stage, microbatch }) {
    return KIND[op].needs.flatMap(({ kinds, stage: offset }) => {
      const from = stage + offset;
      return kinds.map((kind) => ({ name: `${kind}${from}.${microbatch}`, delayUs: this.#transferUs(from, stage, microbatch) }));
    });
  }

  /**
   * @param {number} from stage
   * @param {number} to stage, the next or the one before
   * @param {number} unit
   */
  #transferUs(from, to, unit) {
    const { problem } = this.model.schedule;
    const { stages, transfer_us: transferUs = 0 } = problem;
    if (!stages[from] || stages[from].device === stages[to].device) return 0;
    const entry = Array.isArray(transferUs) ? transferUs[Math.min(from, to)] : transferUs;
    const us = typeof entry === "number" ? entry : entry[from < to ? "forward" : "backward"];
    return us * factorOf(problem, from, unit, "transfer");
  }

  /**
   * @param {Cause[]} causes
   * @param {string} name
   * @param {Cause["rule"]} rule
   * @param {number} delayUs
   */
  #add(causes, name, rule, delayUs) {
    const spot = this.find(name);
    if (spot) causes.push({ spot, rule, earliestUs: this.op(spot).end_us + delayUs });
  }

  /**
   * Copies before an offload or reload on a channel that it shares with other streams or devices.
   *
   * @param {Spot} spot
   * @param {PlannedOp} op
   * @returns {Cause[]}
   */
  #channelCauses(spot, op) {
    if (op.op !== "O" && op.op !== "R") return [];
    const { duplex = true, shared_by: groups = [] } = this.model.schedule.problem.copy_channels ?? {};
    const devices = groups.find((group) => group.includes(spot.row)) ?? [spot.row];
    const { stream } = this.model.devices[spot.row].lanes[spot.lane];
    return devices.flatMap((row) =>
      this.model.devices[row].lanes.flatMap(({ stream: other, endUs }, lane) => {
        const isOwn = row === spot.row && lane === spot.lane;
        if (isOwn || other === "compute" || (duplex && other !== stream)) return [];
        const index = lastAtOrBefore(endUs, op.start_us + this.toleranceUs);
        return index < 0 ? [] : [{ spot: { row, lane, index }, rule: /** @type {const} */ ("channel"), earliestUs: endUs[index] }];
      }),
    );
  }
}

/** @param {PlannedOp} op */
export function opName({ op, stage, microbatch }) {
  return `${op}${stage}.${microbatch}`;
}

/**
 * The name that a reader means: ``f 0 3``, ``F0,3`` and ``F0.3`` are the same.
 *
 * @param {string} text
 */
export function parseOpName(text) {
  const [, kind, stage, microbatch] = /^\s*([a-z]+)\s*(\d+)\s*[.,:\s]\s*(\d+)\s*$/i.exec(text) ?? [];
  return kind ? `${kind.toUpperCase()}${Number(stage)}.${Number(microbatch)}` : null;
}
