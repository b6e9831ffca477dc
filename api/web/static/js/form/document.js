/** The problem that the form edits. Its text is authoritative: the fields beside it change that text. */

/** @typedef {import("../types.js").Problem} Problem */
/** @typedef {"forward" | "backward-input" | "backward-weight" | "transfer" | "budget"} Factor */

const LINE_FIELDS = new Set(["devices", "stages"]);

/** More unequal microbatches than any server takes are left for it to refuse. */
const MOST_UNEQUAL = 100_000;

/** Fields of a stage by the factor that scales them. */
const STAGE_TIMES = /** @type {const} */ ({
  forward: "forward_us",
  "backward-input": "backward_input_us",
  "backward-weight": "backward_weight_us",
});

export class ProblemDocument {
  /** The problem as it was loaded or typed, to which factors apply.
   * @type {Problem | null} */
  #base = null;
  /** @type {Problem | null} */
  #problem = null;
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

  /** @param {Factor} name */
  canScale(name) {
    if (name === "budget") return list(this.#base?.devices).some((device) => typeof device?.memory_bytes === "number");
    if (name === "transfer") return Boolean(this.#base?.transfer_us);
    return list(this.#base?.stages).length > 0;
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
   * Scale numbers of the problem that was loaded or typed.
   *
   * @param {Factor} name
   * @param {number} factor
   */
  scale(name, factor) {
    const base = this.#base;
    if (!base) return;
    this.#write((problem) => {
      if (name === "budget") {
        list(problem.devices).forEach((device, index) => {
          const budget = base.devices[index]?.memory_bytes;
          if (typeof budget === "number") device.memory_bytes = Math.floor(budget * factor);
        });
      } else if (name === "transfer") problem.transfer_us = scaled(base.transfer_us, factor);
      else {
        list(problem.stages).forEach((stage, index) => {
          stage[STAGE_TIMES[name]] = scaled(base.stages[index]?.[STAGE_TIMES[name]], factor);
        });
      }
    });
  }

  /** @param {(problem: Problem) => void} change */
  #write(change) {
    if (!this.#problem) return;
    change(this.#problem);
    this.editor.value = problemText(this.#problem);
  }
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
