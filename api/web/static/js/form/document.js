/** The problem that the form edits. Its text is authoritative: the fields beside it change that text. */

/** @typedef {import("../types.js").Problem} Problem */
/** @typedef {(number | null | undefined)[]} Budgets one for each device; null or undefined: no limit */

const LINE_FIELDS = new Set(["devices", "stages"]);

export class ProblemDocument {
  /** @type {Budgets} budgets at factor 1 */
  #budgets = [];
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

  get hasLimits() {
    return this.#budgets.some((budget) => typeof budget === "number");
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
    this.#budgets = this.#problem ? readBudgets(this.#problem) : [];
  }

  /**
   * @param {"microbatches" | "objective"} name
   * @param {unknown} value
   */
  set(name, value) {
    this.#write((problem) => Object.assign(problem, { [name]: value }));
  }

  /** @param {number} factor on the budgets that were loaded or typed */
  scaleBudgets(factor) {
    this.#write((problem) => {
      problem.devices.forEach((device, index) => {
        const budget = this.#budgets[index];
        if (typeof budget === "number") device.memory_bytes = Math.floor(budget * factor);
      });
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
 * @param {Problem} problem perhaps not valid
 * @returns {Budgets}
 */
function readBudgets(problem) {
  return Array.isArray(problem.devices) ? problem.devices.map((device) => device?.memory_bytes) : [];
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
