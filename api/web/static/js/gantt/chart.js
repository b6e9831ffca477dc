/** The Gantt chart with memory: holds a schedule, redraws it on change, handles input. */

import { announce } from "../announce.js";
import { analyze } from "../api.js";
import { fromTemplate, part } from "../elements.js";
import { readTheme } from "../palette.js";
import { LONGEST_RETRY_MS, maySucceedLater, pause } from "../retry.js";
import { onThemeChange } from "../theme.js";
import { countText, timeText } from "../units.js";
import { Dependencies, opName, parseOpName } from "./dependencies.js";
import { drawChart } from "./draw.js";
import { drawHighlight } from "./highlight.js";
import { findSpot, opAt, spotAt, stepFrom } from "./hit.js";
import { listen } from "./input.js";
import { SCALE_PX, buildLayout, fittingScale, timeAt, xAt } from "./layout.js";
import { fillLegend } from "./legend.js";
import { buildLooks } from "./looks.js";
import { Minimap } from "./minimap.js";
import { buildModel } from "./model.js";
import { fillTable } from "./table.js";
import { TimeWindow } from "./time_window.js";
import { showTooltip, spokenText } from "./tooltip.js";

/** Rows are made flatter to fit a window, down to this scale, where their labels can still be read. */
const LEAST_LEGIBLE_SCALE = 0.4;
const LEAST_SCALE = 0.02;
const MOST_SCALE = 3;
const ZOOM_STEP = 1.5;

export class GanttChart {
  /** @type {import("./layout.js").Scene | null} */
  #scene = null;
  /** @type {Dependencies | null} */
  #dependencies = null;
  /** @type {import("./hit.js").Spot[]} */
  #path = [];
  /** The op that the pointer is on, and the one that was chosen, which stays when the pointer leaves.
   * @type {import("./hit.js").Spot | null} */
  #hovered = null;
  /** @type {import("./hit.js").Spot | null} */
  #chosen = null;
  /** @type {number | null} */
  #pointerX = null;
  /** Scale of the rows; null: the largest at which all are in view, as far as they stay legible.
   * @type {number | null} */
  #rowScale = null;
  /** @type {{x: number, y: number} | null} null: beside the op */
  #tooltipAt = null;
  #frame = 0;
  #baseIsStale = true;
  #ending = new AbortController();
  /** Of the analysis that is asked for, and of the pause before it is asked for again. */
  #analyzing = new AbortController();

  /**
   * @param {HTMLElement} host gets the chart
   * @param {object} options
   * @param {string} options.name
   * @param {TimeWindow} [options.time] shared by charts that move together
   * @param {boolean} [options.memory] whether memory is shown at first
   * @param {(query: URLSearchParams) => string} [options.link] the address that shows the same part of the chart
   */
  constructor(host, { name, time = new TimeWindow(0, 1), memory = true, link }) {
    this.time = time;
    const content = fromTemplate("template-chart");
    this.figure = part(content, "chart", HTMLElement);
    this.surface = part(content, "surface", HTMLElement);
    this.view = part(content, "view", HTMLElement);
    this.space = part(content, "space", HTMLElement);
    this.base = part(content, "base", HTMLCanvasElement);
    this.overlay = part(content, "overlay", HTMLCanvasElement);
    this.minimap = new Minimap(part(content, "minimap", HTMLCanvasElement));
    this.tooltip = part(content, "tooltip", HTMLElement);
    this.magnification = part(content, "magnification", HTMLElement);
    this.clipped = part(content, "clipped", HTMLElement);
    this.memory = part(content, "memory", HTMLInputElement);
    this.critical = part(content, "critical", HTMLInputElement);
    this.search = part(content, "search", HTMLInputElement);
    this.note = part(content, "note", HTMLElement);
    this.link = part(content, "link", HTMLButtonElement);
    this.memory.checked = memory;
    this.link.hidden = !link;
    host.replaceChildren(content);
    this.rename(name);
    this.#listen(link);
  }

  /** @param {string} name the accessible name */
  rename(name) {
    this.figure.setAttribute("aria-label", name);
    this.surface.setAttribute("aria-label", `Gantt chart of ${name}`);
  }

  /**
   * Show a schedule once the service has analyzed it, or has not; the stretch of time in view stays where it is, and so
   * does the op that was chosen.
   *
   * @param {import("../types.js").Schedule} schedule
   * @param {boolean} [ownTime] whether the time scale follows this schedule alone
   */
  async show(schedule, ownTime = true) {
    this.#analyzing.abort();
    this.#analyzing = new AbortController();
    const signal = AbortSignal.any([this.#ending.signal, this.#analyzing.signal]);
    try {
      const analysis = await analyze(schedule, signal);
      if (!signal.aborted) this.#replace(buildModel(schedule, analysis), ownTime);
    } catch (error) {
      if (signal.aborted) return;
      this.#replace(buildModel(schedule, null), ownTime);
      this.#tell(`Memory, idle times and causes are missing. ${error instanceof Error ? error.message : error}`);
      if (!maySucceedLater(error)) return;
      pause(LONGEST_RETRY_MS, signal).then(() => {
        if (!signal.aborted) this.show(schedule, ownTime);
      });
    }
  }

  /**
   * @param {import("./model.js").Model} model
   * @param {boolean} ownTime
   */
  #replace(model, ownTime) {
    const theme = readTheme(this.figure);
    const chosen = this.#scene && this.#chosen && opAt(this.#scene, this.#chosen);
    if (ownTime) this.time.setBounds(model.beginUs, model.endUs);
    this.#scene = {
      model,
      theme,
      layout: buildLayout(model, this.surface.clientWidth, this.memory.checked, 1),
      looks: buildLooks(model, theme),
      time: this.time,
      width: 0,
      height: 0,
      scrollTop: 0,
    };
    this.#dependencies = new Dependencies(model);
    fillTable(this.figure, model);
    this.#measure();
    this.#hovered = null;
    this.#chosen = chosen && findSpot(this.#scene, chosen);
    this.#findPath();
    this.#showTooltip();
  }

  /** Stop listening; the elements are the caller's to remove. */
  destroy() {
    this.#ending.abort();
    cancelAnimationFrame(this.#frame);
  }

  /** The part of the chart in view, as parameters of an address. */
  get state() {
    const state = new URLSearchParams();
    if (!this.time.isFitted) {
      state.set("from", String(this.time.fromUs));
      state.set("to", String(this.time.toUs));
    }
    if (this.#scene && this.#chosen) state.set("op", opName(opAt(this.#scene, this.#chosen)));
    if (this.critical.checked) state.set("path", "1");
    if (!this.memory.checked) state.set("memory", "0");
    return state;
  }

  /** @param {URLSearchParams} state of a schedule that is shown; what it does not name stays as it is */
  restore(state) {
    const [fromUs, toUs] = [Number(state.get("from") ?? NaN), Number(state.get("to") ?? NaN)];
    if (toUs > fromUs) this.time.show(fromUs, toUs);
    if (state.get("memory") === "0") {
      this.memory.checked = false;
      this.#measure();
    }
    this.critical.checked = state.get("path") === "1";
    this.#findPath();
    const spot = this.#dependencies?.find(state.get("op") ?? "");
    if (spot) this.#choose(spot);
  }

  /** @param {((query: URLSearchParams) => string) | undefined} link */
  #listen(link) {
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
    this.minimap.listen((across, down) => this.#centre(across, down), signal);
    this.surface.addEventListener("scroll", () => this.#changed(), { signal });
    this.memory.addEventListener("change", () => this.#measure(), { signal });
    this.critical.addEventListener("change", () => this.#findPath(), { signal });
    this.figure.addEventListener("fullscreenchange", () => this.#setFull(document.fullscreenElement === this.figure), { signal });
    part(this.figure, "search-form", HTMLFormElement).addEventListener("submit", (event) => this.#find(event), { signal });
    const buttons = {
      "zoom-in": () => this.#zoom(ZOOM_STEP, null),
      "zoom-out": () => this.#zoom(1 / ZOOM_STEP, null),
      taller: () => this.#scaleRows(ZOOM_STEP),
      flatter: () => this.#scaleRows(1 / ZOOM_STEP),
      fit: () => this.#fit(),
      full: () => this.#toggleFull(),
      "all-devices": () => this.#fit(),
      link: () => link && this.#copy(link(this.state)),
    };
    for (const [name, act] of Object.entries(buttons)) {
      part(this.figure, name, HTMLButtonElement).addEventListener("click", act, { signal });
    }
  }

  /** @returns {import("./input.js").Target} */
  #target() {
    return {
      surface: this.surface,
      zoom: (factor, x) => this.#zoom(factor, x),
      scaleRows: (factor) => this.#scaleRows(factor),
      pan: (dx, dy) => this.#pan(dx, dy),
      fit: () => this.#fit(),
      full: () => this.#toggleFull(),
      search: () => this.search.focus(),
      hover: (x, y) => this.#hover(this.#scene && spotAt(this.#scene, x, y), x, y),
      leave: () => this.#hover(null),
      choose: (x, y) => this.#chooseAt(x, y),
      step: (step) => this.#step(step),
      dismiss: () => this.#dismiss(),
    };
  }

  /**
   * @param {number} factor
   * @param {number | null} x null: the chosen op, or the middle
   */
  #zoom(factor, x) {
    const scene = this.#scene;
    if (!scene) return;
    const op = x === null && this.#chosen ? opAt(scene, this.#chosen) : null;
    const middle = op ? (op.start_us + op.end_us) / 2 : (this.time.fromUs + this.time.toUs) / 2;
    this.time.zoom(factor, x === null ? middle : timeAt(scene, x));
  }

  /** @param {number} factor */
  #scaleRows(factor) {
    const scene = this.#scene;
    if (!scene) return;
    const share = this.surface.scrollTop / scene.layout.height;
    this.#rowScale = Math.min(MOST_SCALE, Math.max(LEAST_SCALE, factor * this.#scaleInUse()));
    this.#measure();
    this.surface.scrollTop = share * scene.layout.height;
  }

  /** All of the time, and all devices however flat their rows become. */
  #fit() {
    this.time.fit();
    if (this.#scene) this.#rowScale = fittingScale(this.#scene.model, this.memory.checked, this.#roomPx(), LEAST_SCALE);
    this.#measure();
  }

  #scaleInUse() {
    if (this.#rowScale !== null || !this.#scene) return this.#rowScale ?? 1;
    return fittingScale(this.#scene.model, this.memory.checked, this.#roomPx(), LEAST_LEGIBLE_SCALE);
  }

  /** Height that the rows can take without scrolling. */
  #roomPx() {
    const limit = parseFloat(getComputedStyle(this.surface).maxHeight);
    return (Number.isFinite(limit) ? limit : this.surface.clientHeight) - SCALE_PX;
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

  /**
   * @param {number} across share of the time that comes into the middle
   * @param {number} down share of the rows that comes into the middle
   */
  #centre(across, down) {
    const { beginUs, endUs, fromUs, spanUs } = this.time;
    this.time.pan(beginUs + across * (endUs - beginUs) - spanUs / 2 - fromUs);
    if (this.#scene) this.surface.scrollTop = down * this.#scene.layout.height - (this.#scene.height - SCALE_PX) / 2;
  }

  /** @param {"next" | "previous" | "below" | "above"} step */
  #step(step) {
    const scene = this.#scene;
    const spot = scene && stepFrom(scene, this.#chosen, step);
    if (spot) this.#choose(spot);
  }

  /** @param {import("./hit.js").Spot} spot brought into view, pointed out and announced */
  #choose(spot) {
    const scene = this.#scene;
    if (!scene) return;
    const op = opAt(scene, spot);
    const strip = scene.layout.rows[spot.row].lanes[spot.lane];
    this.time.reveal(op.start_us, op.end_us);
    const room = scene.height - SCALE_PX;
    if (strip.top < this.surface.scrollTop || strip.top + strip.height > this.surface.scrollTop + room) {
      this.surface.scrollTop = strip.top - room / 2;
    }
    scene.scrollTop = this.surface.scrollTop;
    this.#chosen = spot;
    this.#hover(null);
    announce(spokenText(scene, spot, this.#dependencies));
  }

  /**
   * @param {number} x
   * @param {number} y
   */
  #chooseAt(x, y) {
    this.#chosen = this.#scene && spotAt(this.#scene, x, y);
    this.#hover(this.#chosen, x, y);
  }

  /** What Escape does: end the choice of an op, then the full screen. */
  #dismiss() {
    if (!this.#chosen && this.figure.hasAttribute("data-full")) this.#toggleFull();
    this.#chosen = null;
    this.#hover(null);
  }

  /**
   * @param {import("./hit.js").Spot | null} spot
   * @param {number} [x] none: there is no pointer on the chart
   * @param {number} [y]
   */
  #hover(spot, x, y = 0) {
    this.#hovered = spot;
    this.#pointerX = x ?? null;
    this.#tooltipAt = spot && x !== undefined ? { x, y } : null;
    this.#showTooltip();
    this.#schedule();
  }

  #showTooltip() {
    const scene = this.#scene;
    const spot = this.#hovered ?? this.#chosen;
    this.tooltip.hidden = !scene || !spot;
    if (!scene || !spot) return;
    const strip = scene.layout.rows[spot.row].lanes[spot.lane];
    const besideOp = { x: xAt(scene, opAt(scene, spot).end_us), y: strip.top + strip.height + SCALE_PX - scene.scrollTop };
    showTooltip(this.tooltip, scene, spot, this.#dependencies, this.#tooltipAt ?? besideOp);
  }

  /** @param {SubmitEvent} event */
  #find(event) {
    event.preventDefault();
    const name = parseOpName(this.search.value);
    const spot = name && this.#dependencies?.find(name);
    const asked = this.search.value.trim();
    if (spot) this.#choose(spot);
    else if (asked) this.#tell(`There is no op ${asked}. Ops are named by kind, stage and microbatch, such as F0.3.`);
    if (spot || !asked) this.#showPath();
  }

  #findPath() {
    this.#path = this.critical.checked && this.#dependencies ? this.#dependencies.criticalPath() : [];
    this.#showPath();
    this.#schedule();
  }

  #showPath() {
    this.#tell(this.#path.length && this.#dependencies ? pathText(this.#path, this.#dependencies) : "");
  }

  /** @param {string} address */
  async #copy(address) {
    history.replaceState(null, "", address);
    // The clipboard is there in secure contexts only.
    const copied = await navigator.clipboard?.writeText(location.href).then(
      () => true,
      () => false,
    );
    this.#tell(copied ? "Link copied." : "The address of this page is the link.");
  }

  /** @param {string} text */
  #tell(text) {
    this.note.textContent = text;
    this.note.hidden = !text;
  }

  #toggleFull() {
    const full = !this.figure.hasAttribute("data-full");
    if (!full && document.fullscreenElement) document.exitFullscreen();
    // Telephones give full screens to videos alone: there the chart fills the window.
    if (full && this.figure.requestFullscreen) this.figure.requestFullscreen().catch(() => {});
    this.#setFull(full);
  }

  /** @param {boolean} full */
  #setFull(full) {
    this.figure.toggleAttribute("data-full", full);
    document.documentElement.toggleAttribute("data-covered", full);
    part(this.figure, "full", HTMLButtonElement).setAttribute("aria-pressed", String(full));
    this.#rowScale = null;
    this.#measure();
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
    scene.layout = buildLayout(scene.model, width, this.memory.checked, this.#scaleInUse());
    fillLegend(part(this.figure, "legend", HTMLElement), scene.model, this.memory.checked, scene.layout.labels === "wide");
    this.space.style.height = `${scene.layout.height + SCALE_PX}px`;
    scene.width = this.surface.clientWidth;
    scene.height = this.surface.clientHeight;
    this.view.style.height = `${scene.height}px`;
    for (const canvas of [this.base, this.overlay]) fitCanvas(canvas, scene.width, scene.height);
    const { canvas } = this.minimap;
    fitCanvas(canvas, canvas.clientWidth, canvas.clientHeight);
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
    if (!scene || !scene.width || !this.#dependencies) return;
    scene.scrollTop = this.surface.scrollTop;
    if (this.#baseIsStale) {
      this.#baseIsStale = false;
      drawChart(scaled(this.base), scene);
      this.minimap.draw(scaled(this.minimap.canvas), scene);
      this.#showClipped(scene);
      setText(this.magnification, magnificationText(this.time.magnification));
      this.figure.dataset.magnification = this.time.magnification.toFixed(3);
    }
    drawHighlight(scaled(this.overlay), scene, {
      spot: this.#hovered ?? this.#chosen,
      pointerX: this.#pointerX,
      path: this.#path,
      dependencies: this.#dependencies,
    });
  }

  /** @param {import("./layout.js").Scene} scene */
  #showClipped({ layout: { rows }, height, scrollTop }) {
    const visible = rows.filter(({ top, bottom }) => top >= scrollTop && bottom <= scrollTop + height - SCALE_PX);
    const isClipped = visible.length < rows.length;
    this.clipped.hidden = !isClipped;
    if (!isClipped) return;
    const [first, last] = [visible[0] ?? rows[0], visible[visible.length - 1] ?? rows[0]];
    const text = `${first.device.name} to ${last.device.name} of ${countText(rows.length, "device")}`;
    setText(part(this.clipped, "clipped-text", HTMLElement), text);
  }
}

/**
 * @param {HTMLCanvasElement} canvas
 * @param {number} width in CSS pixels
 * @param {number} height in CSS pixels
 */
function fitCanvas(canvas, width, height) {
  canvas.width = Math.round(width * devicePixelRatio);
  canvas.height = Math.round(height * devicePixelRatio);
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

/**
 * Set a text only where it changes: a frame that changes none needs no layout.
 *
 * @param {HTMLElement} element
 * @param {string} text
 */
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** @param {number} factor */
function magnificationText(factor) {
  return `${factor.toLocaleString("en-US", { maximumFractionDigits: factor < 10 ? 1 : 0 })}×`;
}

/**
 * The critical path in words: its ops, the time they take and the time between them.
 *
 * @param {import("./hit.js").Spot[]} path
 * @param {Dependencies} dependencies
 */
function pathText(path, dependencies) {
  const ops = path.map((spot) => dependencies.op(spot));
  const busyUs = ops.reduce((sum, op) => sum + op.end_us - op.start_us, 0);
  const wholeUs = ops[ops.length - 1].end_us - ops[0].start_us;
  const names = ops.map(opName);
  const shown = names.length > 12 ? [...names.slice(0, 6), "…", ...names.slice(-5)] : names;
  return (
    `Critical path: ${countText(ops.length, "op")}, ${timeText(busyUs)} in ops and ` +
    `${timeText(Math.max(0, wholeUs - busyUs))} in transfers. ${shown.join(" → ")}`
  );
}
