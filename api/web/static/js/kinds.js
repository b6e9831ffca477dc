/** Kinds of op, as the service states them for all of its parts (optpipe/kinds.py). */

/** @typedef {import("./types.js").Kind} Kind */

/** @type {{name: Kind, label: string}[]} */
const ROWS = JSON.parse(document.querySelector("meta[name=kinds]")?.getAttribute("content") ?? "[]");

/** Names of the kinds, in the order of legends. */
export const KINDS = ROWS.map(({ name }) => name);

/** @type {Record<Kind, {name: Kind, label: string}>} */
export const KIND = Object.fromEntries(ROWS.map((row) => [row.name, row]));
