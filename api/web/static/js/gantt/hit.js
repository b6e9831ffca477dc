/** Ops by their position on the chart: the one at a point, the one a step away. */

import { lastAtOrBefore } from "../memory.js";
import { SCALE_PX, stripOf, timeAt } from "./layout.js";

/**
 * Position of an op: row of the layout, lane of the row, index in the lane.
 *
 * @typedef {{row: number, lane: number, index: number}} Spot
 */

/** How far beside an op a pointer may be, in CSS pixels: ops can be narrower than a pointer is exact. */
const TOLERANCE_PX = 2;

/**
 * @param {import("./layout.js").Scene} scene
 * @param {Spot} spot
 */
export function opAt(scene, { row, lane, index }) {
  return scene.layout.rows[row].device.lanes[lane].ops[index];
}

/**
 * @param {import("./layout.js").Scene} scene
 * @param {number} x
 * @param {number} y from the top of the canvas
 * @returns {Spot | null}
 */
export function spotAt(scene, x, y) {
  const { layout } = scene;
  const contentY = y - SCALE_PX + scene.scrollTop;
  if (x < layout.left || x > layout.right || y < SCALE_PX) return null;
  const row = layout.rows.findIndex(({ top, bottom }) => top <= contentY && contentY <= bottom);
  if (row < 0) return null;
  const lane = layout.rows[row].lanes.findIndex(({ top, height }) => top <= contentY && contentY < top + height + 2);
  if (lane < 0) return null;
  const { ops } = layout.rows[row].device.lanes[lane];
  const index = indexAt(scene, layout.rows[row].device.lanes[lane], timeAt(scene, x));
  if (index < 0) return null;
  // Of the two ops of a block, which start together, the second is found.
  const isAbove = ops[index].op !== "F" && contentY < stripOf(ops[index], layout.rows[row].lanes[lane]).top;
  return { row, lane, index: isAbove ? index - 1 : index };
}

/**
 * @param {import("./layout.js").Scene} scene
 * @param {import("./model.js").Lane} lane
 * @param {number} timeUs
 */
function indexAt(scene, lane, timeUs) {
  const { time, layout } = scene;
  const toleranceUs = (TOLERANCE_PX * time.spanUs) / (layout.right - layout.left);
  const index = lastAtOrBefore(lane.startUs, timeUs);
  if (index >= 0 && timeUs <= lane.endUs[index]) return index;
  if (index + 1 < lane.ops.length && lane.startUs[index + 1] - timeUs <= toleranceUs) return index + 1;
  return index >= 0 && timeUs - lane.endUs[index] <= toleranceUs ? index : -1;
}

/**
 * Position of the same op, perhaps of another schedule.
 *
 * @param {import("./layout.js").Scene} scene
 * @param {import("../types.js").PlannedOp} op
 * @returns {Spot | null} null where there is no such op
 */
export function findSpot(scene, { op: kind, stage, part, microbatch }) {
  for (const [row, { device }] of scene.layout.rows.entries()) {
    for (const [lane, { ops }] of device.lanes.entries()) {
      const index = ops.findIndex(
        (op) => op.op === kind && op.stage === stage && op.part === part && op.microbatch === microbatch,
      );
      if (index >= 0) return { row, lane, index };
    }
  }
  return null;
}

/**
 * The spot a step away: along its lane, or on another lane at about the same time.
 *
 * @param {import("./layout.js").Scene} scene
 * @param {Spot | null} from none: the first op that can be seen
 * @param {"next" | "previous" | "below" | "above"} step
 * @returns {Spot | null} null where there is none
 */
export function stepFrom(scene, from, step) {
  if (!from) return firstVisible(scene);
  const { rows } = scene.layout;
  const lane = rows[from.row].device.lanes[from.lane];
  if (step === "next") return from.index + 1 < lane.ops.length ? { ...from, index: from.index + 1 } : null;
  if (step === "previous") return from.index > 0 ? { ...from, index: from.index - 1 } : null;
  const lanes = rows.flatMap(({ device }, row) => device.lanes.map((_, lane) => ({ row, lane })));
  const at = lanes.findIndex(({ row, lane: other }) => row === from.row && other === from.lane);
  const other = lanes[at + (step === "below" ? 1 : -1)];
  if (!other) return null;
  const target = rows[other.row].device.lanes[other.lane];
  const middleUs = (lane.startUs[from.index] + lane.endUs[from.index]) / 2;
  return target.ops.length ? { ...other, index: Math.max(0, lastAtOrBefore(target.startUs, middleUs)) } : null;
}

/**
 * @param {import("./layout.js").Scene} scene
 * @returns {Spot | null}
 */
function firstVisible(scene) {
  const { rows } = scene.layout;
  const row = Math.max(0, rows.findIndex(({ top }) => top >= scene.scrollTop));
  const lane = rows[row]?.device.lanes[0];
  if (!lane?.ops.length) return null;
  const before = lastAtOrBefore(lane.startUs, scene.time.fromUs);
  const index = before >= 0 && lane.endUs[before] > scene.time.fromUs ? before : before + 1;
  return { row, lane: 0, index: Math.min(index, lane.ops.length - 1) };
}
