/** Description of one op: as a tooltip beside it, and as a sentence for screen readers. */

import { element } from "../elements.js";
import { KIND, lookOf } from "../kinds.js";
import { levelAt } from "../memory.js";
import { sliceCount, unitName } from "../slices.js";
import { bytesText, timeText, timeUnit } from "../units.js";
import { opAt } from "./hit.js";

/** @typedef {import("./layout.js").Scene} Scene */

/** From the pointer to the tooltip, and from the tooltip to the edge of the chart. */
const GAP_PX = 14;

/** @typedef {import("./dependencies.js").Dependencies} Dependencies */

/**
 * Facts about an op, as pairs of a name and a value.
 *
 * @param {Scene} scene
 * @param {import("./hit.js").Spot} spot
 * @param {Dependencies | null} dependencies
 * @returns {{title: string, facts: [string, string][]}}
 */
export function describe(scene, spot, dependencies) {
  const op = opAt(scene, spot);
  const { device } = scene.layout.rows[spot.row];
  const beginUs = scene.time.beginUs;
  const unit = timeUnit(scene.time.endUs - beginUs);
  const budget = device.budgetBytes === null ? "" : ` of ${bytesText(device.budgetBytes)}`;
  /** @type {[string, string][]} */
  const facts = [
    ["on", op.stage === undefined ? device.name : `stage ${op.stage}, ${device.name}`],
    ["from", timeText(op.start_us - beginUs, unit)],
    ["to", timeText(op.end_us - beginUs, unit)],
    ["takes", timeText(op.end_us - op.start_us)],
  ];
  if (device.memory.bytes.length) {
    facts.push(["memory in it", `${bytesText(levelAt(device.memory, op.start_us))}${budget}`]);
    facts.push(["memory after", bytesText(levelAt(device.memory, op.end_us))]);
  }
  const cause = dependencies?.startsAfter(spot);
  if (cause) facts.push(["starts after", causeText(cause)]);
  if (op.with) facts.push(["in a block with", op.with]);
  if (op.mode) facts.push(["activation", op.mode]);
  if (op.waits?.length) facts.push(["waits for", waitsText(op.waits)]);
  const { problem } = scene.model.schedule;
  const count = sliceCount(problem);
  const part = count === 1 ? "" : `slice ${op.microbatch % count} of `;
  const microbatch = `${part}microbatch ${Math.floor(op.microbatch / count)}`;
  return { title: `${op.op} ${unitName(problem, op.microbatch)}: ${KIND[lookOf(op.op)].label} of ${microbatch}`, facts };
}

/**
 * @param {Scene} scene
 * @param {import("./hit.js").Spot} spot
 * @param {Dependencies | null} dependencies
 */
export function spokenText(scene, spot, dependencies) {
  const { title, facts } = describe(scene, spot, dependencies);
  return `${title}; ${facts.map(([name, value]) => `${name} ${value}`).join(", ")}`;
}

/**
 * Fill the tooltip and place it beside a point where it covers neither the pointer nor the chart's edge.
 *
 * @param {HTMLElement} tooltip
 * @param {Scene} scene
 * @param {import("./hit.js").Spot} spot
 * @param {Dependencies | null} dependencies
 * @param {{x: number, y: number}} at
 */
export function showTooltip(tooltip, scene, spot, dependencies, { x, y }) {
  const { title, facts } = describe(scene, spot, dependencies);
  const list = element("dl");
  for (const [name, value] of facts) list.append(element("dt", name), element("dd", value));
  tooltip.replaceChildren(element("strong", title), list);
  tooltip.hidden = false;
  const { offsetWidth, offsetHeight } = tooltip;
  const left = x + GAP_PX + offsetWidth <= scene.width ? x + GAP_PX : Math.max(0, x - GAP_PX - offsetWidth);
  const top = y + GAP_PX + offsetHeight <= scene.height ? y + GAP_PX : Math.max(0, y - GAP_PX - offsetHeight);
  tooltip.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
}

/** @param {{name: string, delayUs: number}} cause */
function causeText({ name, delayUs }) {
  return delayUs > 0 ? `${name} and ${timeText(delayUs)} of transfer` : name;
}

/** @param {string[]} waits */
function waitsText(waits) {
  const shown = waits.slice(0, 3).join(", ");
  return waits.length > 3 ? `${shown} and ${waits.length - 3} more` : shown;
}
