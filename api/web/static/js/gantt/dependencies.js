/** Causes of the starts of ops, and the critical path, as the service finds them (`POST /v1/analyze`). */

/** @typedef {import("./hit.js").Spot} Spot */
/** @typedef {import("./model.js").Model} Model */
/** @typedef {import("../types.js").PlannedOp} PlannedOp */

export class Dependencies {
  /** @type {Map<string, Spot>} */
  #spots = new Map();
  /** Ops that need each op. @type {Map<string, Spot[]>} */
  #effects = new Map();

  /** @param {Model} model */
  constructor(model) {
    this.model = model;
    model.devices.forEach(({ lanes }, row) => {
      lanes.forEach(({ ops }, lane) => {
        ops.forEach((op, index) => this.#spots.set(opName(op), { row, lane, index }));
      });
    });
    for (const spot of this.#spots.values()) {
      for (const name of this.#causes(spot)?.needs ?? []) this.#effects.set(name, [...(this.#effects.get(name) ?? []), spot]);
    }
  }

  /** @param {Spot} spot */
  #causes(spot) {
    return this.model.analysis?.ops[opName(this.op(spot))];
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
   * Ops whose results an op needs, or that it waits for.
   *
   * @param {Spot} spot
   */
  needs(spot) {
    return this.#all(this.#causes(spot)?.needs ?? []);
  }

  /**
   * Ops that need the result of an op.
   *
   * @param {Spot} spot
   */
  effects(spot) {
    return this.#effects.get(opName(this.op(spot))) ?? [];
  }

  /**
   * The op that lets this one start last, and the time of the transfer between them; null: it starts later.
   *
   * @param {Spot} spot
   * @returns {{name: string, delayUs: number} | null}
   */
  startsAfter(spot) {
    const causes = this.#causes(spot);
    return causes?.starts_after ? { name: causes.starts_after, delayUs: causes.delay_us } : null;
  }

  /** The chain of ops without slack that determines the objective, in order of time. */
  criticalPath() {
    return this.#all(this.model.analysis?.critical_path ?? []);
  }

  /** @param {string[]} names */
  #all(names) {
    return names.flatMap((name) => this.find(name) ?? []);
  }
}

/** @param {PlannedOp} op */
export function opName({ op, stage, part, microbatch }) {
  return `${op}${stage ?? part}.${microbatch}`;
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
