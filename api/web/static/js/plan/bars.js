/** Bars of a plan: the time of a step by kind, and the memory of each rank against its budget. */

import { element } from "../elements.js";
import { bytesText, percentText, timeText } from "../units.js";

/** @typedef {import("../types.js").Strategy} Strategy */

/**
 * Kinds of a step's time, with what they add up of a strategy's losses.
 *
 * @type {Record<string, {label: string, of: string[]}>}
 */
const TIMES = {
  model: { label: "model's operations", of: [] },
  memory: { label: "norms, copies, launches", of: ["memory", "launch"] },
  recomputation: { label: "recomputation, offload", of: ["recomputation", "offload"] },
  tensor: { label: "tensor parallel", of: ["tensor"] },
  expert: { label: "expert parallel", of: ["expert"] },
  context: { label: "context parallel", of: ["context"] },
  pipeline: { label: "pipeline transfers", of: ["pipeline"] },
  data: { label: "data parallel", of: ["data", "gather"] },
  optimizer: { label: "optimizer, rest of a step", of: ["optimizer", "step"] },
  bubble: { label: "bubble", of: ["bubble"] },
};

const MEMORY = {
  weights: "weights",
  gradients: "gradients",
  optimizer: "optimizer",
  activations: "activations",
  logits: "logits",
  transient: "transient",
  fragments: "reserved, not used",
  context: "libraries",
};

/** Shares below it are left out of a legend and of lists. */
const LEAST_SHARE = 0.001;

/** @typedef {{name: string, label: string, amount: number}} Part */

/**
 * Parts of a strategy's step in seconds; none where they are not known.
 *
 * @param {Strategy} strategy
 * @returns {Part[]}
 */
export function timeParts({ seconds, lost_s: lost }) {
  if (!lost || seconds === null) return [];
  const parts = Object.entries(TIMES).map(([name, { label, of }]) => {
    return { name: `time-${name}`, label, amount: of.reduce((sum, kind) => sum + Math.max(0, lost[kind] ?? 0), 0) };
  });
  parts[0].amount = Math.max(0, seconds - parts.reduce((sum, { amount }) => sum + amount, 0));
  return parts.filter(({ amount }) => amount > LEAST_SHARE * seconds);
}

/**
 * Parts of what a rank holds, in bytes.
 *
 * @param {Record<string, number>} held
 * @returns {Part[]}
 */
function memoryParts(held) {
  return Object.entries(MEMORY).map(([name, label]) => ({ name: `held-${name}`, label, amount: held[name] ?? 0 }));
}

/**
 * Fill a bar with parts, each as wide as its share of `whole`.
 *
 * @param {HTMLElement} bar
 * @param {Part[]} parts
 * @param {number} whole
 */
export function fillStack(bar, parts, whole) {
  const total = parts.reduce((sum, { amount }) => sum + amount, 0);
  bar.replaceChildren(
    ...parts.map(({ name, label, amount }) => {
      const shown = element("span", "", name);
      shown.style.width = `${(100 * amount) / whole}%`;
      shown.title = `${label}: ${percentText(amount / total)}`;
      return shown;
    }),
  );
  bar.setAttribute("aria-label", parts.map(({ label, amount }) => `${label} ${percentText(amount / total)}`).join(", "));
  bar.hidden = !parts.length;
}

/**
 * @param {HTMLElement} list
 * @param {Part[]} parts each kind once
 */
function fillLegend(list, parts) {
  list.replaceChildren(
    ...parts.map(({ name, label }) => {
      const item = element("li", label);
      item.prepend(element("span", "", `swatch ${name}`));
      return item;
    }),
  );
}

/**
 * The legend of all kinds that some strategy has.
 *
 * @param {HTMLElement} list
 * @param {Strategy[]} strategies
 */
export function fillTimeLegend(list, strategies) {
  const names = new Set(strategies.flatMap((strategy) => timeParts(strategy).map(({ name }) => name)));
  const all = Object.entries(TIMES).map(([name, { label }]) => ({ name: `time-${name}`, label, amount: 0 }));
  fillLegend(list, all.filter(({ name }) => names.has(name)));
}

/**
 * Seconds by kind, largest first, as a list with bars.
 *
 * @param {HTMLElement} list
 * @param {Strategy} strategy
 */
export function fillTimes(list, strategy) {
  const parts = timeParts(strategy).sort((one, other) => other.amount - one.amount);
  const most = parts[0]?.amount ?? 1;
  const rows = parts.flatMap((part) => {
    const term = element("dt", part.label);
    term.prepend(element("span", "", `swatch ${part.name}`));
    const bar = element("dd", "", "stack");
    bar.setAttribute("aria-hidden", "true");
    fillStack(bar, [part], most);
    bar.removeAttribute("aria-label");
    return [term, bar, element("dd", timeText(1e6 * part.amount))];
  });
  list.replaceChildren(...(rows.length ? rows : [element("dt", "It was bounded, not rated.")]));
}

/**
 * A bar for each device of the pipeline, with the budget across all.
 *
 * @param {HTMLElement} host
 * @param {HTMLElement} legend
 * @param {Strategy} strategy
 * @param {number} budget bytes of a GPU
 */
export function fillRanks(host, legend, { ranks = [], memory_bytes: fullest }, budget) {
  const rows = ranks.map(memoryParts);
  const totals = rows.map((parts) => parts.reduce((sum, { amount }) => sum + amount, 0));
  const whole = 1.02 * Math.max(budget, ...totals);
  host.replaceChildren(
    ...rows.flatMap((parts, rank) => {
      const track = element("div", "", "rank-track");
      const bar = element("div", "", "stack");
      bar.setAttribute("role", "img");
      fillStack(bar, parts.filter(({ amount }) => amount > LEAST_SHARE * whole), whole);
      const limit = element("span", "", "rank-limit");
      limit.style.left = `${(100 * budget) / whole}%`;
      track.append(bar, limit);
      return [element("span", String(rank), "faint"), track, element("span", bytesText(totals[rank]))];
    }),
  );
  if (!rows.length) host.replaceChildren(element("p", fullest ? `${bytesText(fullest)} at its fullest rank.` : "It was not rated.", "faint"));
  const names = new Set(rows.flat().filter(({ amount }) => amount > LEAST_SHARE * whole).map(({ name }) => name));
  fillLegend(legend, (rows[0] ?? []).filter(({ name }) => names.has(name)));
  if (!rows.length) return;
  const item = element("li", `budget ${bytesText(budget)}`);
  item.prepend(element("span", "", "swatch swatch-budget"));
  legend.append(item);
}
