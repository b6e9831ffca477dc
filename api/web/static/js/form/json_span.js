/** Spans of a JSON text by JSON pointer (RFC 6901). */

/** @typedef {{start: number, end: number}} Span */

/**
 * The span of the value, or of the nearest one around it that is there (a field may be missing).
 *
 * @param {string} text JSON that can be parsed
 * @param {string} pointer
 * @returns {Span}
 */
export function findSpan(text, pointer) {
  const path = pointer.split("/").slice(1).map(unescaped);
  return new Walker(text).find(path);
}

/** @param {string} step */
function unescaped(step) {
  return step.replaceAll("~1", "/").replaceAll("~0", "~");
}

class Walker {
  #at = 0;

  /** @param {string} text */
  constructor(text) {
    this.text = text;
  }

  /**
   * @param {string[]} path
   * @returns {Span}
   */
  find(path) {
    this.#skipSpace();
    const start = this.#at;
    const [step, ...rest] = path;
    if (step !== undefined && "{[".includes(this.text[start])) {
      const inner = this.#enter(step, rest);
      if (inner) return inner;
      this.#at = start;
    }
    this.#skipValue();
    return { start, end: this.#at };
  }

  /**
   * @param {string} step key or index to look for
   * @param {string[]} rest
   * @returns {Span | null}
   */
  #enter(step, rest) {
    const isObject = this.text[this.#at] === "{";
    this.#at += 1;
    for (let index = 0; ; index += 1) {
      this.#skipSpace();
      if ("}]".includes(this.text[this.#at]) || this.#at >= this.text.length) return null;
      const key = isObject ? this.#key() : String(index);
      if (key === step) return this.find(rest);
      this.#skipValue();
      this.#skipSpace();
      if (this.text[this.#at] === ",") this.#at += 1;
    }
  }

  /** Read a key and the colon behind it. */
  #key() {
    const start = this.#at;
    this.#skipString();
    const key = /** @type {string} */ (JSON.parse(this.text.slice(start, this.#at)));
    this.#skipSpace();
    this.#at += 1;
    return key;
  }

  #skipValue() {
    this.#skipSpace();
    let depth = 0;
    do {
      const character = this.text[this.#at];
      if (character === '"') this.#skipString();
      else if ("{[}]".includes(character)) {
        depth += "{[".includes(character) ? 1 : -1;
        this.#at += 1;
      } else if (depth) this.#at += 1;
      else this.#skipMatch(/[^\s,\]}]*/y);
    } while (depth && this.#at < this.text.length);
  }

  #skipString() {
    this.#skipMatch(/"(?:[^"\\]|\\.)*"/y);
  }

  #skipSpace() {
    this.#skipMatch(/\s*/y);
  }

  /** @param {RegExp} pattern sticky */
  #skipMatch(pattern) {
    pattern.lastIndex = this.#at;
    const match = pattern.exec(this.text);
    if (match) this.#at += match[0].length;
  }
}
