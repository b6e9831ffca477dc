/** A job in words. */

import { NONE, countText, percentText } from "./units.js";
import { element } from "./elements.js";

/** @typedef {import("./types.js").Job} Job */

export const OBJECTIVES = { makespan: "makespan", device_span: "device span" };

/** @type {Record<import("./types.js").Status, string>} */
export const STATUSES = {
  queued: "queued",
  running: "running",
  succeeded: "succeeded",
  failed: "failed",
  cancelled: "cancelled",
};

const LIMITS = {
  time: "time limit reached",
  gap: "asked-for gap reached",
  memory: "memory limit reached",
  interrupted: "interrupted",
};

const REASONS = {
  optimal: "proved optimal",
  feasible: "best found",
  infeasible: "proved infeasible",
  no_solution: "nothing found",
};

/** @param {Job} job */
export function jobName(job) {
  return job.name || `job ${job.id.slice(0, 8)}`;
}

/**
 * Details of a job's state beside its status.
 *
 * @param {Job} job
 */
export function stateText(job) {
  if (job.status === "queued") return job.queue_place === null ? "" : placeText(job.queue_place);
  if (job.status === "running") return job.attempt > 1 ? `attempt ${job.attempt}` : "";
  if (!job.termination) return "";
  const { reason, limit } = job.termination;
  return limit ? `${REASONS[reason]}, ${LIMITS[limit]}` : REASONS[reason];
}

/** @param {number} place */
function placeText(place) {
  return place === 1 ? "next in line" : `${countText(place - 1, "job")} before it`;
}

/** @param {Job} job */
export function sizeText({ devices, stages, microbatches }) {
  if (devices === null || microbatches === null) return NONE;
  return `${devices} × ${microbatches}${stages === devices ? "" : `, ${stages} stages`}`;
}

/**
 * How long a job has been solved, so far where it still is.
 *
 * @param {Job} job
 * @returns {number | null} null: not at all
 */
export function searchMs({ started_at: started, finished_at: finished }) {
  if (!started) return null;
  return Math.max(0, (finished ? Date.parse(finished) : Date.now()) - Date.parse(started));
}

/** Gaps up to each of these shares have a colour of their own. */
const GAP_COLOURS = /** @type {const} */ ([
  [0, "proved"],
  [0.02, "small"],
  [0.1, "medium"],
  [Infinity, "large"],
]);

/**
 * @param {HTMLElement} chip
 * @param {number | null} gap
 */
export function fillGap(chip, gap) {
  chip.textContent = percentText(gap);
  const [, name] = GAP_COLOURS.find(([most]) => gap !== null && gap <= most) ?? [0, "none"];
  chip.className = `gap gap-${name}`;
}

/**
 * A status with its colour and, for those who see none, its name.
 *
 * @param {HTMLElement} chip
 * @param {import("./types.js").Status} status
 */
export function fillStatus(chip, status) {
  chip.className = `status status-${status}`;
  chip.textContent = STATUSES[status];
}

/**
 * A point in time in the reader's time zone; the date only where it is not today.
 *
 * @param {string | null} instant
 * @returns {HTMLElement}
 */
export function instantElement(instant) {
  if (!instant) return element("span", NONE);
  const date = new Date(instant);
  const today = date.toDateString() === new Date().toDateString();
  /** @type {Intl.DateTimeFormatOptions} */
  const time = { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" };
  /** @type {Intl.DateTimeFormatOptions} */
  const day = { year: "numeric", month: "short", day: "numeric" };
  const shown = element("time", date.toLocaleString("en-GB", today ? time : { ...day, ...time }));
  shown.dateTime = instant;
  return shown;
}
