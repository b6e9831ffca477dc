/** What the chart shows, as a table: one row a device. */

import { element } from "../elements.js";
import { bytesText, percentText, timeText, timeUnit } from "../units.js";

/**
 * @param {HTMLTableSectionElement} body
 * @param {import("./model.js").Model} model
 */
export function fillTable(body, model) {
  const unit = timeUnit(model.endUs - model.beginUs);
  body.replaceChildren(...model.devices.map((device) => tableRow(device, unit)));
}

/**
 * @param {import("./model.js").Device} device
 * @param {import("../units.js").Unit} unit
 */
function tableRow({ name, stages, plan, lanes, budgetBytes }, unit) {
  const row = element("tr");
  const heading = element("th", name);
  heading.scope = "row";
  const cells = [
    stages.join(", ") || "none",
    lanes.reduce((sum, lane) => sum + lane.ops.length, 0).toLocaleString("en-US"),
    timeText(plan.busy_us, unit),
    percentText(plan.bubble),
    bytesText(plan.peak_bytes),
    bytesText(plan.peak_bytes_any_timing),
    budgetBytes === null ? "no limit" : bytesText(budgetBytes),
  ];
  row.append(heading, ...cells.map((text) => element("td", text)));
  return row;
}
