/** The stretch of time that charts show; charts that share one move together. */

/** The window never gets shorter than this share of the whole. */
const SHORTEST = 1 / 50_000;

export class TimeWindow {
  /**
   * @param {number} beginUs
   * @param {number} endUs
   */
  constructor(beginUs, endUs) {
    this.beginUs = beginUs;
    this.endUs = endUs;
    this.fromUs = beginUs;
    this.toUs = endUs;
    /** @type {Set<() => void>} */
    this.listeners = new Set();
  }

  get spanUs() {
    return this.toUs - this.fromUs;
  }

  get isFitted() {
    return this.fromUs <= this.beginUs && this.toUs >= this.endUs;
  }

  /** How many times larger than the whole chart. */
  get magnification() {
    return (this.endUs - this.beginUs) / this.spanUs;
  }

  /**
   * Call `listener` after each change; the answer ends that.
   *
   * @param {() => void} listener
   * @returns {() => void}
   */
  subscribe(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  /**
   * Other bounds, such as those of a better schedule. A window that showed everything still does.
   *
   * @param {number} beginUs
   * @param {number} endUs
   */
  setBounds(beginUs, endUs) {
    const fitted = this.isFitted;
    this.beginUs = beginUs;
    this.endUs = endUs;
    if (fitted) this.fit();
    else this.#show(this.fromUs, this.spanUs);
  }

  /**
   * Show a stretch, as far as it is within the bounds.
   *
   * @param {number} fromUs
   * @param {number} toUs
   */
  show(fromUs, toUs) {
    this.#show(fromUs, Math.max(toUs - fromUs, SHORTEST * (this.endUs - this.beginUs)));
  }

  fit() {
    this.#show(this.beginUs, this.endUs - this.beginUs);
  }

  /**
   * Zoom so that the time `atUs` stays where it is; a factor above 1 shows more detail.
   *
   * @param {number} factor
   * @param {number} atUs
   */
  zoom(factor, atUs) {
    const whole = this.endUs - this.beginUs;
    const spanUs = Math.min(whole, Math.max(whole * SHORTEST, this.spanUs / factor));
    const share = this.spanUs ? (atUs - this.fromUs) / this.spanUs : 0.5;
    this.#show(atUs - share * spanUs, spanUs);
  }

  /** @param {number} deltaUs positive: later */
  pan(deltaUs) {
    this.#show(this.fromUs + deltaUs, this.spanUs);
  }

  /**
   * Move just as far as it takes to see the stretch.
   *
   * @param {number} startUs
   * @param {number} endUs
   */
  reveal(startUs, endUs) {
    const margin = 0.05 * this.spanUs;
    if (startUs < this.fromUs) this.#show(startUs - margin, this.spanUs);
    else if (endUs > this.toUs) this.#show(Math.min(startUs, endUs + margin - this.spanUs), this.spanUs);
  }

  /**
   * @param {number} fromUs
   * @param {number} spanUs
   */
  #show(fromUs, spanUs) {
    const span = Math.min(spanUs, this.endUs - this.beginUs);
    this.fromUs = Math.min(Math.max(fromUs, this.beginUs), this.endUs - span);
    this.toUs = this.fromUs + span;
    for (const listener of this.listeners) listener();
  }
}
