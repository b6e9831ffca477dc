/** What the chart shows, as a table: one row a device. */

import { element, part } from "../elements.js";
import { bytesText, timeText, timeUnit } from "../units.js";

/**
 * @param {HTMLElement} figure
 * @param {import("./model.js").Model} model
 */
export function fillTable(figure, model) {
  const unit = timeUnit(model.endUs - model.beginUs);
  const withModes = model.schedule.problem.stages.some((stage) => stage.modes?.length || stage.offload);
  part(figure, "held-head", HTMLElement).hidden = !withModes;
  const rows = model.devices.map((device) => tableRow(device, unit, withModes));
  part(figure, "table", HTMLTableSectionElement).replaceChildren(...rows);
}

/**
 * How many activations are held in which way, such as ``8 kept, 4 full``.
 *
 * @param {import("./model.js").Device} device
 */
function heldText({ plan }) {
  const offloaded = new Set((plan.offload ?? []).map(({ stage, microbatch }) => `${stage}.${microbatch}`));
  /** @type {Map<string, number>} */
  const counts = new Map();
  for (const { op, stage, microbatch, mode } of plan.compute) {
    if (op !== "F") continue;
    const name = mode ?? (offloaded.has(`${stage}.${microbatch}`) ? "offload" : "kept");
    counts.set(name, (counts.get(name) ?? 0) + 1);
  }
  return [...counts].map(([name, count]) => `${count} ${name}`).join(", ");
}

/**
 * @param {import("./model.js").Device} device
 * @param {import("../units.js").Unit} unit
 * @param {boolean} withModes
 */
function tableRow(device, unit, withModes) {
  const { name, stages, plan, lanes, budgetBytes, idleUs } = device;
  const row = element("tr");
  const heading = element("th", name);
  heading.scope = "row";
  const cells = [
    stages.join(", ") || "none",
    lanes.reduce((sum, lane) => sum + lane.ops.length, 0).toLocaleString("en-US"),
    timeText(plan.busy_us, unit),
    ...(idleUs ?? [null, null, null]).map((us) => timeText(us, unit)),
    bytesText(plan.peak_bytes),
    bytesText(plan.peak_bytes_any_timing),
    budgetBytes === null ? "no limit" : bytesText(budgetBytes),
    ...(withModes ? [heldText(device)] : []),
  ];
  row.append(heading, ...cells.map((text) => element("td", text)));
  return row;
}
