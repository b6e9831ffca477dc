/** Published schedules of the problem in the form, drawn anew at each change. */

import { ApiError, comparePublished } from "../api.js";
import { element, part } from "../elements.js";
import { GanttChart } from "../gantt/chart.js";
import { FIRST_RETRY_MS, LONGEST_RETRY_MS, maySucceedLater, pause } from "../retry.js";
import { bubbleRate, highestPeakBytes } from "../schedule.js";
import { bytesText, percentText, timeText } from "../units.js";

/** @typedef {import("../api.js").Compared} Compared */

const BEST = "";

export class PublishedPreview {
  /** @type {GanttChart | null} */
  #chart = null;
  /** @type {Compared[]} best first */
  #compared = [];
  /** @type {import("../types.js").Problem | null} */
  #problem = null;
  /** Counts the changes of the problem. */
  #wanted = 0;
  #isRefreshing = false;
  #ending = new AbortController();
  /** Of the pause before what failed is tried again. */
  #pausing = new AbortController();

  /** @param {HTMLElement} root */
  constructor(root) {
    this.panel = part(root, "preview", HTMLElement);
    this.host = part(root, "preview-chart", HTMLElement);
    this.method = part(root, "preview-method", HTMLSelectElement);
    this.figures = part(root, "preview-figures", HTMLElement);
    this.method.addEventListener("change", () => this.#show());
  }

  /** @param {import("../types.js").Problem | null} problem perhaps not valid; null: there is none */
  update(problem) {
    this.#problem = problem;
    this.#wanted += 1;
    this.#pausing.abort();
    if (problem) this.#refresh();
    else this.panel.hidden = true;
  }

  stop() {
    this.#ending.abort();
    this.#chart?.destroy();
  }

  /** Ask for schedules until they are those of the latest problem, one request at a time: a slider never waits. */
  async #refresh() {
    if (this.#isRefreshing) return;
    this.#isRefreshing = true;
    const { signal } = this.#ending;
    let retryMs = FIRST_RETRY_MS;
    for (let shown = 0; shown !== this.#wanted && !signal.aborted; ) {
      shown = this.#wanted;
      try {
        if (!this.#problem) continue;
        const compared = await comparePublished(this.#problem, signal);
        retryMs = FIRST_RETRY_MS;
        if (!this.#problem) continue; // there is none any more
        this.#compared = compared;
        this.#fillMethods();
        this.#show();
      } catch (error) {
        // An invalid problem keeps the picture of the last valid one: its faults stand at their fields.
        const isInvalid = error instanceof ApiError && error.status === 422;
        if (!isInvalid) this.figures.textContent = error instanceof Error ? error.message : String(error);
        if (signal.aborted || !maySucceedLater(error)) continue;
        this.#pausing = new AbortController();
        await pause(retryMs, AbortSignal.any([signal, this.#pausing.signal]));
        retryMs = Math.min(LONGEST_RETRY_MS, 2 * retryMs);
        shown = 0;
      }
    }
    this.#isRefreshing = false;
  }

  #fillMethods() {
    const chosen = this.method.value;
    const found = this.#compared.filter(({ schedule }) => schedule);
    const options = [{ method: BEST, text: "the best" }, ...found.map(({ method }) => ({ method, text: method }))];
    this.method.replaceChildren(
      ...options.map(({ method, text }) => {
        const option = element("option", text);
        option.value = method;
        return option;
      }),
    );
    this.method.value = found.some(({ method }) => method === chosen) ? chosen : BEST;
  }

  #show() {
    this.panel.hidden = false;
    const shown = this.#compared.find(({ method, schedule }) => schedule && (!this.method.value || method === this.method.value));
    this.host.hidden = !shown;
    if (!shown?.schedule) {
      const reason = this.#compared.find(({ why_not: whyNot }) => whyNot)?.why_not ?? "";
      this.figures.textContent = `No published schedule keeps these budgets. ${reason}`;
      return;
    }
    const { schedule, method } = shown;
    const { bubble, whose } = bubbleRate(schedule);
    const proof = schedule.gap ? `at most ${percentText(schedule.gap)} above the optimum` : "proved optimal";
    this.figures.textContent =
      `${method}: ${timeText(schedule.value_us)}, ${proof}; bubble ${percentText(bubble)} of ${whose}; ` +
      `highest peak ${bytesText(highestPeakBytes(schedule))}.`;
    this.#chart ??= new GanttChart(this.host, { name: "the published schedule" });
    this.#chart.show(schedule);
  }
}
