/** All jobs, newest first, kept up to date. */

import { ApiError, listJobs } from "../api.js";
import { element, fromTemplate, part } from "../elements.js";
import { subscribe } from "../events.js";
import { OBJECTIVES, fillStatus, instantElement, jobName, stateText } from "../jobs.js";
import { percentText, timeText } from "../units.js";

/** @typedef {import("../types.js").Job} Job */

const PAGE_SIZE = 50;
/** Events that follow each other quickly are answered by one request. */
const EVENT_PAUSE_MS = 300;
/** Even without events, in case that one was missed. */
const CALM_PAUSE_MS = 30_000;

/** @type {import("../router.js").View} */
export function listView(root, { query }) {
  root.append(fromTemplate("template-list"));
  const list = new JobList(root, query.get("status") ?? "", query.get("tag") ?? "");
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
  /** @type {Set<string>} */
  #chosen = new Set();
  /** Pages shown, each from the cursor before it. */
  #pages = 1;

  /**
   * @param {HTMLElement} root
   * @param {string} status
   * @param {string} tag
   */
  constructor(root, status, tag) {
    this.status = part(root, "status-filter", HTMLSelectElement);
    this.tag = part(root, "tag-filter", HTMLInputElement);
    this.body = part(root, "jobs", HTMLTableSectionElement);
    this.table = part(root, "jobs-table", HTMLTableElement);
    this.empty = part(root, "empty", HTMLElement);
    this.noMatch = part(root, "no-match", HTMLElement);
    this.more = part(root, "more", HTMLButtonElement);
    this.compare = part(root, "compare", HTMLButtonElement);
    this.message = part(root, "message", HTMLElement);
    this.status.value = status;
    this.tag.value = tag;
  }

  start() {
    this.status.addEventListener("change", () => this.#filter());
    this.tag.addEventListener("change", () => this.#filter());
    this.more.addEventListener("click", () => this.#showMore());
    this.compare.addEventListener("click", () => {
      location.hash = `#/compare?ids=${[...this.#chosen].join(",")}`;
    });
    document.addEventListener("visibilitychange", () => document.hidden || this.#load(), {
      signal: this.#ending.signal,
    });
    this.#load();
    const reload = () => this.#reloadSoon();
    subscribe({ onEvent: reload, onState: ({ open }) => open && reload() }, this.#ending.signal);
  }

  stop() {
    clearTimeout(this.#soon);
    this.#ending.abort();
    this.#loading.abort();
    clearTimeout(this.#timer);
  }

  #filter() {
    const query = new URLSearchParams();
    if (this.status.value) query.set("status", this.status.value);
    if (this.tag.value.trim()) query.set("tag", this.tag.value.trim());
    history.replaceState(null, "", `#/jobs${query.size ? `?${query}` : ""}`);
    this.#pages = 1;
    this.#load();
  }

  #showMore() {
    this.#pages += 1;
    this.#load();
  }

  #reloadSoon() {
    if (this.#soon || document.hidden) return;
    this.#soon = window.setTimeout(async () => {
      await this.#load();
      this.#soon = 0;
    }, EVENT_PAUSE_MS);
  }

  async #load() {
    clearTimeout(this.#timer);
    this.#loading.abort();
    this.#loading = new AbortController();
    const { signal } = this.#loading;
    try {
      const { jobs, cursor } = await this.#read(signal);
      this.message.textContent = "";
      this.#show(jobs, cursor !== null);
    } catch (error) {
      if (signal.aborted) return;
      this.message.textContent = error instanceof Error ? error.message : String(error);
      if (error instanceof ApiError && error.status === 401) return; // the question for a key is not asked again and again
    }
    if (!document.hidden) this.#timer = window.setTimeout(() => this.#load(), CALM_PAUSE_MS);
  }

  /**
   * @param {AbortSignal} signal
   * @returns {Promise<{jobs: Job[], cursor: string | null}>} all pages that are shown
   */
  async #read(signal) {
    const filter = { status: this.status.value, tag: this.tag.value.trim(), limit: PAGE_SIZE };
    /** @type {Job[]} */
    const jobs = [];
    /** @type {string | null} */
    let cursor = "";
    for (let page = 0; page < this.#pages && cursor !== null; page += 1) {
      const answer = await listJobs({ ...filter, cursor }, signal);
      jobs.push(...answer.jobs);
      cursor = answer.cursor;
    }
    return { jobs, cursor };
  }

  /**
   * @param {Job[]} jobs
   * @param {boolean} more
   */
  #show(jobs, more) {
    const filtered = Boolean(this.status.value || this.tag.value.trim());
    const there = new Set(jobs.map((job) => job.id));
    for (const id of this.#chosen) if (!there.has(id)) this.#chosen.delete(id);
    this.#fillRows(jobs);
    this.table.hidden = !jobs.length;
    this.empty.hidden = jobs.length > 0 || filtered;
    this.noMatch.hidden = jobs.length > 0 || !filtered;
    this.more.hidden = !more;
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
    const choice = part(row, "choice", HTMLInputElement);
    choice.setAttribute("aria-label", `compare ${jobName(job)}`);
    choice.addEventListener("change", () => {
      if (choice.checked) this.#chosen.add(job.id);
      else this.#chosen.delete(job.id);
      this.#showChosen();
    });
    const link = part(row, "name", HTMLAnchorElement);
    link.href = `#/jobs/${job.id}`;
    link.textContent = link.title = jobName(job);
    const tags = job.tags.map((tag) => tagLink(tag));
    part(row, "tags", HTMLElement).replaceChildren(...tags);
    part(row, "submitted", HTMLElement).replaceChildren(instantElement(job.submitted_at));
    part(row, "method", HTMLElement).textContent = job.method;
    part(row, "objective", HTMLElement).textContent = OBJECTIVES[job.objective];
    return row;
  }

  #showChosen() {
    const count = this.#chosen.size;
    this.compare.disabled = count < 2;
    this.compare.textContent = count < 2 ? "Compare" : `Compare ${count} jobs`;
  }
}

/**
 * @param {HTMLTableRowElement} row
 * @param {Job} job
 */
function fillRow(row, job) {
  fillStatus(part(row, "status", HTMLElement), job.status);
  part(row, "state", HTMLElement).textContent = stateText(job);
  part(row, "value", HTMLElement).textContent = timeText(job.value_us);
  part(row, "bound", HTMLElement).textContent = timeText(job.bound_us);
  part(row, "gap", HTMLElement).textContent = percentText(job.gap);
  part(row, "choice", HTMLInputElement).disabled = job.value_us === null;
}

/** @param {string} tag */
function tagLink(tag) {
  const link = element("a", tag, "tag");
  link.title = tag;
  link.href = `#/jobs?tag=${encodeURIComponent(tag)}`;
  return link;
}
