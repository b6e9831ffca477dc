/** Requests to the service, with the key where there is one, and its errors as they are documented. */

import { askForKey, keyHeader } from "./key.js";

/** @typedef {import("./types.js").Job} Job */
/** @typedef {import("./types.js").Problem} Problem */
/** @typedef {import("./types.js").Schedule} Schedule */

/** An answer that is no success; `faults` point into the body that was sent. */
export class ApiError extends Error {
  /**
   * @param {number} status 0: there was no answer at all
   * @param {string} message
   * @param {import("./types.js").Fault[]} faults
   */
  constructor(status, message, faults = []) {
    super(message);
    this.status = status;
    this.faults = faults;
  }

  /** Whether the same request may succeed a little later. */
  get isTransient() {
    return this.status === 0 || this.status === 429 || this.status >= 500;
  }
}

/**
 * Send a request; where the server wants a key, ask for one and send it again.
 *
 * @param {string} method
 * @param {string} path
 * @param {{body?: string, headers?: Record<string, string>, signal?: AbortSignal, asksForKey?: boolean}} [options]
 * @returns {Promise<Response>} a success
 */
export async function request(method, path, { body, headers = {}, signal, asksForKey = true } = {}) {
  const key = keyHeader();
  const answer = await fetch(path, {
    method,
    signal,
    headers: { ...key, ...headers, ...(body === undefined ? {} : { "Content-Type": "application/json" }) },
    body,
  }).catch((error) => {
    if (signal?.aborted) throw error;
    throw new ApiError(0, "The server does not answer. Maybe it was stopped, or the network is gone.");
  });
  if (answer.ok) return answer;
  if (answer.status === 401 && asksForKey && (await askForKey("Authorization" in key))) {
    return request(method, path, { body, headers, signal });
  }
  throw await toApiError(answer);
}

/** @param {Response} answer */
async function toApiError(answer) {
  const problem = await answer.json().catch(() => ({}));
  const message = problem.detail || problem.title || `The server answered ${answer.status}.`;
  return new ApiError(answer.status, message, problem.errors ?? []);
}

/**
 * @template T
 * @param {string} method
 * @param {string} path
 * @param {Parameters<typeof request>[2]} [options]
 * @returns {Promise<T>}
 */
async function json(method, path, options) {
  return (await request(method, path, options)).json();
}

/** @param {string} id */
export function jobPath(id) {
  return `/v1/schedules/${encodeURIComponent(id)}`;
}

/**
 * @param {string} id
 * @param {AbortSignal} [signal]
 * @returns {Promise<Job>}
 */
export function getJob(id, signal) {
  return json("GET", jobPath(id), { signal });
}

/**
 * @param {string} id
 * @param {AbortSignal} [signal]
 * @returns {Promise<Schedule>} the best so far
 */
export function getSchedule(id, signal) {
  return json("GET", `${jobPath(id)}/schedule`, { signal });
}

/**
 * @param {string} id
 * @returns {Promise<Problem>} as it was submitted
 */
export function getProblem(id) {
  return json("GET", `${jobPath(id)}/problem`);
}

/**
 * @param {{status?: string, tag?: string, name?: string, sort?: string, cursor?: string, limit?: number, count?: boolean}} filter
 * @param {AbortSignal} [signal]
 * @returns {Promise<{jobs: Job[], cursor: string | null, total: number | null}>}
 */
export function listJobs(filter, signal) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(filter)) if (value) query.set(name, String(value));
  return json("GET", `/v1/schedules?${query}`, { signal });
}

/**
 * @param {string} body JSON with a problem and its config
 * @param {string} idempotencyKey
 * @returns {Promise<Job>}
 */
export function submit(body, idempotencyKey) {
  return json("POST", "/v1/schedules", { body, headers: { "Idempotency-Key": idempotencyKey } });
}

/**
 * Only check: returns for a body that could be submitted, throws an ApiError with faults otherwise.
 *
 * @param {string} body
 * @param {AbortSignal} signal
 * @returns {Promise<import("./types.js").Checked>}
 */
export function validate(body, signal) {
  return json("POST", "/v1/schedules?operation=validate", { body, signal });
}

/**
 * @param {string} body JSON with a model, a machine, GPUs, and what is fixed
 * @param {string} idempotencyKey
 * @returns {Promise<Job>}
 */
export function submitPlan(body, idempotencyKey) {
  return json("POST", "/v1/plans", { body, headers: { "Idempotency-Key": idempotencyKey } });
}

/** @param {string} id */
export function planPath(id) {
  return `/v1/plans/${encodeURIComponent(id)}`;
}

/**
 * @param {string} id
 * @param {AbortSignal} signal
 * @returns {Promise<import("./types.js").Plan>} so far
 */
export function getPlan(id, signal) {
  return json("GET", `${planPath(id)}/plan`, { signal });
}

/**
 * @param {string} id
 * @returns {Promise<import("./types.js").PlanRequest>} as it was submitted
 */
export function getPlanRequest(id) {
  return json("GET", `${planPath(id)}/request`);
}

/**
 * @param {string} id
 * @param {string} strategy such as ``tp=8,pp=4``
 * @param {AbortSignal} signal
 * @returns {Promise<Schedule>}
 */
export function getStrategySchedule(id, strategy, signal) {
  return json("GET", `${planPath(id)}/schedule?${new URLSearchParams({ strategy })}`, { signal });
}

/**
 * @param {string} id
 * @param {string} trainer
 */
export function launchPath(id, trainer) {
  return `${planPath(id)}/export?${new URLSearchParams({ to: trainer })}`;
}

/**
 * @param {string} id
 * @param {string} trainer
 * @param {AbortSignal} signal
 * @returns {Promise<import("./types.js").Launch>} of the strategy to take
 */
export function getLaunch(id, trainer, signal) {
  return json("GET", launchPath(id, trainer), { signal });
}

/** @returns {Promise<Job[]>} the newest plans */
export async function listPlans() {
  /** @type {{jobs: Job[]}} */
  const { jobs } = await json("GET", "/v1/plans?limit=12&status=succeeded");
  return jobs;
}

/** @returns {Promise<{models: {name: string, parameters: number}[], machines: import("./types.js").Machine[]}>} */
export async function listChoices() {
  const [models, machines] = await Promise.all(["/v1/models", "/v1/machines"].map((path) => json("GET", path)));
  return { ...models, ...machines };
}

/**
 * @param {string} id
 * @param {"cancel" | "retry"} action
 * @returns {Promise<Job>}
 */
export function act(id, action) {
  return json("POST", `${jobPath(id)}/${action}`);
}

/**
 * @param {string} id
 * @param {{name?: string, tags?: string[], note?: string}} changes
 * @returns {Promise<Job>}
 */
export function rename(id, changes) {
  return json("PATCH", jobPath(id), { body: JSON.stringify(changes) });
}

/**
 * Figures of the whole service, of all keys together.
 *
 * @param {AbortSignal} signal
 * @returns {Promise<{queued: number, running: number, workers: number, queueAgeS: number}>} `workers`: those that live
 */
export async function getServiceFigures(signal) {
  const text = await (await request("GET", "/metrics", { signal })).text();
  /** @param {string} name of a line of Prometheus' text format */
  const figure = (name) => Number(text.split("\n").find((line) => line.startsWith(`${name} `))?.slice(name.length) ?? 0);
  return {
    queued: figure('optpipe_jobs{status="queued"}'),
    running: figure('optpipe_jobs{status="running"}'),
    workers: figure("optpipe_workers"),
    queueAgeS: figure("optpipe_queue_age_seconds"),
  };
}

/** @param {string} id */
export async function remove(id) {
  await request("DELETE", jobPath(id));
}

/**
 * One published schedule of a problem, or why there is none.
 *
 * @typedef {object} Compared
 * @property {string} method
 * @property {string} summary
 * @property {string | null} why_not
 * @property {Schedule | null} schedule
 */

/**
 * @param {Problem} problem
 * @param {AbortSignal} [signal]
 * @returns {Promise<Compared[]>}
 */
export async function comparePublished(problem, signal) {
  const path = "/v1/compare?schedules=true";
  /** @type {{methods: Compared[]}} */
  const { methods } = await json("POST", path, { body: JSON.stringify({ problem }), signal });
  return methods;
}

/**
 * @param {Schedule} schedule
 * @param {AbortSignal} signal
 * @returns {Promise<import("./types.js").Analysis>}
 */
export function analyze(schedule, signal) {
  const { bound_us = null, gap = null } = schedule;
  // A measured step has no bound, which no figure of an analysis depends on.
  return json("POST", "/v1/analyze", { body: JSON.stringify({ ...schedule, bound_us: bound_us ?? 0, gap: gap ?? 1 }), signal });
}

/**
 * What a file is, and the schedules in it.
 *
 * @param {string} name
 * @param {string} text
 * @param {unknown} [problem] with the costs of a schedule CSV
 * @returns {Promise<import("./types.js").Recognized>}
 */
export function recognize(name, text, problem) {
  return json("POST", "/v1/recognize", { body: JSON.stringify({ name: name.slice(-200), text, ...(problem ? { problem } : {}) }) });
}

/** @returns {Promise<{name: string, about: string}[]>} */
export async function listPresets() {
  /** @type {{demo_data: {name: string, about: string}[]}} */
  const { demo_data: presets } = await json("GET", "/v1/demo-data");
  return presets;
}

/**
 * @param {string} name
 * @returns {Promise<{problem: Problem, config?: Partial<import("./types.js").JobConfig>}>}
 */
export function getPreset(name) {
  return json("GET", `/v1/demo-data/${encodeURIComponent(name)}`);
}
