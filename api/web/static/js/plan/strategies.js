/** The table of a plan's strategies: names, times, bars, and how each ended. */

import { element, fromTemplate, part } from "../elements.js";
import { bytesText, countText, timeText, timeUnit } from "../units.js";
import { fillStack, fillTimeLegend, timeParts } from "./bars.js";

/** @typedef {import("../types.js").Plan} Plan */
/** @typedef {Plan["strategies"][number]} Strategy */

const FIRST_ROWS = 12;
const MORE_ROWS = 36;
const DEGREES = ["tp", "cp", "ep", "etp", "dp", "pp", "vpp"];
const CHOICES = [...DEGREES, "microbatch_size", "sharding", "recompute", "precision", "overlap", "offload", "vocabulary"];
/** What tells strategies apart, as the server reads it. */
const VALUES = [...CHOICES, "schedule"];
const ENDS = { solved: "", beaten: "beaten: ", does_not_fit: "does not fit: " };

/** @param {Strategy} strategy */
export function strategyName(strategy) {
  const parts = DEGREES.filter((name) => Number(strategy[name]) > 1).map((name) => `${name}${strategy[name]}`);
  if (Number(strategy.microbatch_size) > 1) parts.push(`mbs${strategy.microbatch_size}`);
  if (strategy.recompute !== "none") parts.push(String(strategy.recompute));
  if (strategy.sharding === "fsdp") parts.push("fsdp");
  if (strategy.overlap === "yes") parts.push("overlap");
  if (strategy.offload === "yes") parts.push("offload");
  if (strategy.vocabulary && strategy.vocabulary !== "last") parts.push(`${strategy.vocabulary} head`);
  if (strategy.precision !== "bf16") parts.push(String(strategy.precision));
  return parts.join(" ") || "one GPU";
}

/** @param {Strategy} strategy */
export function strategyKey(strategy) {
  // Plans of earlier versions lack some.
  return VALUES.filter((name) => name in strategy)
    .map((name) => `${name}=${strategy[name]}`)
    .join(",");
}

/**
 * The strategy to take: the simplest of those that tie with the fastest.
 *
 * @param {Plan} plan
 */
export function bestOf({ best, strategies }) {
  return strategies.find((one) => [...CHOICES, "seconds"].every((name) => one[name] === best?.[name]));
}

export class StrategyTable {
  #shown = FIRST_ROWS;
  /** @type {Plan | null} */
  #plan = null;
  #chosen = "";

  /**
   * @param {HTMLElement} root
   * @param {(strategy: Strategy, byUser: boolean) => void} onOpen
   */
  constructor(root, onOpen) {
    this.body = part(root, "strategies", HTMLTableSectionElement);
    this.count = part(root, "count", HTMLElement);
    this.legend = part(root, "time-legend", HTMLElement);
    this.more = part(root, "more-rows", HTMLButtonElement);
    this.onOpen = onOpen;
    this.end = part(root, "end-filter", HTMLSelectElement);
    this.more.addEventListener("click", () => {
      this.#shown += MORE_ROWS;
      if (this.#plan) this.show(this.#plan, this.#chosen);
    });
    this.end.addEventListener("change", () => {
      this.#shown = FIRST_ROWS;
      if (this.#plan) this.show(this.#plan, this.#chosen);
    });
  }

  /** Begin with few rows again. */
  reset() {
    this.#shown = FIRST_ROWS;
  }

  /**
   * @param {Plan} plan
   * @param {string} chosen key of the strategy that is open
   */
  show(plan, chosen) {
    this.#plan = plan;
    this.#chosen = chosen;
    const focused = document.activeElement?.closest("tr")?.dataset.key;
    const best = bestOf(plan);
    const all = plan.strategies.filter(({ end }) => !this.end.value || end === this.end.value);
    const rows = all.slice(0, this.#shown);
    if (best && !this.end.value && !rows.includes(best)) rows.push(best);
    const most = Math.max(1e-9, ...rows.map(({ seconds }) => seconds ?? 0));
    this.body.replaceChildren(...rows.map((strategy) => this.#row(strategy, strategy === best, most)));
    if (focused) this.#opener(focused)?.focus();
    fillTimeLegend(this.legend, rows);
    this.count.textContent = countsText(plan);
    this.more.hidden = this.#shown >= all.length;
  }

  /** @param {string} key */
  choose(key) {
    this.#chosen = key;
    for (const row of this.body.rows) {
      const isChosen = row.dataset.key === key;
      row.toggleAttribute("data-chosen", isChosen);
      part(row, "open", HTMLButtonElement).setAttribute("aria-pressed", String(isChosen));
    }
  }

  /** @param {string} key */
  #opener(key) {
    const row = [...this.body.rows].find((other) => other.dataset.key === key);
    return row && part(row, "open", HTMLButtonElement);
  }

  /**
   * @param {Strategy} strategy
   * @param {boolean} isBest
   * @param {number} most seconds of the slowest row
   */
  #row(strategy, isBest, most) {
    const row = part(fromTemplate("template-plan-row"), "row", HTMLTableRowElement);
    const { seconds, bound_s: boundS } = strategy;
    row.dataset.key = strategyKey(strategy);
    row.dataset.end = strategy.end;
    const open = part(row, "open", HTMLButtonElement);
    open.textContent = strategyName(strategy);
    if (isBest) open.after(" ", element("span", "take this", "taken"));
    const unit = timeUnit(1e6 * (seconds ?? boundS));
    part(row, "step", HTMLElement).textContent = seconds === null ? `≥ ${timeText(1e6 * boundS, unit)}` : timeText(1e6 * seconds, unit);
    fillStack(part(row, "spent", HTMLElement), timeParts(strategy), most);
    part(row, "memory", HTMLElement).textContent = bytesText(strategy.memory_bytes);
    part(row, "reason", HTMLElement).textContent = `${ENDS[strategy.end]}${strategy.reason}`;
    row.addEventListener("click", () => this.onOpen(strategy, true));
    const isChosen = row.dataset.key === this.#chosen;
    row.toggleAttribute("data-chosen", isChosen);
    open.setAttribute("aria-pressed", String(isChosen));
    return row;
  }
}

/** @param {Plan} plan */
function countsText({ strategies, complete }) {
  /** @param {string} end */
  const count = (end) => strategies.filter((one) => one.end === end).length.toLocaleString("en-US");
  const all = countText(strategies.length, complete ? "legal strategy" : "strategy", complete ? "legal strategies" : "strategies");
  return `${all}${complete ? "" : " so far"}: ${count("solved")} have a schedule, ${count("beaten")} are beaten by their bounds, ${count("does_not_fit")} do not fit.`;
}
