/** The Gantt chart with memory: holds a schedule, redraws it on change, handles input. */

import { announce } from "../announce.js";
import { fromTemplate, part } from "../elements.js";
import { readTheme } from "../palette.js";
import { onThemeChange } from "../theme.js";
import { drawChart } from "./draw.js";
import { drawHighlight } from "./highlight.js";
import { findSpot, opAt, spotAt, stepFrom } from "./hit.js";
import { listen } from "./input.js";
import { SCALE_PX, buildLayout, timeAt, xAt } from "./layout.js";
import { fillLegend } from "./legend.js";
import { buildLooks } from "./looks.js";
import { buildModel } from "./model.js";
import { fillTable } from "./table.js";
import { TimeWindow } from "./time_window.js";
import { showTooltip, spokenText } from "./tooltip.js";

export class GanttChart {
  /** @type {import("./layout.js").Scene | null} */
  #scene = null;
  /** @type {import("./hit.js").Spot | null} */
  #spot = null;
  /** @type {number | null} */
  #pointerX = null;
  /** Where the tooltip was asked for. */
  #tooltipAt = { x: 0, y: 0 };
  #frame = 0;
  #baseIsStale = true;
  #ending = new AbortController();

  /**
   * @param {HTMLElement} host gets the chart
   * @param {{name: string, time?: TimeWindow, memory?: boolean}} options `time` is shared by charts that move together
   */
  constructor(host, { name, time = new TimeWindow(0, 1), memory = true }) {
    this.time = time;
    const content = fromTemplate("template-chart");
    this.figure = part(content, "chart", HTMLElement);
    this.surface = part(content, "surface", HTMLElement);
    this.view = part(content, "view", HTMLElement);
    this.space = part(content, "space", HTMLElement);
    this.base = part(content, "base", HTMLCanvasElement);
    this.overlay = part(content, "overlay", HTMLCanvasElement);
    this.tooltip = part(content, "tooltip", HTMLElement);
    this.magnification = part(content, "magnification", HTMLElement);
    this.memory = part(content, "memory", HTMLInputElement);
    this.memory.checked = memory;
    host.replaceChildren(content);
    this.rename(name);
    this.#listen();
  }

  /** @param {string} name the accessible name */
  rename(name) {
    this.figure.setAttribute("aria-label", name);
    this.surface.setAttribute("aria-label", `Gantt chart of ${name}`);
  }

  /**
   * Show a schedule; the stretch of time in view stays where it is, and so does the op that is pointed at.
   *
   * @param {import("../types.js").Schedule} schedule
   * @param {boolean} [ownTime] whether the time scale follows this schedule alone
   */
  show(schedule, ownTime = true) {
    const model = buildModel(schedule);
    const theme = readTheme(this.figure);
    const pointedAt = this.#scene && this.#spot && opAt(this.#scene, this.#spot);
    if (ownTime) this.time.setBounds(model.beginUs, model.endUs);
    this.#scene = {
      model,
      theme,
      layout: buildLayout(model, this.surface.clientWidth, { memory: this.memory.checked }),
      looks: buildLooks(model, theme),
      time: this.time,
      width: 0,
      height: 0,
      scrollTop: 0,
    };
    fillTable(part(this.figure, "table", HTMLTableSectionElement), model);
    this.#measure();
    this.#spot = pointedAt && findSpot(this.#scene, pointedAt);
    this.#showTooltip();
  }

  /** Stop listening; the elements are the caller's to remove. */
  destroy() {
    this.#ending.abort();
    cancelAnimationFrame(this.#frame);
  }

  #listen() {
    const { signal } = this.#ending;
    listen(this.#target(), signal);
    const stopTime = this.time.subscribe(() => this.#changed());
    const stopTheme = onThemeChange(() => this.#readTheme());
    const observer = new ResizeObserver(() => this.#measure());
    observer.observe(this.surface);
    signal.addEventListener("abort", () => {
      stopTime();
      stopTheme();
      observer.disconnect();
    });
    this.surface.addEventListener("scroll", () => this.#changed(), { signal });
    this.surface.addEventListener("blur", () => this.#point(null), { signal });
    this.memory.addEventListener("change", () => this.#measure(), { signal });
    const buttons = { "zoom-in": () => this.#zoom(1.5, null), "zoom-out": () => this.#zoom(1 / 1.5, null) };
    for (const [name, act] of Object.entries({ ...buttons, fit: () => this.time.fit() })) {
      part(this.figure, name, HTMLButtonElement).addEventListener("click", act, { signal });
    }
  }

  /** @returns {import("./input.js").Target} */
  #target() {
    return {
      surface: this.surface,
      zoom: (factor, x) => this.#zoom(factor, x),
      pan: (dx, dy) => this.#pan(dx, dy),
      fit: () => this.time.fit(),
      hover: (x, y) => this.#point(this.#scene && spotAt(this.#scene, x, y), x, y),
      leave: () => this.#point(null),
      choose: (x, y) => this.#point(this.#scene && spotAt(this.#scene, x, y), x, y),
      step: (step) => this.#step(step),
      dismiss: () => this.#point(null),
    };
  }

  /**
   * @param {number} factor
   * @param {number | null} x null: the op pointed at, or the middle
   */
  #zoom(factor, x) {
    const scene = this.#scene;
    if (!scene) return;
    const op = x === null && this.#spot ? opAt(scene, this.#spot) : null;
    const middle = op ? (op.start_us + op.end_us) / 2 : (this.time.fromUs + this.time.toUs) / 2;
    this.time.zoom(factor, x === null ? middle : timeAt(scene, x));
  }

  /**
   * @param {number} dx
   * @param {number} dy
   */
  #pan(dx, dy) {
    const scene = this.#scene;
    if (!scene) return;
    if (dx) this.time.pan((-dx * this.time.spanUs) / (scene.layout.right - scene.layout.left));
    if (dy) this.surface.scrollTop -= dy;
    this.tooltip.hidden = true;
  }

  /** @param {"next" | "previous" | "below" | "above"} step */
  #step(step) {
    const scene = this.#scene;
    const spot = scene && stepFrom(scene, this.#spot, step);
    if (!scene || !spot) return;
    const op = opAt(scene, spot);
    const strip = scene.layout.rows[spot.row].lanes[spot.lane];
    this.time.reveal(op.start_us, op.end_us);
    const room = scene.height - SCALE_PX;
    if (strip.top < this.surface.scrollTop || strip.top + strip.height > this.surface.scrollTop + room) {
      this.surface.scrollTop = strip.top - room / 2;
    }
    scene.scrollTop = this.surface.scrollTop;
    this.#point(spot, xAt(scene, op.end_us), strip.top + strip.height + SCALE_PX - scene.scrollTop);
    this.#pointerX = null;
    announce(spokenText(scene, spot));
  }

  /**
   * @param {import("./hit.js").Spot | null} spot
   * @param {number} [x] none: nothing is pointed at
   * @param {number} [y]
   */
  #point(spot, x, y = 0) {
    this.#spot = spot;
    this.#pointerX = x ?? null;
    this.#tooltipAt = { x: x ?? 0, y };
    this.#showTooltip();
    this.#schedule();
  }

  #showTooltip() {
    if (this.#scene && this.#spot) showTooltip(this.tooltip, this.#scene, this.#spot, this.#tooltipAt);
    else this.tooltip.hidden = true;
  }

  #readTheme() {
    if (!this.#scene) return;
    this.#scene.theme = readTheme(this.figure);
    this.#scene.looks = buildLooks(this.#scene.model, this.#scene.theme);
    this.#changed();
  }

  /** Fit everything to the size that the chart has now. */
  #measure() {
    const scene = this.#scene;
    if (!scene) return;
    const width = this.surface.clientWidth;
    scene.layout = buildLayout(scene.model, width, { memory: this.memory.checked });
    fillLegend(part(this.figure, "legend", HTMLElement), scene.model, this.memory.checked);
    this.space.style.height = `${scene.layout.height + SCALE_PX}px`;
    scene.width = this.surface.clientWidth;
    scene.height = this.surface.clientHeight;
    this.view.style.height = `${scene.height}px`;
    for (const canvas of [this.base, this.overlay]) {
      canvas.width = Math.round(scene.width * devicePixelRatio);
      canvas.height = Math.round(scene.height * devicePixelRatio);
    }
    this.#changed();
  }

  #changed() {
    this.#baseIsStale = true;
    this.#schedule();
  }

  #schedule() {
    if (!this.#frame) this.#frame = requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    this.#frame = 0;
    const scene = this.#scene;
    if (!scene || !scene.width) return;
    scene.scrollTop = this.surface.scrollTop;
    if (this.#baseIsStale) {
      this.#baseIsStale = false;
      drawChart(scaled(this.base), scene);
      this.magnification.textContent = magnificationText(this.time.magnification);
      this.figure.dataset.magnification = this.time.magnification.toFixed(3);
    }
    drawHighlight(scaled(this.overlay), scene, this.#spot, this.#pointerX);
  }
}

/**
 * @param {HTMLCanvasElement} canvas
 * @returns {CanvasRenderingContext2D} on which a unit is a CSS pixel
 */
function scaled(canvas) {
  const context = canvas.getContext("2d");
  if (!context) throw new Error("this browser draws on no canvas");
  context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  return context;
}

/** @param {number} factor */
function magnificationText(factor) {
  return `${factor.toLocaleString("en-US", { maximumFractionDigits: factor < 10 ? 1 : 0 })}×`;
}
