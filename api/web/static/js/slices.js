/** Units: microbatches, or slices of them (docs/reference/documents.md). */

/** @typedef {import("./types.js").Problem} Problem */

/** @param {Problem} problem */
export function sliceCount(problem) {
  return problem.slices?.count ?? 1;
}

/**
 * @param {Problem} problem
 * @param {number} unit
 * @returns {string} the number of a microbatch, and that of its slice where there are slices: "2/0"
 */
export function unitName(problem, unit) {
  const count = sliceCount(problem);
  return count === 1 ? String(unit) : `${Math.floor(unit / count)}/${unit % count}`;
}
