/** All jobs, kept up to date: filters, order, and actions on those that are chosen. */

import { announce } from "../announce.js";
import { ApiError, act, getServiceFigures, listJobs, remove, rename } from "../api.js";
import { askForText, confirmed } from "../dialog.js";
import { element, fromTemplate, part } from "../elements.js";
import { hasEnded, subscribe } from "../events.js";
import { splitTags } from "../form/config.js";
import { fillGap, fillStatus, instantElement, jobName, searchMs, sizeText, stateText } from "../jobs.js";
import { FIRST_RETRY_MS, maySucceedLater } from "../retry.js";
import { countText, percentText, timeText } from "../units.js";

/** @typedef {import("../types.js").Job} Job */

const PAGE_SIZE = 50;
/** Events that follow each other quickly are answered by one request. */
const EVENT_PAUSE_MS = 300;
/** A worker of the service has begun by then, which makes no event. */
const WORKER_PAUSE_MS = 3000;
/** Even without events, in case that one was missed. */
const CALM_PAUSE_MS = 30_000;

/** @type {import("../router.js").View} */
export function listView(root, { query }) {
  root.append(fromTemplate("template-list"));
  const list = new JobList(root, query);
  list.start();
  return () => list.stop();
}

class JobList {
  /** Of the view, and of the request that is on its way. */
  #ending = new AbortController();
  #loading = new AbortController();
  #timer = 0;
  /** Set from an event until the list that answers it is there. */
  #soon = 0;
  /** Whether there was an event since that list was asked for. */
  #isBehind = false;
  #retryMs = FIRST_RETRY_MS;
  /** @type {Map<string, Job>} */
  #chosen = new Map();
  /** Ids that the address chooses, until their jobs are there. */
  #toChoose;
  /** Pages shown, each from the cursor before it. */
  #pages = 1;

  /**
   * @param {HTMLElement} root
   * @param {URLSearchParams} query
   */
  constructor(root, query) {
    this.filters = {
      name: part(root, "name-filter", HTMLInputElement),
      status: part(root, "status-filter", HTMLSelectElement),
      tag: part(root, "tag-filter", HTMLInputElement),
      sort: part(root, "sort", HTMLSelectElement),
    };
    for (const [name, field] of Object.entries(this.filters)) field.value = query.get(name) ?? "";
    this.#toChoose = new Set((query.get("chosen") ?? "").split(","));
    this.body = part(root, "jobs", HTMLTableSectionElement);
    this.table = part(root, "jobs-table", HTMLTableElement);
    this.empty = part(root, "empty", HTMLElement);
    this.noMatch = part(root, "no-match", HTMLElement);
    this.more = part(root, "more", HTMLButtonElement);
    this.count = part(root, "count", HTMLElement);
    this.queue = part(root, "queue", HTMLElement);
    this.chooseAll = part(root, "choose-all", HTMLInputElement);
    this.actions = {
      compare: part(root, "compare", HTMLButtonElement),
      cancel: part(root, "cancel-chosen", HTMLButtonElement),
      tag: part(root, "tag-chosen", HTMLButtonElement),
      delete: part(root, "delete-chosen", HTMLButtonElement),
    };
    this.message = part(root, "message", HTMLElement);
  }

  start() {
    const { name, status, tag, sort } = this.filters;
    name.addEventListener("input", () => this.#filter());
    for (const field of [status, tag, sort]) field.addEventListener("change", () => this.#filter());
    this.more.addEventListener("click", () => this.#showMore());
    this.chooseAll.addEventListener("change", () => this.#chooseAll(this.chooseAll.checked));
    this.actions.compare.addEventListener("click", () => {
      location.hash = `#/compare?ids=${this.#comparable().join(",")}`;
    });
    this.actions.cancel.addEventListener("click", () => this.#cancelChosen());
    this.actions.tag.addEventListener("click", () => this.#tagChosen());
    this.actions.delete.addEventListener("click", () => this.#deleteChosen());
    const { signal } = this.#ending;
    document.addEventListener("visibilitychange", () => document.hidden || this.#load(), { signal });
    this.#load();
    const reload = () => this.#reloadSoon();
    subscribe({ onEvent: reload, onState: ({ open }) => open && reload() }, signal);
  }

  stop() {
    this.#ending.abort();
    this.#loading.abort();
    clearTimeout(this.#timer);
    clearTimeout(this.#soon);
  }

  #filter() {
    const query = new URLSearchParams();
    for (const [name, field] of Object.entries(this.filters)) if (field.value.trim()) query.set(name, field.value.trim());
    history.replaceState(null, "", `#/jobs${query.size ? `?${query}` : ""}`);
    this.#pages = 1;
    this.#load();
  }

  #showMore() {
    this.#pages += 1;
    this.#load();
  }

  #reloadSoon() {
    this.#isBehind = true;
    if (this.#soon || document.hidden) return;
    this.#soon = window.setTimeout(async () => {
      this.#isBehind = false;
      await this.#load();
      this.#soon = 0;
      if (this.#isBehind && !this.#ending.signal.aborted) this.#reloadSoon();
    }, EVENT_PAUSE_MS);
  }

  async #load() {
    clearTimeout(this.#timer);
    this.#loading.abort();
    this.#loading = new AbortController();
    const { signal } = this.#loading;
    let nextMs = CALM_PAUSE_MS;
    try {
      const { jobs, total, more } = await this.#read(signal);
      this.message.textContent = "";
      this.#show(jobs, total, more);
      this.#showQueue(signal);
      this.#retryMs = FIRST_RETRY_MS;
    } catch (error) {
      if (signal.aborted) return;
      this.#tell(error);
      if (error instanceof ApiError && error.status === 401) return; // the question for a key is not asked again and again
      if (maySucceedLater(error)) {
        nextMs = this.#retryMs;
        this.#retryMs = Math.min(CALM_PAUSE_MS, 2 * this.#retryMs);
      }
    }
    if (!document.hidden) this.#timer = window.setTimeout(() => this.#load(), nextMs);
  }

  /**
   * @param {AbortSignal} signal
   * @returns {Promise<{jobs: Job[], total: number, more: boolean}>} the pages that are shown
   */
  async #read(signal) {
    const filter = Object.fromEntries(Object.entries(this.filters).map(([name, field]) => [name, field.value.trim()]));
    /** @type {Job[]} */
    const jobs = [];
    /** @type {string | null} */
    let cursor = "";
    let total = 0;
    for (let page = 0; page < this.#pages && cursor !== null; page += 1) {
      const answer = await listJobs({ ...filter, cursor, limit: PAGE_SIZE, count: page === 0 }, signal);
      jobs.push(...answer.jobs);
      cursor = answer.cursor;
      total = answer.total ?? total;
    }
    return { jobs, total, more: cursor !== null };
  }

  /**
   * @param {Job[]} jobs
   * @param {number} total on all pages
   * @param {boolean} more
   */
  #show(jobs, total, more) {
    const { name, status, tag } = this.filters;
    const isFiltered = [name, status, tag].some((field) => field.value.trim());
    const there = new Map(jobs.map((job) => [job.id, job]));
    for (const id of this.#chosen.keys()) {
      const job = there.get(id);
      if (job) this.#chosen.set(id, job);
      else this.#chosen.delete(id);
    }
    this.#fillRows(jobs);
    this.table.hidden = !jobs.length;
    this.empty.hidden = jobs.length > 0 || isFiltered;
    this.noMatch.hidden = jobs.length > 0 || !isFiltered;
    this.more.hidden = !more;
    this.count.textContent = more ? `${jobs.length} of ${countText(total, "job")}.` : `${countText(total, "job")}.`;
    this.count.hidden = !jobs.length;
    this.#showChosen();
  }

  /**
   * Rows that stay are filled anew where they stand, so that the focus and a choice are not lost.
   *
   * @param {Job[]} jobs
   */
  #fillRows(jobs) {
    const rows = new Map([...this.body.rows].map((row) => [row.dataset.id, row]));
    jobs.forEach((job, index) => {
      const row = rows.get(job.id) ?? this.#newRow(job);
      rows.delete(job.id);
      fillRow(row, job);
      if (this.body.rows[index] !== row) this.body.insertBefore(row, this.body.rows[index] ?? null);
    });
    for (const row of rows.values()) row.remove();
  }

  /** @param {Job} job */
  #newRow(job) {
    const row = part(fromTemplate("template-list-row"), "row", HTMLTableRowElement);
    row.dataset.id = job.id;
    const isChosen = this.#toChoose.delete(job.id);
    if (isChosen) this.#chosen.set(job.id, job);
    const choice = part(row, "choice", HTMLInputElement);
    choice.checked = isChosen;
    choice.addEventListener("change", () => {
      if (choice.checked) this.#chosen.set(job.id, job);
      else this.#chosen.delete(job.id);
      this.#showChosen();
    });
    part(row, "name", HTMLAnchorElement).href = `#/jobs/${job.id}`;
    part(row, "submitted", HTMLElement).replaceChildren(instantElement(job.submitted_at));
    part(row, "method", HTMLElement).textContent = job.method;
    return row;
  }

  /** @param {boolean} isChosen */
  #chooseAll(isChosen) {
    for (const choice of this.body.querySelectorAll("input")) {
      if (choice.checked === isChosen) continue;
      choice.checked = isChosen;
      choice.dispatchEvent(new Event("change"));
    }
  }

  #comparable() {
    return [...this.#chosen.values()].filter((job) => job.value_us !== null).map(({ id }) => id);
  }

  #showChosen() {
    const jobs = [...this.#chosen.values()];
    const live = jobs.filter((job) => !hasEnded(job.status)).length;
    const { compare, cancel, tag, delete: discard } = this.actions;
    const comparable = this.#comparable().length;
    compare.disabled = comparable < 2;
    compare.textContent = comparable < 2 ? "Compare" : `Compare ${comparable} jobs`;
    cancel.hidden = !live;
    cancel.textContent = `Cancel ${countText(live, "job")}`;
    tag.hidden = !jobs.length;
    tag.textContent = `Tag ${countText(jobs.length, "job")}…`;
    discard.hidden = !jobs.length;
    discard.textContent = `Delete ${countText(jobs.length, "job")}`;
    this.chooseAll.checked = jobs.length > 0 && jobs.length === this.body.rows.length;
    this.chooseAll.indeterminate = jobs.length > 0 && jobs.length < this.body.rows.length;
  }

  #cancelChosen() {
    const live = [...this.#chosen.values()].filter((job) => !hasEnded(job.status));
    this.#forEach(live, (job) => act(job.id, "cancel"), "cancelled");
  }

  async #deleteChosen() {
    const jobs = [...this.#chosen.values()];
    const consequence = "Schedules and histories are removed for good. Jobs that run stay: cancel them first.";
    if (!(await confirmed(`Delete ${countText(jobs.length, "job")}?`, consequence, "Delete"))) return;
    await this.#forEach(jobs.filter((job) => job.status !== "running"), (job) => remove(job.id), "deleted");
  }

  async #tagChosen() {
    const jobs = [...this.#chosen.values()];
    const text = await askForText(`Tag ${countText(jobs.length, "job")}`, "Tags to add, separated by commas", "Add");
    const tags = splitTags(text ?? "");
    if (!tags.length) return;
    await this.#forEach(jobs, (job) => rename(job.id, { tags: [...new Set([...job.tags, ...tags])] }), "tagged");
  }

  /**
   * @param {Job[]} jobs
   * @param {(job: Job) => Promise<unknown>} action
   * @param {string} done
   */
  async #forEach(jobs, action, done) {
    const results = await Promise.allSettled(jobs.map(action));
    const failed = results.flatMap((result) => (result.status === "rejected" ? [result.reason] : []));
    announce(`${countText(jobs.length - failed.length, "job")} ${done}`);
    await this.#load();
    if (failed.length) this.#tell(failed[0]);
  }

  /** @param {AbortSignal} signal */
  async #showQueue(signal) {
    const figures = await getServiceFigures(signal).catch(() => null);
    if (!figures) return;
    const { queued, running, workers, queueAgeS } = figures;
    const waiting = queued ? `, ${countText(queued, "job")} waiting, the first for ${timeText(1e6 * queueAgeS)}` : ", none waiting";
    const living = workers ? countText(workers, "worker") : "no worker (optpipe worker starts one)";
    this.queue.textContent = `On this service: ${living}, ${countText(running, "job")} running${waiting}.`;
    if (workers || signal.aborted || document.hidden) return;
    clearTimeout(this.#timer);
    this.#timer = window.setTimeout(() => this.#load(), WORKER_PAUSE_MS);
  }

  /** @param {unknown} error */
  #tell(error) {
    this.message.textContent = error instanceof Error ? error.message : String(error);
  }
}

/**
 * @param {HTMLTableRowElement} row
 * @param {Job} job
 */
function fillRow(row, job) {
  const link = part(row, "name", HTMLAnchorElement);
  link.textContent = link.title = jobName(job);
  part(row, "choice", HTMLInputElement).setAttribute("aria-label", `choose ${jobName(job)}`);
  const tags = part(row, "tags", HTMLElement);
  if (tags.dataset.tags !== JSON.stringify(job.tags)) {
    tags.dataset.tags = JSON.stringify(job.tags);
    tags.replaceChildren(...job.tags.map(tagLink));
  }
  fillStatus(part(row, "status", HTMLElement), job.status);
  part(row, "state", HTMLElement).textContent = stateText(job);
  part(row, "size", HTMLElement).textContent = sizeText(job);
  part(row, "value", HTMLElement).textContent = timeText(job.value_us);
  fillGap(part(row, "gap", HTMLElement), job.gap);
  part(row, "bubble", HTMLElement).textContent = percentText(job.bubble);
  const milliseconds = searchMs(job);
  part(row, "duration", HTMLElement).textContent = timeText(milliseconds === null ? null : 1000 * milliseconds);
}

/** @param {string} tag */
function tagLink(tag) {
  const link = element("a", tag, "tag");
  link.title = tag;
  link.href = `#/jobs?tag=${encodeURIComponent(tag)}`;
  return link;
}
