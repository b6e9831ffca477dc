/** The minimap: all devices over all the time in a strip, with a frame around what the chart shows. */

import { paintLane } from "./boxes.js";
import { SCALE_PX } from "./layout.js";
import { picture, toPixel } from "./pixels.js";

/** The frame stays large enough to be seen and grabbed. */
const LEAST_FRAME_PX = 6;

/** @typedef {import("./layout.js").Scene} Scene */

export class Minimap {
  /** All devices, one row of pixels each: painted once for a schedule, its colours and a width. */
  #image = document.createElement("canvas");
  /** @type {Scene["looks"] | null} */
  #looks = null;

  /** @param {HTMLCanvasElement} canvas */
  constructor(canvas) {
    this.canvas = canvas;
  }

  /**
   * Report where a pointer presses or drags, as shares of the width and height.
   *
   * @param {(across: number, down: number) => void} onMove
   * @param {AbortSignal} signal
   */
  listen(onMove, signal) {
    const { canvas } = this;
    /** @param {PointerEvent} event */
    const move = (event) => {
      const box = canvas.getBoundingClientRect();
      onMove((event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height);
    };
    /** @param {PointerEvent} event */
    const press = (event) => {
      canvas.setPointerCapture(event.pointerId);
      move(event);
    };
    canvas.addEventListener("pointerdown", press, { signal });
    canvas.addEventListener("pointermove", (event) => canvas.hasPointerCapture(event.pointerId) && move(event), { signal });
  }

  /**
   * @param {CanvasRenderingContext2D} context of the canvas, scaled to CSS pixels
   * @param {Scene} scene
   */
  draw(context, scene) {
    const columns = this.canvas.width;
    if (!columns) return;
    const [width, height] = [columns / devicePixelRatio, this.canvas.height / devicePixelRatio];
    if (this.#looks !== scene.looks || this.#image.width !== columns) this.#paint(scene, columns);
    const { theme } = scene;
    context.imageSmoothingEnabled = false;
    context.drawImage(this.#image, 0, 0, width, height);
    const { left, top, right, bottom } = frame(scene, width, height);
    context.fillStyle = theme.plain.surface;
    context.globalAlpha = 0.6;
    context.fillRect(0, 0, width, top);
    context.fillRect(0, bottom, width, height - bottom);
    context.fillRect(0, top, left, bottom - top);
    context.fillRect(right, top, width - right, bottom - top);
    context.globalAlpha = 1;
    context.strokeStyle = theme.plain.ink;
    context.lineWidth = 1.5;
    context.strokeRect(left + 0.75, top + 0.75, right - left - 1.5, bottom - top - 1.5);
  }

  /**
   * @param {Scene} scene
   * @param {number} columns
   */
  #paint({ model, looks, theme }, columns) {
    const rows = model.devices.length;
    const made = picture(columns, rows);
    made.pixels.fill(toPixel(theme.idle));
    const whole = { fromUs: model.beginUs, spanUs: model.endUs - model.beginUs };
    model.devices.forEach(({ index, lanes }) => {
      paintLane(made.pixels.subarray(index * columns, (index + 1) * columns), whole, lanes[0], looks[index].pixels);
    });
    this.#image.width = columns;
    this.#image.height = rows;
    this.#image.getContext("2d")?.putImageData(made.image, 0, 0);
    this.#looks = looks;
  }
}

/**
 * @param {Scene} scene
 * @param {number} width
 * @param {number} height
 */
function frame({ time, layout, height: shown, scrollTop }, width, height) {
  const spanUs = time.endUs - time.beginUs;
  const visible = Math.min(layout.height, shown - SCALE_PX);
  const across = Math.max(LEAST_FRAME_PX, (width * time.spanUs) / spanUs);
  const down = Math.max(LEAST_FRAME_PX, (height * visible) / layout.height);
  const left = Math.min(width - across, (width * (time.fromUs - time.beginUs)) / spanUs);
  const top = Math.min(height - down, (height * scrollTop) / layout.height);
  return { left, top, right: left + across, bottom: top + down };
}
