/** The problem that the form edits. Its text is authoritative: the fields next to it change that text. */

/** @typedef {import("../types.js").Problem} Problem */
/** @typedef {keyof typeof QUANTITIES} Name */

/**
 * A quantity that a field shows: its values one for each stage, device or boundary, null where there is none.
 *
 * @typedef {object} Quantity
 * @property {"time" | "memory"} kind
 * @property {boolean} [optional] whether a value may be absent
 * @property {(problem: Problem) => any[]} read
 * @property {(problem: Problem, values: any[]) => void} write
 */

/**
 * @param {"time" | "memory"} kind
 * @param {"forward_us" | "backward_input_us" | "backward_weight_us" | "activation_bytes" | "backward_weight_bytes"} field
 * @returns {Quantity}
 */
function ofStages(kind, field) {
  return {
    kind,
    read: ({ stages }) => list(stages).map((stage) => stage?.[field]),
    write: ({ stages }, values) => list(stages).forEach((stage, k) => Object.assign(stage, { [field]: values[k] })),
  };
}

/**
 * @param {"offload_us" | "reload_us"} field
 * @returns {Quantity}
 */
function ofCopies(field) {
  return {
    kind: "time",
    optional: true,
    read: ({ stages }) => {
      const times = list(stages).map((stage) => stage?.offload?.[field] ?? null);
      return times.some((time) => time !== null) ? times : [];
    },
    write: ({ stages }, values) => {
      list(stages).forEach((stage, k) => stage.offload && Object.assign(stage.offload, { [field]: values[k] ?? 0 }));
    },
  };
}

const QUANTITIES = {
  forward: ofStages("time", "forward_us"),
  "backward-input": ofStages("time", "backward_input_us"),
  "backward-weight": ofStages("time", "backward_weight_us"),
  activation: ofStages("memory", "activation_bytes"),
  held: ofStages("memory", "backward_weight_bytes"),
  transfer: /** @type {Quantity} */ ({
    kind: "time",
    read: ({ stages, transfer_us: time = 0 }) => (Array.isArray(time) ? time : list(stages).slice(1).map(() => time)),
    write: (problem, values) => {
      const isOne = values.every((value) => JSON.stringify(value) === JSON.stringify(values[0]));
      if (values.length) problem.transfer_us = isOne ? values[0] : values;
    },
  }),
  budget: /** @type {Quantity} */ ({
    kind: "memory",
    optional: true,
    read: ({ devices }) => list(devices).map((device) => device?.memory_bytes ?? null),
    write: ({ devices }, values) => list(devices).forEach((device, k) => Object.assign(device, { memory_bytes: values[k] })),
  }),
  offload: /** @type {Quantity} */ ({
    kind: "memory",
    optional: true,
    read: ({ stages }) => list(stages).map((stage) => stage?.offload?.bytes ?? null),
    write: ({ stages }, values) => {
      list(stages).forEach((stage, k) => {
        if (values[k] === null) delete stage.offload;
        else stage.offload = { offload_us: stage.forward_us, reload_us: stage.forward_us, ...stage.offload, bytes: values[k] };
      });
    },
  }),
  "offload-time": ofCopies("offload_us"),
  "reload-time": ofCopies("reload_us"),
};

export const NAMES = /** @type {Name[]} */ (Object.keys(QUANTITIES));

const LINE_FIELDS = new Set(["devices", "stages"]);

/** More unequal microbatches than any server takes are left for it to refuse. */
const MOST_UNEQUAL = 100_000;
const MOST_DEVICES = 4096;

export class ProblemDocument {
  /** The problem as it was loaded or typed, to which factors apply.
   * @type {Problem | null} */
  #base = null;
  /** @type {Problem | null} */
  #problem = null;
  /** What was spread over other devices last, and the text that this made: another number spreads the same problem.
   * @type {{from: Problem | null, text: string}} */
  #spread = { from: null, text: "" };
  /** Why the text is no JSON; empty where it is. */
  error = "";

  /** @param {HTMLTextAreaElement} editor */
  constructor(editor) {
    this.editor = editor;
  }

  /** What the text says, or null where it is no JSON object. */
  get problem() {
    return this.#problem;
  }

  /**
   * @param {Name} name
   * @returns {Quantity}
   */
  quantity(name) {
    return QUANTITIES[name];
  }

  /**
   * @param {Name} name
   * @returns {any[]} none where the problem has no place for it
   */
  values(name) {
    return this.#problem ? QUANTITIES[name].read(this.#problem) : [];
  }

  /** @param {unknown} problem replaces everything */
  load(problem) {
    this.editor.value = problemText(problem);
    this.editor.scrollTop = 0;
    this.readText();
  }

  /** Take over what was typed into the editor. */
  readText() {
    this.#problem = null;
    this.error = "";
    try {
      const parsed = JSON.parse(this.editor.value);
      if (typeof parsed === "object" && parsed !== null && !Array.isArray(parsed)) this.#problem = parsed;
      else this.error = "A problem is a JSON object. Maybe a part of it was copied alone.";
    } catch (error) {
      const reason = error instanceof Error ? error.message : String(error);
      this.error = this.editor.value.trim() ? `This is not JSON yet: ${reason}.` : "";
    }
    this.#base = structuredClone(this.#problem);
  }

  /** @param {string} value */
  setObjective(value) {
    this.#write((problem) => Object.assign(problem, { objective: value }));
  }

  /**
   * Set the number of microbatches. Where each has factors of its own, those that were loaded or typed repeat.
   *
   * @param {unknown} count
   */
  setMicrobatches(count) {
    const factors = list(this.#base?.microbatch_factors);
    this.#write((problem) => {
      Object.assign(problem, { microbatches: count });
      if (!factors.length || typeof count !== "number" || !(count >= 1 && count <= MOST_UNEQUAL)) return;
      problem.microbatch_factors = Array.from({ length: count }, (_, i) => factors[i % factors.length]);
    });
  }

  /** @param {(number | null)[]} budgets in bytes, one for each device; null: no limit */
  setBudgets(budgets) {
    this.#write((problem) => {
      problem.devices.forEach((device, index) => {
        device.memory_bytes = budgets[index];
      });
    });
    this.readText();
  }

  /**
   * @param {Name} name
   * @param {any[]} values to which factors apply from now on
   */
  setValues(name, values) {
    if (this.#base) QUANTITIES[name].write(this.#base, structuredClone(values));
    this.#write((problem) => QUANTITIES[name].write(problem, values));
  }

  /**
   * Scale numbers of the problem that was loaded or typed.
   *
   * @param {Name} name
   * @param {number} factor
   */
  scale(name, factor) {
    if (!this.#base) return;
    const { kind, read, write } = this.quantity(name);
    const values = scaled(read(this.#base), factor);
    const whole = kind === "memory" ? values.map((/** @type {any} */ value) => value && Math.floor(value)) : values;
    this.#write((problem) => write(problem, whole));
  }

  /** How many devices there are; null where the placement has no rule by which there could be more or fewer. */
  get deviceCount() {
    const devices = list(this.#problem?.devices).length;
    return directions(devices, list(this.#problem?.stages)) ? devices : null;
  }

  /**
   * Spread the model over more or fewer devices: the first and the last stage of each round stay, others repeat.
   *
   * @param {number} count
   */
  setDevices(count) {
    if (!this.deviceCount || !(Number.isInteger(count) && count >= 1 && count <= MOST_DEVICES)) return;
    if (this.editor.value !== this.#spread.text) this.#spread.from = structuredClone(this.#problem);
    const base = this.#spread.from;
    if (!base) return;
    const before = base.devices.length;
    /** @param {number} device */
    const like = (device) => (device === count - 1 ? before - 1 : Math.min(device, Math.max(0, before - 2)));
    const places = Array.from({ length: count }, (_, device) => device);
    this.#write((problem) => {
      problem.devices = places.map((device) => {
        const { name, ...rest } = base.devices[like(device)];
        return name === undefined ? rest : { ...rest, name: base.devices[device]?.name ?? `${name.replace(/\d+$/, "")}${device}` };
      });
      problem.stages = (directions(before, base.stages) ?? []).flatMap((isBack, round) => {
        const stages = base.stages.slice(round * before, (round + 1) * before);
        return (isBack ? [...places].reverse() : places).map((device) => {
          const source = stages[isBack ? before - 1 - like(device) : like(device)];
          return { ...structuredClone(source), device };
        });
      });
      if (Array.isArray(base.transfer_us)) {
        const times = base.transfer_us;
        problem.transfer_us = problem.stages.slice(1).map((_, k) => structuredClone(times[Math.min(k, times.length - 1)] ?? 0));
      }
      const groups = base.copy_channels?.shared_by;
      if (groups) {
        const left = groups.map((group) => group.filter((device) => device < count)).filter((group) => group.length > 1);
        problem.copy_channels = { ...base.copy_channels, shared_by: left };
      }
    });
    this.#spread.text = this.editor.value;
    this.readText();
  }

  /** @param {(problem: Problem) => void} change */
  #write(change) {
    if (!this.#problem) return;
    change(this.#problem);
    this.editor.value = problemText(this.#problem);
  }
}

/**
 * The direction of each round of stages over the devices, true from the last to the first; null: there are other places.
 *
 * @param {number} devices
 * @param {import("../types.js").Stage[]} stages
 * @returns {boolean[] | null}
 */
function directions(devices, stages) {
  if (!devices || !stages.length || stages.length % devices) return null;
  const rounds = Array.from({ length: stages.length / devices }, (_, round) => {
    const places = stages.slice(round * devices, (round + 1) * devices).map((stage) => stage?.device);
    if (places.every((device, k) => device === k)) return false;
    return places.every((device, k) => device === devices - 1 - k) ? true : null;
  });
  return rounds.some((round) => round === null) ? null : rounds.map(Boolean);
}

/**
 * @template T
 * @param {T[] | null | undefined} value of a problem that may not be valid
 * @returns {T[]}
 */
function list(value) {
  return Array.isArray(value) ? value : [];
}

/**
 * Numbers anywhere in `value` times `factor`, without the digits that only binary fractions have.
 *
 * @param {any} value
 * @param {number} factor
 * @returns {any}
 */
function scaled(value, factor) {
  if (typeof value === "number") return Number((value * factor).toPrecision(12));
  if (Array.isArray(value)) return value.map((entry) => scaled(entry, factor));
  if (typeof value !== "object" || value === null) return value;
  return Object.fromEntries(Object.entries(value).map(([name, entry]) => [name, scaled(entry, factor)]));
}

/**
 * A problem as readable text: one device or stage a line.
 *
 * @param {unknown} problem
 */
export function problemText(problem) {
  if (typeof problem !== "object" || problem === null || Array.isArray(problem)) return JSON.stringify(problem, null, 2);
  const lines = Object.entries(problem).map(([name, value]) => `  ${JSON.stringify(name)}: ${fieldText(name, value)}`);
  return `{\n${lines.join(",\n")}\n}\n`;
}

/**
 * @param {string} name
 * @param {unknown} value
 */
function fieldText(name, value) {
  if (!LINE_FIELDS.has(name) || !Array.isArray(value)) return onOneLine(value);
  return `[\n${value.map((entry) => `    ${onOneLine(entry)}`).join(",\n")}\n  ]`;
}

/**
 * @param {unknown} value
 * @returns {string}
 */
function onOneLine(value) {
  if (Array.isArray(value)) return `[${value.map(onOneLine).join(", ")}]`;
  if (typeof value !== "object" || value === null) return JSON.stringify(value) ?? "null";
  const fields = Object.entries(value).map(([name, field]) => `${JSON.stringify(name)}: ${onOneLine(field)}`);
  return `{${fields.join(", ")}}`;
}
