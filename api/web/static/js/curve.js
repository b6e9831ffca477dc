/** Objective and bound over the time of a search, as steps. */

import { ticksIn, tickText, roundStep } from "./ticks.js";
import { timeText, timeUnit } from "./units.js";

/** @typedef {{seconds: number, valueUs: number | null, boundUs: number | null}} Point */

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 190;
const MARGIN = { left: 74, right: 16, top: 10, bottom: 30 };

/**
 * @param {SVGSVGElement} svg
 * @param {Point[]} points in order of time
 * @param {number} nowS how far the search is
 */
export function drawCurve(svg, points, nowS) {
  const width = Math.max(240, svg.clientWidth);
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  const levels = points.flatMap(({ valueUs, boundUs }) => [valueUs, boundUs].filter((level) => level !== null));
  if (!levels.length) {
    svg.replaceChildren();
    return;
  }
  const scale = fitScale(width, levels, Math.max(nowS, points[points.length - 1].seconds, 0.1));
  const values = points.filter((point) => point.valueUs !== null);
  svg.replaceChildren(
    ...axes(scale),
    stepLine("curve-bound", points, (point) => point.boundUs, scale),
    stepLine("curve-value", values, (point) => point.valueUs, scale),
    ...values.filter((point, index) => point.valueUs !== values[index - 1]?.valueUs).map((point) => dot(point, scale)),
  );
}

/**
 * @typedef {object} Scale
 * @property {number} width
 * @property {number} lowUs
 * @property {number} highUs
 * @property {number} endS
 * @property {(seconds: number) => number} x
 * @property {(levelUs: number) => number} y
 */

/**
 * @param {number} width
 * @param {number[]} levels
 * @param {number} endS
 * @returns {Scale}
 */
function fitScale(width, levels, endS) {
  const least = Math.min(...levels);
  const most = Math.max(...levels);
  const room = Math.max(0.12 * (most - least), 0.004 * most, 1e-9);
  const lowUs = Math.max(0, least - room);
  const highUs = most + room;
  const x = (/** @type {number} */ seconds) =>
    MARGIN.left + (seconds / endS) * (width - MARGIN.left - MARGIN.right);
  const y = (/** @type {number} */ levelUs) =>
    MARGIN.top + ((highUs - levelUs) / (highUs - lowUs)) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  return { width, lowUs, highUs, endS, x, y };
}

/** @param {Scale} scale */
function axes({ width, lowUs, highUs, endS, x, y }) {
  const unit = timeUnit(highUs);
  const levelStep = roundStep((highUs - lowUs) / 4);
  const secondStep = roundStep(endS / Math.max(2, Math.floor(width / 110)));
  const rows = ticksIn(lowUs, highUs, 4).flatMap((level) => [
    line("curve-grid", MARGIN.left, y(level), width - MARGIN.right, y(level)),
    text("curve-label", MARGIN.left - 8, y(level) + 4, `${tickText(level, levelStep, unit)} ${unit.name}`, "end"),
  ]);
  const columns = ticksIn(0, endS, Math.max(2, Math.floor(width / 110))).map((second) =>
    text("curve-label", x(second), HEIGHT - 10, `${tickText(second, secondStep, { name: "s", size: 1 })} s`, "middle"),
  );
  return [...rows, ...columns];
}

/**
 * @param {string} className
 * @param {Point[]} points
 * @param {(point: Point) => number | null} level
 * @param {Scale} scale
 */
function stepLine(className, points, level, { x, y, endS }) {
  const path = document.createElementNS(SVG, "path");
  let data = "";
  for (const point of points) {
    const levelUs = level(point);
    if (levelUs !== null) data += data ? `H${x(point.seconds)}V${y(levelUs)}` : `M${x(point.seconds)} ${y(levelUs)}`;
  }
  if (data) path.setAttribute("d", `${data}H${x(endS)}`);
  path.setAttribute("class", className);
  return path;
}

/**
 * @param {Point} point
 * @param {Scale} scale
 */
function dot({ seconds, valueUs }, { x, y }) {
  const circle = document.createElementNS(SVG, "circle");
  circle.setAttribute("class", "curve-dot");
  circle.setAttribute("cx", String(x(seconds)));
  circle.setAttribute("cy", String(y(valueUs ?? 0)));
  circle.setAttribute("r", "3");
  const title = document.createElementNS(SVG, "title");
  title.textContent = `${timeText(valueUs)} after ${seconds.toFixed(2)} s`;
  circle.append(title);
  return circle;
}

/**
 * @param {string} className
 * @param {number} x1
 * @param {number} y1
 * @param {number} x2
 * @param {number} y2
 */
function line(className, x1, y1, x2, y2) {
  const made = document.createElementNS(SVG, "line");
  for (const [name, value] of Object.entries({ x1, y1, x2, y2 })) made.setAttribute(name, String(value));
  made.setAttribute("class", className);
  return made;
}

/**
 * @param {string} className
 * @param {number} x
 * @param {number} y
 * @param {string} content
 * @param {"start" | "middle" | "end"} anchor
 */
function text(className, x, y, content, anchor) {
  const made = document.createElementNS(SVG, "text");
  made.setAttribute("class", className);
  made.setAttribute("x", String(x));
  made.setAttribute("y", String(y));
  made.setAttribute("text-anchor", anchor);
  made.textContent = content;
  return made;
}
