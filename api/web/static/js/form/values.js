/** Fields that show a quantity of the problem in a readable unit, and write what is typed or slid into it. */

import { part } from "../elements.js";
import { memoryUnit, timeUnit } from "../units.js";

/** @typedef {import("./document.js").ProblemDocument} ProblemDocument */
/** @typedef {import("./document.js").Name} Name */

/** @type {Record<"time" | "memory", Record<string, number>>} */
const UNITS = {
  time: { us: 1, µs: 1, μs: 1, ms: 1e3, s: 1e6 },
  memory: { b: 1, kb: 1e3, mb: 1e6, gb: 1e9, tb: 1e12, kib: 2 ** 10, mib: 2 ** 20, gib: 2 ** 30, tib: 2 ** 40 },
};
const EXAMPLES = { time: "1.2 ms", memory: "80 GiB" };
const ABSENT = "none";
const SHOWN_DIGITS = 6;
/** Of each value where there are several: those that are not typed anew stay exact. */
const LIST_DIGITS = 4;

export class ValueField {
  /** Size of the unit of a text without one, and the tokens that were shown last, which stand for exact values. */
  #size = 1;
  /** @type {string[]} */
  #tokens = [];

  /**
   * @param {HTMLElement} root
   * @param {Name} name
   * @param {ProblemDocument} document
   */
  constructor(root, name, document) {
    this.name = name;
    this.document = document;
    this.text = part(root, name, HTMLInputElement);
    /** @type {HTMLInputElement | null} */
    this.slider = root.querySelector(`[data-part="${name}-slider"]`);
    this.unit = part(root, `${name}-unit`, HTMLElement);
    this.fault = part(root, `${name}-fault`, HTMLElement);
    this.text.addEventListener("change", () => this.isWrong || this.show());
  }

  /** True while the problem lacks what was typed, because it is no value. */
  get isWrong() {
    return this.text.hasAttribute("aria-invalid");
  }

  /** @param {string} fault empty: there is none */
  #tell(fault) {
    this.fault.textContent = fault;
    if (fault) this.text.setAttribute("aria-invalid", "true");
    else this.text.removeAttribute("aria-invalid");
  }

  /** Bring the field up to date with the problem. */
  show() {
    this.#fill();
    if (this.slider) this.slider.value = "0";
  }

  /**
   * Write what was typed or slid into the problem, or follow what was changed elsewhere.
   *
   * @param {EventTarget | null} target
   */
  read(target) {
    if (target !== this.slider && target !== this.text) {
      if (!this.isWrong) this.#fill();
    } else if (target === this.slider && this.slider) {
      this.document.scale(this.name, 2 ** Number(this.slider.value));
      this.#fill();
    } else {
      const { values, fault } = this.#parsed();
      this.#tell(fault);
      if (!fault) this.document.setValues(this.name, values);
      if (this.slider) this.slider.value = "0";
    }
  }

  #fill() {
    const values = this.document.values(this.name);
    const numbers = values.filter((value) => typeof value === "number");
    const isEditable = values.length > 0 && values.every((value) => typeof value === "number" || value === null);
    const { kind } = this.document.quantity(this.name);
    const most = numbers.length ? Math.max(...numbers) : 0;
    const unit = kind === "time" ? timeUnit(most) : memoryUnit(most);
    this.text.disabled = !isEditable;
    if (this.slider) this.slider.disabled = !most;
    this.#tell("");
    const digits = new Set(values).size > 1 ? LIST_DIGITS : SHOWN_DIGITS;
    if (numbers.length) this.#size = unit.size;
    this.unit.textContent = numbers.length ? unit.name : "";
    this.#tokens = values.map((value) => (typeof value === "number" ? shown(value / unit.size, digits) : ABSENT));
    const isOne = new Set(values).size === 1;
    this.text.value = isEditable && numbers.length ? (isOne ? this.#tokens.slice(0, 1) : this.#tokens).join(", ") : "";
    this.text.title = this.text.value;
  }

  /** @returns {{values: (number | null)[], fault: string}} a value for each place, or what is wrong */
  #parsed() {
    const { kind, optional } = this.document.quantity(this.name);
    const before = this.document.values(this.name);
    const text = this.text.value.trim();
    const found = /\s*([a-zµμ]+)$/i.exec(text);
    const size = found ? UNITS[kind][found[1].toLowerCase()] : undefined;
    const tokens = (size && found ? text.slice(0, found.index) : text).split(",").map((token) => token.trim());
    if (tokens.length > 1 && tokens.length !== before.length) {
      return { values: [], fault: `These are ${tokens.length} values for ${before.length} places. Maybe give one for all.` };
    }
    const scale = size ?? this.#size;
    /** @type {(number | null)[]} */
    const values = [];
    for (const [place, token] of tokens.entries()) {
      const exact = before[place];
      const number = Number(token);
      if (tokens.length > 1 && token === this.#tokens[place] && scale === this.#size && typeof exact === "number") values.push(exact);
      else if (optional && (token === "" || token.toLowerCase() === ABSENT)) values.push(null);
      else if (token !== "" && number >= 0 && Number.isFinite(number)) values.push(rounded(number * scale, kind));
      else return { values: [], fault: `"${token}" is no ${kind === "time" ? "time" : "size"}. Maybe ${EXAMPLES[kind]}.` };
    }
    return { values: tokens.length > 1 ? values : before.map(() => values[0]), fault: "" };
  }
}

/**
 * @param {number} value
 * @param {number} digits
 */
function shown(value, digits) {
  return String(Number(value.toPrecision(digits)));
}

/**
 * @param {number} value
 * @param {"time" | "memory"} kind
 */
function rounded(value, kind) {
  return kind === "memory" ? Math.round(value) : Number(value.toPrecision(12));
}
