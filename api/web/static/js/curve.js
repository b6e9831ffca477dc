/** Objective and bound over the time of a search, as steps: zoomed to the gap that is left, or the whole range. */

import { roundStep, tickText, ticksIn } from "./ticks.js";
import { NONE, percentText, timeText, timeUnit } from "./units.js";
import { element } from "./elements.js";

/** @typedef {{seconds: number, valueUs: number | null, boundUs: number | null, method: string | null}} Point */

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 210;
const MARGIN = { left: 74, right: 16, top: 22, bottom: 30 };
/** Room that a character of the name of a method takes. */
const CHARACTER_PX = 6.5;
/** From the line down to a point to the name of its method. */
const NAME_GAP_PX = 4;
/** The zoomed range reaches this many gaps above the best value, and shows this many of the best values. */
const GAPS = 3;
const BEST_VALUES = 3;
/** Earlier than this, points share the left edge of the logarithmic axis. */
const EARLIEST_S = 0.01;
/** Room that a time below the axis takes. */
const SECOND_PX = 56;

/**
 * @param {SVGSVGElement} svg
 * @param {Point[]} points in order of time
 * @param {number} nowS how far the search is
 * @param {boolean} isZoomed to the gap, with time on a logarithmic axis
 */
export function drawCurve(svg, points, nowS, isZoomed) {
  const width = Math.max(240, svg.clientWidth);
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  const levels = points.flatMap(({ valueUs, boundUs }) => [valueUs, boundUs].filter((level) => level !== null));
  if (!levels.length) {
    svg.replaceChildren();
    return;
  }
  const endS = Math.max(nowS, points[points.length - 1].seconds, 0.1);
  const range = isZoomed ? zoomedRange(points, levels) : wholeRange(levels);
  const scale = buildScale(width, range, isZoomed ? beginOf(points, endS) : 0, endS);
  const found = improvements(points);
  svg.replaceChildren(
    ...axes(scale),
    stepLine("curve-bound", points, (point) => point.boundUs, scale),
    stepLine("curve-value", points.filter((point) => point.valueUs !== null), (point) => point.valueUs, scale),
    ...found.map((point) => dot(point, scale)),
    ...methodNames(found, scale),
  );
}

/** Colours of curves that share an axis, as in the pictures; further curves have the same ones dashed. */
export const SERIES_COLOURS = 6;

/**
 * Values of several searches on one axis, each with its own bound: a bound under tight budgets is none under wider ones.
 *
 * @param {SVGSVGElement} svg
 * @param {Point[][]} series each in order of time
 */
export function drawCurves(svg, series) {
  const width = Math.max(240, svg.clientWidth);
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  const points = series.flat();
  const levels = points.flatMap(({ valueUs, boundUs }) => [valueUs, boundUs].filter((level) => level !== null));
  if (!levels.length) return;
  const endS = Math.max(...points.map(({ seconds }) => seconds), 0.1);
  const scale = buildScale(width, wholeRange(levels), beginOf(points, endS), endS);
  svg.replaceChildren(
    ...axes(scale),
    ...series.flatMap((own, index) => [
      stepLine(`${seriesClass(index)} curve-series-bound`, own, ({ boundUs }) => boundUs, scale),
      stepLine(seriesClass(index), own.filter(({ valueUs }) => valueUs !== null), ({ valueUs }) => valueUs, scale),
    ]),
  );
}

/** @param {number} index of a curve among those that share an axis */
export function seriesClass(index) {
  return `curve-series curve-series-${index % SERIES_COLOURS}${index < SERIES_COLOURS ? "" : " curve-series-dashed"}`;
}

/**
 * The points at which a better schedule was found.
 *
 * @param {Point[]} points
 */
export function improvements(points) {
  const values = points.filter((point) => point.valueUs !== null);
  return values.filter((point, index) => point.valueUs !== values[index - 1]?.valueUs);
}

/**
 * @param {HTMLTableSectionElement} body gets a row for each improvement, the last one first
 * @param {Point[]} points
 */
export function fillImprovements(body, points) {
  const rows = improvements(points).map(({ seconds, valueUs, boundUs, method }) => {
    const row = element("tr");
    const gap = valueUs !== null && boundUs !== null && valueUs > 0 ? (valueUs - boundUs) / valueUs : null;
    const cells = [`${seconds.toFixed(2)} s`, timeText(valueUs), percentText(gap), method ?? NONE];
    row.append(...cells.map((text) => element("td", text)));
    return row;
  });
  body.replaceChildren(...rows.reverse());
}

/** @typedef {{lowUs: number, highUs: number}} Range */

/**
 * @param {number[]} levels
 * @returns {Range}
 */
function wholeRange(levels) {
  const [least, most] = [Math.min(...levels), Math.max(...levels)];
  const room = Math.max(0.12 * (most - least), 0.004 * most, 1e-9);
  return { lowUs: Math.max(0, least - room), highUs: most + room };
}

/**
 * @param {Point[]} points
 * @param {number[]} levels
 * @returns {Range}
 */
function zoomedRange(points, levels) {
  const values = [...new Set(points.flatMap(({ valueUs }) => valueUs ?? []))].sort((one, other) => one - other);
  const bounds = points.flatMap(({ boundUs }) => boundUs ?? []);
  if (!values.length || !bounds.length) return wholeRange(levels);
  const boundUs = Math.max(...bounds);
  const highUs = Math.max(values[0] + GAPS * (values[0] - boundUs), values[Math.min(BEST_VALUES, values.length) - 1]);
  return wholeRange([boundUs, Math.min(highUs, Math.max(...levels))]);
}

/**
 * @typedef {object} Scale
 * @property {number} width
 * @property {Range} range
 * @property {number} endS
 * @property {number[]} secondTicks
 * @property {(seconds: number) => number} x
 * @property {(levelUs: number) => number} y levels beyond the range stand on its edge
 */

/**
 * Where a logarithmic axis begins: at the last of 1, 2, 5 and their powers of ten before the first point.
 *
 * @param {Point[]} points
 * @param {number} endS
 */
function beginOf(points, endS) {
  const firstS = Math.max(EARLIEST_S, Math.min(...points.map(({ seconds }) => seconds)));
  return Math.max(EARLIEST_S, roundStep(Math.min(firstS, endS / 2) / 2.5));
}

/**
 * @param {number} width
 * @param {Range} range
 * @param {number} beginS of a logarithmic axis; 0 for a linear one
 * @param {number} endS
 * @returns {Scale}
 */
function buildScale(width, range, beginS, endS) {
  const across = width - MARGIN.left - MARGIN.right;
  const isLogarithmic = beginS > 0;
  /** @param {number} seconds */
  const share = (seconds) =>
    isLogarithmic ? Math.log(Math.max(seconds, beginS) / beginS) / Math.log(endS / beginS) : seconds / endS;
  const { lowUs, highUs } = range;
  return {
    width,
    range,
    endS,
    secondTicks: isLogarithmic
      ? roundSeconds(beginS, endS, across)
      : ticksIn(0, endS, Math.max(2, Math.floor(width / 110))),
    x: (seconds) => MARGIN.left + share(seconds) * across,
    y: (levelUs) => {
      const within = Math.min(highUs, Math.max(lowUs, levelUs));
      return MARGIN.top + ((highUs - within) / (highUs - lowUs)) * (HEIGHT - MARGIN.top - MARGIN.bottom);
    },
  };
}

/**
 * Marks of a logarithmic axis: 1, 2 and 5 of each power of ten where there is room for them, otherwise 1 alone.
 *
 * @param {number} beginS
 * @param {number} endS
 * @param {number} across pixels from one to the other
 */
function roundSeconds(beginS, endS, across) {
  const decadePx = across / Math.log10(endS / beginS);
  const factors = decadePx * Math.log10(2) >= SECOND_PX ? [1, 2, 5] : [1];
  const powers = Array.from({ length: 9 }, (_, power) => EARLIEST_S * 10 ** power);
  const round = powers.flatMap((power) => factors.map((factor) => factor * power));
  return round.filter((second) => second >= beginS * (1 - 1e-9) && second <= endS);
}

/** @param {Scale} scale */
function axes({ width, range: { lowUs, highUs }, secondTicks, x, y }) {
  const unit = timeUnit(highUs);
  const levelStep = roundStep((highUs - lowUs) / 4);
  const rows = ticksIn(lowUs, highUs, 4).flatMap((level) => [
    line("curve-grid", MARGIN.left, y(level), width - MARGIN.right, y(level)),
    text("curve-label", MARGIN.left - 8, y(level) + 4, `${tickText(level, levelStep, unit)} ${unit.name}`, "end"),
  ]);
  const columns = secondTicks.map((second) =>
    text("curve-label", x(second), HEIGHT - 10, `${Number(second.toPrecision(3))} s`, "middle"),
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
function dot({ seconds, valueUs, method }, { x, y }) {
  const circle = document.createElementNS(SVG, "circle");
  circle.setAttribute("class", "curve-dot");
  circle.setAttribute("cx", String(x(seconds)));
  circle.setAttribute("cy", String(y(valueUs ?? 0)));
  circle.setAttribute("r", "3");
  const title = document.createElementNS(SVG, "title");
  title.textContent = `${timeText(valueUs)} after ${seconds.toFixed(2)} s${method ? `, ${method}` : ""}`;
  circle.append(title);
  return circle;
}

/**
 * The name of the method wherever another one took the lead; of names that would cover each other the later one.
 *
 * @param {Point[]} found
 * @param {Scale} scale
 */
function methodNames(found, { width, x, y }) {
  let free = Infinity;
  const names = [];
  for (let index = found.length - 1; index >= 0; index -= 1) {
    const { seconds, valueUs, method } = found[index];
    if (!method || method === found[index - 1]?.method) continue;
    const namePx = CHARACTER_PX * method.length;
    const left = Math.min(x(seconds) + NAME_GAP_PX, width - MARGIN.right - namePx);
    if (left + namePx > free) continue;
    free = left;
    names.unshift(text("curve-method", left, y(valueUs ?? 0) - 8, method, "start"));
  }
  return names;
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
