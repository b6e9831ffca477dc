/** Progress of a search as its events tell it: the curve so far and the time elapsed. */

/** @typedef {import("./types.js").JobEvent} JobEvent */

export class Progress {
  /** @type {import("./curve.js").Point[]} */
  points = [];
  #attempt = 0;
  /** Seconds that earlier attempts took. */
  #before = 0;
  #heardAtMs = 0;
  #running = false;

  /** @param {JobEvent} event */
  add(event) {
    const last = this.#lastS;
    if (event.attempt > this.#attempt) {
      this.#attempt = event.attempt;
      this.#before = last;
    }
    this.#running = event.status === "running";
    this.#heardAtMs = performance.now();
    if (event.value_us === null && event.bound_us === null) return;
    const seconds = event.seconds === null ? last : Math.max(last, this.#before + event.seconds);
    this.points.push({ seconds, valueUs: event.value_us, boundUs: event.bound_us, method: event.method });
  }

  /** How far the search is by now. */
  get nowS() {
    return this.#lastS + (this.#running ? (performance.now() - this.#heardAtMs) / 1000 : 0);
  }

  get #lastS() {
    return this.points[this.points.length - 1]?.seconds ?? 0;
  }
}
