/** Kinds of op, as the service states them for all of its parts (optpipe/kinds.py). */

/** @typedef {import("./types.js").Kind} Kind */

/** @type {{name: Kind, label: string}[]} */
const ROWS = JSON.parse(document.querySelector("meta[name=kinds]")?.getAttribute("content") ?? "[]");

/** Names of the kinds, in the order of legends. */
export const KINDS = ROWS.map(({ name }) => name);

/** @type {Record<Kind, {name: Kind, label: string}>} */
export const KIND = Object.fromEntries(ROWS.map((row) => [row.name, row]));

const PASS_LOOKS = KINDS.filter((name) => name.startsWith("pass"));

/**
 * The kind that says how an op looks: its own, or for a spread pass, which the problem names, one by its first letter.
 *
 * @param {Kind} kind
 * @returns {Kind}
 */
export function lookOf(kind) {
  return KIND[kind] ? kind : PASS_LOOKS[kind.charCodeAt(0) % PASS_LOOKS.length];
}
