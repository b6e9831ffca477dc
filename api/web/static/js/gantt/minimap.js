/** The minimap: all devices over all the time in a strip, with a frame around what the chart shows. */

import { paintLane } from "./boxes.js";
import { SCALE_PX } from "./layout.js";
import { asSource, picture, toPixel } from "./pixels.js";

/** The frame stays large enough to be seen and grabbed. */
const LEAST_FRAME_PX = 6;

/** @typedef {import("./layout.js").Scene} Scene */

/**
 * @param {CanvasRenderingContext2D} context scaled to CSS pixels
 * @param {Scene} scene
 * @param {number} width in CSS pixels
 * @param {number} height in CSS pixels
 */
export function drawMinimap(context, scene, width, height) {
  const { model, time, theme } = scene;
  const columns = Math.round(width * devicePixelRatio);
  const made = picture(columns, model.devices.length);
  made.pixels.fill(toPixel(theme.idle));
  const whole = { fromUs: time.beginUs, spanUs: time.endUs - time.beginUs };
  model.devices.forEach(({ index, lanes }) => {
    paintLane(made.pixels.subarray(index * columns, (index + 1) * columns), whole, lanes[0], scene.looks[index].pixels);
  });
  context.imageSmoothingEnabled = false;
  context.drawImage(asSource(made), 0, 0, columns, model.devices.length, 0, 0, width, height);
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

/**
 * Report where on the minimap a pointer presses or drags, as shares of its width and height.
 *
 * @param {HTMLCanvasElement} canvas
 * @param {(across: number, down: number) => void} onMove
 * @param {AbortSignal} signal
 */
export function listenToMinimap(canvas, onMove, signal) {
  /** @param {PointerEvent} event */
  const move = (event) => {
    const box = canvas.getBoundingClientRect();
    onMove((event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height);
  };
  canvas.addEventListener(
    "pointerdown",
    (event) => {
      canvas.setPointerCapture(event.pointerId);
      move(event);
    },
    { signal },
  );
  canvas.addEventListener("pointermove", (event) => canvas.hasPointerCapture(event.pointerId) && move(event), { signal });
}
