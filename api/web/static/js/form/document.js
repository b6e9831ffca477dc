/** The problem that the form edits: its text is the truth, the fields above it change that text. */

import { hasLimits, budgetsOf, scaleBudgets } from "./budgets.js";
import { problemText } from "./problem_text.js";

/** @typedef {import("../types.js").Problem} Problem */

export class ProblemDocument {
  /** @type {import("./budgets.js").Budgets} */
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
    return hasLimits(this.#budgets);
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
    this.#budgets = this.#problem ? budgetsOf(this.#problem) : [];
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
    this.#write((problem) => scaleBudgets(problem, this.#budgets, factor));
  }

  /** @param {(problem: Problem) => void} change */
  #write(change) {
    if (!this.#problem) return;
    change(this.#problem);
    this.editor.value = problemText(this.#problem);
  }
}
