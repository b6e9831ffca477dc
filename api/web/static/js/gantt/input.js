/** Pointer, wheel, touch and keys on a chart. */

/**
 * Operations that input triggers on a chart. Coordinates are CSS pixels within it.
 *
 * @typedef {object} Target
 * @property {HTMLElement} surface
 * @property {(factor: number, x: number | null) => void} zoom around x, null: around the middle
 * @property {(dx: number, dy: number) => void} pan content follows by that many pixels
 * @property {(factor: number) => void} scaleRows
 * @property {() => void} fit
 * @property {() => void} full toggles the full screen
 * @property {() => void} search
 * @property {(x: number, y: number) => void} hover
 * @property {() => void} leave
 * @property {(x: number, y: number) => void} choose
 * @property {(step: "next" | "previous" | "below" | "above") => void} step
 * @property {() => void} dismiss
 */

const WHEEL_RATE = 0.0018;
const KEY_ZOOM = 1.5;
const KEY_PAN_SHARE = 0.15;
/** A press that moves less is a click. */
const STILL_PX = 4;

/**
 * @param {Target} target
 * @param {AbortSignal} signal ends all of it
 */
export function listen(target, signal) {
  listenToWheel(target, signal);
  listenToPointers(target, signal);
  listenToKeys(target, signal);
}

/**
 * The wheel zooms once the chart has the focus, or with Ctrl; before that it scrolls the page as everywhere.
 *
 * @param {Target} target
 * @param {AbortSignal} signal
 */
function listenToWheel(target, signal) {
  const { surface } = target;
  /** @param {WheelEvent} event */
  const onWheel = (event) => {
    const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (sideways) target.pan(-(event.deltaX || event.deltaY), 0);
    else if (event.ctrlKey || event.metaKey || document.activeElement === surface) {
      target.zoom(Math.exp(-WHEEL_RATE * pixels(event)), event.clientX - surface.getBoundingClientRect().left);
    } else return;
    event.preventDefault();
  };
  surface.addEventListener("wheel", onWheel, { passive: false, signal });
}

/** @param {WheelEvent} event */
function pixels(event) {
  const perUnit = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 16 : 1;
  // A pinch on a touchpad arrives as small steps with Ctrl.
  return event.deltaY * perUnit * (event.ctrlKey && Math.abs(event.deltaY) < 40 ? 5 : 1);
}

/**
 * One pointer drags, two pinch, one that stays still chooses.
 *
 * @param {Target} target
 * @param {AbortSignal} signal
 */
function listenToPointers(target, signal) {
  const { surface } = target;
  /** @type {Map<number, {x: number, y: number, startX: number, startY: number, moved: boolean}>} */
  const pressed = new Map();

  /** @param {PointerEvent} event */
  const position = (event) => {
    const box = surface.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };

  /** @param {PointerEvent} event */
  const onDown = (event) => {
    if (event.button !== 0 || onScrollBar(event, surface)) return;
    const { x, y } = position(event);
    pressed.set(event.pointerId, { x, y, startX: x, startY: y, moved: false });
  };

  /** @param {PointerEvent} event */
  const onMove = (event) => {
    const { x, y } = position(event);
    const pointer = pressed.get(event.pointerId);
    if (!pointer) {
      if (event.pointerType !== "touch") target.hover(x, y);
      return;
    }
    if (!pointer.moved && Math.hypot(x - pointer.startX, y - pointer.startY) < STILL_PX) return;
    if (!pointer.moved) surface.setPointerCapture(event.pointerId);
    pointer.moved = true;
    const other = [...pressed].find(([id]) => id !== event.pointerId)?.[1];
    if (other) pinch(target, pointer, other, x);
    else target.pan(x - pointer.x, event.pointerType === "touch" ? 0 : y - pointer.y);
    surface.toggleAttribute("data-dragging", !other);
    Object.assign(pointer, { x, y });
  };

  /** @param {PointerEvent} event */
  const onUp = (event) => {
    const pointer = pressed.get(event.pointerId);
    pressed.delete(event.pointerId);
    surface.removeAttribute("data-dragging");
    if (pointer && !pointer.moved && event.type === "pointerup") target.choose(pointer.x, pointer.y);
  };

  surface.addEventListener("pointerdown", onDown, { signal });
  surface.addEventListener("pointermove", onMove, { signal });
  surface.addEventListener("pointerup", onUp, { signal });
  surface.addEventListener("pointercancel", onUp, { signal });
  surface.addEventListener("pointerleave", () => target.leave(), { signal });
  surface.addEventListener("dblclick", (event) => target.zoom(2, position(/** @type {PointerEvent} */ (event)).x), {
    signal,
  });
}

/**
 * @param {PointerEvent} event
 * @param {HTMLElement} surface
 */
function onScrollBar(event, surface) {
  return event.clientX - surface.getBoundingClientRect().left > surface.clientWidth;
}

/**
 * @param {Target} target
 * @param {{x: number}} pointer where the moving one was
 * @param {{x: number}} other
 * @param {number} x where it is now
 */
function pinch(target, pointer, other, x) {
  const before = Math.max(10, Math.abs(pointer.x - other.x));
  const after = Math.max(10, Math.abs(x - other.x));
  target.zoom(after / before, other.x);
}

/**
 * Up and down are left to the browser, which scrolls the chart or the page.
 *
 * @param {Target} target
 * @param {AbortSignal} signal
 */
function listenToKeys(target, signal) {
  const { surface } = target;
  /** @type {Record<string, () => void>} */
  const actions = {
    "+": () => target.zoom(KEY_ZOOM, null),
    "=": () => target.zoom(KEY_ZOOM, null),
    "-": () => target.zoom(1 / KEY_ZOOM, null),
    0: target.fit,
    "[": () => target.scaleRows(1 / KEY_ZOOM),
    "]": () => target.scaleRows(KEY_ZOOM),
    f: target.full,
    "/": target.search,
    ArrowLeft: () => target.pan(KEY_PAN_SHARE * surface.clientWidth, 0),
    ArrowRight: () => target.pan(-KEY_PAN_SHARE * surface.clientWidth, 0),
    Escape: target.dismiss,
  };
  /** @type {Record<string, () => void>} */
  const shifted = {
    ArrowLeft: () => target.step("previous"),
    ArrowRight: () => target.step("next"),
    ArrowUp: () => target.step("above"),
    ArrowDown: () => target.step("below"),
  };
  /** @param {KeyboardEvent} event */
  const onKey = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const action = (event.shiftKey && shifted[event.key]) || actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  };
  surface.addEventListener("keydown", onKey, { signal });
}
