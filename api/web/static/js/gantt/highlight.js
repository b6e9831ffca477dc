/** The layer above the chart: the microbatch and the dependencies of one op, the critical path, the pointer's time. */

import { tickText } from "../ticks.js";
import { timeUnit } from "../units.js";
import { FONT, SCALE_PX, stripOf, timeAt, xAt } from "./layout.js";
import { opName } from "./dependencies.js";
import { opAt } from "./hit.js";

/** @typedef {import("./layout.js").Scene} Scene */
/** @typedef {import("./hit.js").Spot} Spot */
/** @typedef {import("./dependencies.js").Dependencies} Dependencies */

const ARROW_PX = 7;

/**
 * @typedef {object} Highlight
 * @property {Spot | null} spot the op pointed at
 * @property {number | null} pointerX
 * @property {Spot[]} path the critical path, empty: not shown
 * @property {Dependencies} dependencies
 */

/**
 * @param {CanvasRenderingContext2D} context scaled to CSS pixels
 * @param {Scene} scene
 * @param {Highlight} highlight
 */
export function drawHighlight(context, scene, { spot, pointerX, path, dependencies }) {
  context.clearRect(0, 0, scene.width, scene.height);
  if (pointerX !== null) drawPointerTime(context, scene, pointerX);
  context.save();
  context.beginPath();
  context.rect(scene.layout.left - 2, SCALE_PX, scene.layout.right - scene.layout.left + 4, scene.height - SCALE_PX);
  context.clip();
  if (path.length) drawPath(context, scene, path);
  if (spot) {
    drawMicrobatch(context, scene, spot);
    drawDependencies(context, scene, spot, dependencies);
  }
  context.restore();
}

/**
 * Outlines the op at `spot`, and every other op of its microbatch more thinly.
 *
 * @param {CanvasRenderingContext2D} context
 * @param {Scene} scene
 * @param {Spot} spot
 */
function drawMicrobatch(context, scene, spot) {
  const { microbatch } = opAt(scene, spot);
  context.strokeStyle = scene.theme.plain.ink;
  scene.layout.rows.forEach(({ device }, row) => {
    device.lanes.forEach(({ ops }, lane) => {
      ops.forEach((op, index) => {
        if (op.microbatch !== microbatch) return;
        if (op.end_us < scene.time.fromUs || op.start_us > scene.time.toUs) return;
        const chosen = row === spot.row && lane === spot.lane && index === spot.index;
        outline(context, scene, { row, lane, index }, chosen ? 3 : 1.25);
      });
    });
  });
}

/**
 * Arrows from the ops that the one at `spot` waits for, the thick one from the last of them, and dashed ones to those
 * that wait for it. What merely ran before on the same stream has no arrow.
 *
 * @param {CanvasRenderingContext2D} context
 * @param {Scene} scene
 * @param {Spot} spot
 * @param {Dependencies} dependencies
 */
function drawDependencies(context, scene, spot, dependencies) {
  const last = dependencies.startsAfter(spot)?.name;
  for (const cause of dependencies.needs(spot)) {
    arrow(context, scene, cause, spot, opName(dependencies.op(cause)) === last ? 2.5 : 1.25, []);
  }
  for (const effect of dependencies.effects(spot)) arrow(context, scene, spot, effect, 1.25, [4, 3]);
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Scene} scene
 * @param {Spot[]} path
 */
function drawPath(context, scene, path) {
  context.strokeStyle = context.fillStyle = scene.theme.plain.path;
  path.forEach((spot, index) => {
    const { start_us: startUs, end_us: endUs } = opAt(scene, spot);
    if (index && path[index - 1].row !== spot.row) arrow(context, scene, path[index - 1], spot, 2, [], scene.theme.plain.path);
    if (endUs < scene.time.fromUs || startUs > scene.time.toUs) return;
    outline(context, scene, spot, 2.5);
  });
}

/**
 * @param {Scene} scene
 * @param {Spot} spot
 */
function opBox(scene, spot) {
  const op = opAt(scene, spot);
  const { start_us: startUs, end_us: endUs } = op;
  const strip = stripOf(op, scene.layout.rows[spot.row].lanes[spot.lane]);
  const left = xAt(scene, startUs);
  return { left, right: xAt(scene, endUs), top: strip.top + SCALE_PX - scene.scrollTop, height: strip.height };
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Scene} scene
 * @param {Spot} spot
 * @param {number} width of the line
 */
function outline(context, scene, spot, width) {
  const { left, right, top, height } = opBox(scene, spot);
  context.lineWidth = width;
  context.strokeRect(left, top + 0.5, Math.max(1, right - left - 1), height - 1);
}

/**
 * From the end of one op to the start of another.
 *
 * @param {CanvasRenderingContext2D} context
 * @param {Scene} scene
 * @param {Spot} from
 * @param {Spot} to
 * @param {number} width
 * @param {number[]} dashes
 * @param {string} [colour]
 */
function arrow(context, scene, from, to, width, dashes, colour = scene.theme.plain.ink) {
  const source = opBox(scene, from);
  const target = opBox(scene, to);
  const [x1, y1] = [source.right, source.top + source.height / 2];
  const [x2, y2] = [target.left, target.top + target.height / 2];
  if (Math.max(x1, x2) < scene.layout.left || Math.min(x1, x2) > scene.layout.right) return;
  const angle = Math.atan2(y2 - y1, x2 - x1);
  // A halo keeps the arrow legible on boxes of any colour.
  for (const [style, extra] of /** @type {[string, number][]} */ ([[scene.theme.plain.surface, 2.5], [colour, 0]])) {
    context.strokeStyle = context.fillStyle = style;
    context.lineWidth = width + extra;
    context.setLineDash(extra ? [] : dashes);
    context.beginPath();
    context.moveTo(x1, y1);
    context.lineTo(x2, y2);
    context.stroke();
    context.setLineDash([]);
    context.beginPath();
    context.moveTo(x2, y2);
    for (const side of [-0.45, 0.45]) {
      context.lineTo(x2 - ARROW_PX * Math.cos(angle + side), y2 - ARROW_PX * Math.sin(angle + side));
    }
    context.closePath();
    context.fill();
  }
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Scene} scene
 * @param {number} x
 */
function drawPointerTime(context, scene, x) {
  const { layout, theme, time } = scene;
  if (x < layout.left || x > layout.right) return;
  const stepUs = time.spanUs / (layout.right - layout.left);
  const text = tickText(timeAt(scene, x) - time.beginUs, stepUs, timeUnit(time.endUs - time.beginUs));
  context.fillStyle = theme.plain.faintInk;
  context.fillRect(Math.round(x), SCALE_PX - 2, 1, scene.height);
  context.font = `600 11px ${FONT}`;
  const width = context.measureText(text).width + 10;
  const left = Math.min(Math.max(x - width / 2, layout.left), layout.right - width);
  context.fillRect(left, 3, width, SCALE_PX - 8);
  context.fillStyle = theme.plain.surface;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillText(text, left + width / 2, SCALE_PX / 2);
}
