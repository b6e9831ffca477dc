/** Kinds of op, as the service states them for all of its parts (optpipe/kinds.py): their names, costs and needs. */

/** @typedef {import("./types.js").Kind} Kind */

/**
 * What an op of a kind takes and frees, as names of sizes, and the ops that end before it starts, where there are any:
 * those of `kinds` on the stage before (-1), the same (0) or the next (1).
 *
 * @typedef {object} KindRow
 * @property {Kind} name
 * @property {string} label
 * @property {string[]} takes at its start
 * @property {string[]} leaves held from its end on
 * @property {string[]} frees at its end
 * @property {{kinds: Kind[], stage: number}[]} needs
 */

/** @type {KindRow[]} */
const ROWS = JSON.parse(document.querySelector("meta[name=kinds]")?.getAttribute("content") ?? "[]");

/** Names of the kinds, in the order of legends. */
export const KINDS = ROWS.map(({ name }) => name);

/** @type {Record<Kind, KindRow>} */
export const KIND = Object.fromEntries(ROWS.map((row) => [row.name, row]));
