/** What is to be compared without being a job: a problem with its published schedules, or the schedules of a file. */

/** @typedef {import("./types.js").Problem} Problem */
/** @typedef {import("./types.js").FoundSchedule} FoundSchedule */

/**
 * @typedef {object} Kept
 * @property {Problem} [problem] whose published schedules are compared
 * @property {FoundSchedule[]} schedules
 * @property {string[]} notes on the file that they are of
 */

/**
 * @param {string[]} ids of jobs
 * @param {boolean} file whether the schedules of the file that was opened last stand next to them
 * @param {boolean} published whether the published schedules of their problem do
 * @returns {string} address of a comparison
 */
export function compareHash(ids, file, published) {
  const shown = [ids.length ? `ids=${ids.join(",")}` : "", file ? "file" : "", published ? "published" : ""];
  return `#/compare?${shown.filter(Boolean).join("&")}`;
}

const STORED = "optpipe.compare";

/** @type {Kept | null} */
let kept = null;

/** @param {Problem} problem */
export function keepProblem(problem) {
  keep({ problem, schedules: [], notes: [] });
}

/** @param {Kept} next kept for this tab, and where it is not too large over a reload too */
export function keep(next) {
  kept = next;
  try {
    sessionStorage.setItem(STORED, JSON.stringify(next));
  } catch {
    sessionStorage.removeItem(STORED);
  }
}

/** @returns {Kept | null} */
export function keptNow() {
  const stored = kept ? null : sessionStorage.getItem(STORED);
  if (stored) kept = JSON.parse(stored);
  return kept;
}
