/** One job: its state, its search and its schedule, followed live. */

import { announce } from "../announce.js";
import { ApiError, act, getJob, getSchedule, remove, rename } from "../api.js";
import { drawCurve, fillImprovements, improvements } from "../curve.js";
import { askForText, confirmed } from "../dialog.js";
import { download } from "../download.js";
import { element, fromTemplate, part } from "../elements.js";
import { hasEnded, readHistory, subscribe } from "../events.js";
import { splitTags } from "../form/config.js";
import { GanttChart } from "../gantt/chart.js";
import { OBJECTIVES, fillStatus, instantElement, jobName, stateText } from "../jobs.js";
import { keyHeader } from "../key.js";
import { Progress } from "../progress.js";
import { FIRST_RETRY_MS, LONGEST_RETRY_MS, maySucceedLater } from "../retry.js";
import { bubbleRate, highestPeakBytes } from "../schedule.js";
import { NONE, bytesText, countText, percentText, timeText } from "../units.js";

/** @typedef {import("../types.js").Job} Job */
/** @typedef {import("../types.js").Schedule} Schedule */

/** Between two schedules that are fetched while a search finds better ones. */
const SCHEDULE_PAUSE_MS = 700;
const CURVE_PAUSE_MS = 500;

/** @type {import("../router.js").View} */
export function jobView(root, { argument, query }) {
  root.append(fromTemplate("template-job"));
  const view = new JobView(root, argument, query);
  view.start();
  return () => view.stop();
}

class JobView {
  #ending = new AbortController();
  /** @type {Job | null} */
  #job = null;
  #progress = new Progress();
  /** Revision up to which events have been read. */
  #revision = 0;
  #catchingUp = false;
  /** Whether there is news since the job was last read. */
  #isBehind = false;
  /** Whether the last attempt to read it failed. */
  #failed = false;
  /** @type {GanttChart | null} */
  #chart = null;
  /** Revision that the schedule on the page is at least as new as. */
  #shown = 0;
  #fetching = false;
  #offloads = false;
  #curveTimer = 0;
  #retryMs = FIRST_RETRY_MS;

  /**
   * @param {HTMLElement} root
   * @param {string} id
   * @param {URLSearchParams} linked the part of the chart that the address names
   */
  constructor(root, id, linked) {
    this.root = root;
    this.id = id;
    this.linked = linked;
    this.curve = part(root, "curve", SVGSVGElement);
    this.message = part(root, "message", HTMLElement);
    this.connection = part(root, "connection", HTMLElement);
    this.buttons = {
      cancel: part(root, "cancel", HTMLButtonElement),
      retry: part(root, "retry", HTMLButtonElement),
      delete: part(root, "delete", HTMLButtonElement),
      rename: part(root, "rename", HTMLButtonElement),
      tag: part(root, "tag", HTMLButtonElement),
      annotate: part(root, "annotate", HTMLButtonElement),
    };
    this.downloads = part(root, "downloads", HTMLElement).querySelectorAll("button");
  }

  start() {
    this.buttons.cancel.addEventListener("click", () => this.#act("cancel"));
    this.buttons.retry.addEventListener("click", () => this.#act("retry"));
    this.buttons.delete.addEventListener("click", () => this.#delete());
    this.buttons.rename.addEventListener("click", () => this.#rename());
    this.buttons.tag.addEventListener("click", () => this.#tag());
    this.buttons.annotate.addEventListener("click", () => this.#annotate());
    for (const button of this.downloads) button.addEventListener("click", () => this.#download(button));
    part(this.root, "whole-range", HTMLInputElement).addEventListener("change", () => this.#drawCurve());
    const observer = new ResizeObserver(() => this.#drawCurve());
    observer.observe(this.curve);
    this.#ending.signal.addEventListener("abort", () => observer.disconnect());
    this.#curveTimer = window.setInterval(() => this.#isRunning && this.#drawCurve(), CURVE_PAUSE_MS);
    this.#catchUp();
    subscribe({ onEvent: (event) => this.#onEvent(event), onState: (state) => this.#onState(state) }, this.#ending.signal);
  }

  stop() {
    this.#ending.abort();
    clearInterval(this.#curveTimer);
    this.#chart?.destroy();
  }

  get #isRunning() {
    return this.#job?.status === "running";
  }

  /** @param {import("../events.js").State} state of the stream of events */
  #onState({ open, pauseS }) {
    const isLive = !this.#job || !hasEnded(this.#job.status);
    const lost = `The connection to the server is lost; next try in ${Math.ceil(pauseS)} s.`;
    this.#tellConnection(open || !isLive ? "" : lost);
    if (open) this.#catchUp();
  }

  /** @param {import("../types.js").JobEvent} event of any job */
  #onEvent(event) {
    if (event.job_id !== this.id || event.revision <= this.#revision) return;
    if (event.revision === this.#revision + 1 && !this.#catchingUp) this.#apply(event);
    else this.#catchUp();
  }

  /** Read the job and the events that this page has not seen. */
  async #catchUp() {
    this.#isBehind = true;
    if (this.#catchingUp) return;
    this.#catchingUp = true;
    const { signal } = this.#ending;
    try {
      while (this.#isBehind && !signal.aborted) {
        this.#isBehind = false;
        await this.#refresh();
        const until = this.#job?.revision ?? 0;
        if (until <= this.#revision) continue;
        for await (const event of readHistory(this.id, this.#revision, until, signal)) this.#apply(event);
      }
      if (this.#failed) this.#tell(null);
      this.#failed = false;
      if (!this.#fetching) this.#retryMs = FIRST_RETRY_MS;
    } catch (error) {
      this.#failed = true;
      this.#tell(error);
      this.#retryAfter(error, () => this.#catchUp());
    } finally {
      this.#catchingUp = false;
    }
  }

  /**
   * Work again a little later, unless it would fail again. No event may come that would cause it: the stream can open
   * before the request fails, and a job that has ended has no more events.
   *
   * @param {unknown} error
   * @param {() => void} work
   */
  #retryAfter(error, work) {
    const { signal } = this.#ending;
    if (signal.aborted || !maySucceedLater(error)) return;
    setTimeout(() => signal.aborted || work(), this.#retryMs);
    this.#retryMs = Math.min(LONGEST_RETRY_MS, 2 * this.#retryMs);
  }

  /** @param {import("../types.js").JobEvent} event the next one of this job */
  #apply(event) {
    this.#revision = event.revision;
    this.#progress.add(event);
    if (!this.#job) return;
    const { status } = this.#job;
    // Events that were there before the job was read are old news.
    if (event.revision >= this.#job.revision) {
      const { value_us = null, bound_us = null } = event;
      Object.assign(this.#job, { revision: event.revision, status: event.status, attempt: event.attempt });
      if (value_us !== null) this.#job.value_us = value_us;
      if (bound_us !== null) this.#job.bound_us = bound_us;
      this.#job.gap = relativeGap(this.#job);
      if (event.kind === "incumbent") announce(`better schedule: ${timeText(value_us)}, gap ${percentText(this.#job.gap)}`);
      this.#showJob(this.#job);
      if (event.status !== status || event.kind === "status") this.#catchUp();
    }
    if (event.kind === "incumbent") this.#fetchSchedule();
    this.#drawCurve();
  }

  /** Read the job anew. */
  async #refresh() {
    const before = this.#job?.status;
    const job = await getJob(this.id, this.#ending.signal);
    if (this.#job && job.revision < this.#job.revision) return;
    this.#job = job;
    this.#showJob(job);
    this.#drawCurve();
    if (before && before !== job.status) announce(`${jobName(job)}: ${job.status} ${stateText(job)}`);
    if (job.value_us !== null) this.#fetchSchedule();
  }

  /** @param {Job} job */
  #showJob(job) {
    const heading = part(this.root, "title", HTMLElement);
    heading.textContent = jobName(job);
    document.title = `${jobName(job)} · OptPipe`;
    fillStatus(part(this.root, "status", HTMLElement), job.status);
    part(this.root, "state", HTMLElement).textContent = stateText(job);
    this.#setFigure("value", timeText(job.value_us));
    this.#setFigure("bound", timeText(job.bound_us));
    this.#setFigure("gap", percentText(job.gap));
    part(this.root, "objective", HTMLElement).textContent = OBJECTIVES[job.objective];
    part(this.root, "method", HTMLElement).textContent = job.method;
    part(this.root, "submitted", HTMLElement).replaceChildren(instantElement(job.submitted_at));
    part(this.root, "elapsed", HTMLElement).textContent = elapsedText(job);
    this.#setFigure("config", configText(job.config ?? {}));
    this.#setFigure("attempts", String(job.attempt));
    const key = "Authorization" in keyHeader() ? ' -H "Authorization: Bearer $OPTPIPE_KEY"' : "";
    this.#setFigure("command", `curl${key} ${location.origin}/v1/schedules/${job.id}/schedule`);
    part(this.root, "tags", HTMLElement).replaceChildren(...job.tags.map((tag) => element("span", tag, "tag")));
    part(this.root, "job-note", HTMLElement).textContent = job.note;
    part(this.root, "job-note", HTMLElement).hidden = !job.note;
    this.#showActions(job);
    this.#showError(job);
    this.#showWaiting(job);
  }

  /** @param {Job} job */
  #showActions(job) {
    const ended = hasEnded(job.status);
    this.buttons.cancel.hidden = ended;
    this.buttons.retry.hidden = !ended;
    const { delete: discard, rename: relabel, tag, annotate } = this.buttons;
    for (const button of [discard, relabel, tag, annotate]) button.hidden = false;
    this.buttons.delete.disabled = job.status === "running";
    this.buttons.delete.title = job.status === "running" ? "Cancel it first" : "";
    const edit = part(this.root, "edit", HTMLAnchorElement);
    edit.href = `#/new?from=${job.id}`;
    edit.hidden = !job.config;
    const compare = part(this.root, "compare", HTMLAnchorElement);
    compare.href = `#/compare?ids=${job.id}&published`;
    compare.hidden = job.value_us === null;
    part(this.root, "downloads", HTMLElement).hidden = job.value_us === null;
  }

  /** @param {Job} job */
  #showError(job) {
    part(this.root, "failed", HTMLElement).hidden = !job.error;
    part(this.root, "error", HTMLElement).textContent = job.error ?? "";
    const budgets = job.budgets_bytes;
    part(this.root, "remedy", HTMLElement).hidden = !budgets;
    if (budgets) part(this.root, "budgets", HTMLAnchorElement).href = `#/new?from=${job.id}&budgets=${budgets.join(",")}`;
  }

  /** @param {Job} job */
  #showWaiting(job) {
    const waiting = part(this.root, "waiting", HTMLElement);
    waiting.hidden = job.value_us !== null;
    if (job.status === "queued") waiting.textContent = "Waiting for a worker. This page follows by itself.";
    else if (job.status === "running") waiting.textContent = "Searching for a first schedule.";
    else waiting.textContent = "There is no schedule.";
  }

  /**
   * @param {string} name
   * @param {string} text
   */
  #setFigure(name, text) {
    part(this.root, name, HTMLElement).textContent = text;
  }

  /** Fetch the best schedule unless one is on its way; what was found meanwhile follows after a pause. */
  async #fetchSchedule() {
    if (this.#fetching || !this.#job || this.#shown >= this.#job.revision) return;
    this.#fetching = true;
    const revision = this.#job.revision;
    let failed = false;
    try {
      await this.#showSchedule(await getSchedule(this.id, this.#ending.signal));
      this.#shown = revision;
      this.#retryMs = FIRST_RETRY_MS;
      await new Promise((resolve) => setTimeout(resolve, SCHEDULE_PAUSE_MS));
    } catch (error) {
      failed = this.#failed = true;
      this.#tell(error);
      this.#retryAfter(error, () => this.#catchUp());
    } finally {
      this.#fetching = false;
    }
    if (!failed && !this.#ending.signal.aborted) this.#fetchSchedule();
  }

  /** @param {Schedule} schedule */
  async #showSchedule(schedule) {
    const host = part(this.root, "chart-host", HTMLElement);
    const name = schedule.problem.name || "this job's schedule";
    const isFirst = !this.#chart;
    this.#chart ??= new GanttChart(host, { name, link: (state) => `#/jobs/${this.id}${state.size ? `?${state}` : ""}` });
    this.#offloads = schedule.devices.some((plan) => plan.offload?.length);
    for (const dropped of this.root.querySelectorAll("[data-part=dropped]")) dropped.toggleAttribute("hidden", !this.#offloads);
    const { bubble, whose } = bubbleRate(schedule);
    this.#setFigure("bubble", percentText(bubble));
    this.#setFigure("bubble-of", `bubble of ${whose}`);
    this.#setFigure("peak", bytesText(highestPeakBytes(schedule)));
    part(this.root, "found-by", HTMLElement).textContent = schedule.method;
    part(this.root, "source", HTMLElement).textContent = schedule.problem.source || NONE;
    await this.#chart.show(schedule);
    if (isFirst) this.#chart.restore(this.linked);
  }

  #drawCurve() {
    const { points, nowS } = this.#progress;
    // A job that was answered from an equal problem has not been searched for.
    part(this.root, "progress", HTMLElement).hidden = !points.length || this.#job?.attempt === 0;
    drawCurve(this.curve, points, nowS, !part(this.root, "whole-range", HTMLInputElement).checked);
    fillImprovements(part(this.root, "improvements", HTMLTableSectionElement), points);
    const found = improvements(points);
    part(this.root, "curve-text", HTMLElement).textContent = found.length
      ? `${found.length === 1 ? "One schedule found," : `${found.length} schedules found, the last`} after ` +
        `${found[found.length - 1].seconds.toFixed(2)} s.`
      : "";
  }

  /** @param {"cancel" | "retry"} action */
  async #act(action) {
    const button = this.buttons[action];
    button.disabled = true;
    try {
      this.#tell(null);
      this.#job = await act(this.id, action);
      this.#showJob(this.#job);
      announce(action === "cancel" ? "cancel requested; the best schedule is kept" : "queued again");
      this.#catchUp();
    } catch (error) {
      this.#tell(error);
    } finally {
      button.disabled = false;
    }
  }

  async #rename() {
    if (!this.#job) return;
    const name = await askForText("Rename this job", "Name", "Rename", jobName(this.#job));
    if (name?.trim()) await this.#label({ name: name.trim() });
  }

  async #tag() {
    if (!this.#job) return;
    const text = await askForText(`Tags of ${jobName(this.#job)}`, "Separated by commas", "Keep", this.#job.tags.join(", "));
    if (text !== null) await this.#label({ tags: splitTags(text) });
  }

  async #annotate() {
    if (!this.#job) return;
    const note = await askForText(`Note on ${jobName(this.#job)}`, "For whoever reads this job", "Keep", this.#job.note, true);
    if (note !== null) await this.#label({ note });
  }

  /** @param {{name?: string, tags?: string[], note?: string}} labels */
  async #label(labels) {
    try {
      this.#job = await rename(this.id, labels);
      this.#showJob(this.#job);
      this.#catchUp(); // events may have overtaken the answer
    } catch (error) {
      this.#tell(error);
    }
  }

  async #delete() {
    const name = this.#job ? jobName(this.#job) : "this job";
    if (!(await confirmed(`Delete ${name}?`, "Its schedule and history are removed for good.", "Delete"))) return;
    try {
      await remove(this.id);
      announce(`${name} deleted`);
      location.hash = "#/jobs";
    } catch (error) {
      this.#tell(error);
    }
  }

  /** @param {HTMLButtonElement} button */
  async #download(button) {
    if (!this.#job) return;
    try {
      await download(this.#job, button, this.#offloads);
    } catch (error) {
      this.#tell(error);
    }
  }

  /** @param {unknown} error null: all is well */
  #tell(error) {
    if (this.#ending.signal.aborted) return;
    if (error === null) this.message.textContent = "";
    else if (error instanceof ApiError && error.status === 404) {
      this.message.textContent = "There is no such job. Maybe it was deleted, or belongs to another key.";
      part(this.root, "parts", HTMLElement).hidden = !this.#job;
    } else this.message.textContent = error instanceof Error ? error.message : String(error);
  }

  /** @param {string} text empty: it is there */
  #tellConnection(text) {
    this.connection.textContent = text;
    this.connection.hidden = !text;
  }
}

/** @param {Job} job */
function relativeGap({ value_us: value, bound_us: bound }) {
  if (value === null || bound === null) return null;
  return value ? (value - bound) / value : 0;
}

/** @param {Partial<import("../types.js").JobConfig>} config */
function configText({ time_limit_s: limitS, gap, workers, seed, priority }) {
  if (limitS === undefined) return NONE;
  const texts = [`${limitS} s at most`, gap ? `gap of ${percentText(gap)} will do` : "", countText(workers ?? 1, "thread")];
  texts.push(`seed ${seed}`, priority ? `priority ${priority}` : "");
  return texts.filter(Boolean).join(", ");
}

/** @param {Job} job */
function elapsedText({ status, started_at: started, finished_at: finished }) {
  if (!started) return status === "succeeded" ? "no time: an equal problem was solved before" : NONE;
  if (!finished) return "running";
  return timeText(1000 * (Date.parse(finished) - Date.parse(started)));
}
