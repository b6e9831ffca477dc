/** Several schedules at one time scale: chosen jobs, those of a file, the published schedules of one problem. */

import { ApiError, comparePublished, getJob, getSchedule } from "../api.js";
import { drawCurves, seriesClass } from "../curve.js";
import { element, fromTemplate, part } from "../elements.js";
import { readHistory } from "../events.js";
import { fileButton } from "../files.js";
import { GanttChart } from "../gantt/chart.js";
import { TimeWindow } from "../gantt/time_window.js";
import { OBJECTIVES, jobName } from "../jobs.js";
import { compareHash, keptNow } from "../kept.js";
import { Progress } from "../progress.js";
import { untilAnswered } from "../retry.js";
import { bubbleRate, durationUs, fromZero, highestPeakBytes, workKey } from "../schedule.js";
import { NONE, bytesText, percentText, timeText } from "../units.js";

/** @typedef {import("../types.js").Schedule} Schedule */
/** @typedef {import("../types.js").Problem} Problem */

/**
 * @typedef {object} Compared
 * @property {string} name
 * @property {string} note
 * @property {string} [id] of the job
 * @property {number} [revision] that its search has reached; 0: it was answered at once
 * @property {Schedule | null} schedule
 */

/** Charts side by side beyond this many hide more than they show. */
const MOST = 12;

/** @type {import("../router.js").View} */
export function compareView(root, { query }) {
  root.append(fromTemplate("template-compare"));
  fileButton(root);
  const ending = new AbortController();
  const view = new Comparison(root, ending.signal);
  const ids = (query.get("ids") ?? "").split(",").filter(Boolean);
  view.start(ids, query.has("file"), query.has("published"));
  return () => {
    ending.abort();
    view.stop();
  };
}

class Comparison {
  /** @type {GanttChart[]} */
  #charts = [];

  /**
   * @param {HTMLElement} root
   * @param {AbortSignal} signal
   */
  constructor(root, signal) {
    this.root = root;
    this.signal = signal;
    this.message = part(root, "message", HTMLElement);
  }

  /**
   * @param {string[]} ids of jobs; none: what was kept in this tab alone
   * @param {boolean} file whether the schedules of the file that was opened last stand next to the jobs
   * @param {boolean} published whether the published schedules of the problem do
   */
  async start(ids, file, published) {
    if (ids.length) part(this.root, "picker", HTMLAnchorElement).href = `#/jobs?chosen=${ids.join(",")}`;
    const kept = !ids.length || file ? keptNow() : null;
    part(this.root, "empty", HTMLElement).hidden = ids.length > 0 || kept !== null;
    if (!ids.length && !kept) return;
    this.#showNotes(kept);
    try {
      const read = () => this.#read(ids.slice(0, MOST), kept, published);
      const compared = await untilAnswered(read, this.signal, (error) => this.#tell(error));
      this.message.textContent = ids.length > MOST ? `The first ${MOST} of ${ids.length} are shown.` : "";
      if (!kept?.problem) this.#offerPublished(compared, published, file);
      this.#show(compared);
    } catch (error) {
      this.#tell(error);
    }
  }

  /** @param {import("../kept.js").Kept | null} kept */
  #showNotes(kept) {
    if (kept?.problem) {
      part(this.root, "title", HTMLElement).textContent = `Published schedules of ${kept.problem.name || "this problem"}`;
    }
    const notes = kept?.notes ?? [];
    part(this.root, "notes", HTMLElement).hidden = !notes.length;
    part(this.root, "notes", HTMLElement).replaceChildren(...notes.map((note) => element("li", note)));
  }

  stop() {
    for (const chart of this.#charts) chart.destroy();
  }

  /**
   * @param {string[]} ids
   * @param {import("../kept.js").Kept | null} kept
   * @param {boolean} published
   * @returns {Promise<Compared[]>} jobs, schedules of a file and, where all answer one problem, its published ones
   */
  async #read(ids, kept, published) {
    const jobs = await Promise.all(
      ids.map(async (id) => {
        const job = await getJob(id, this.signal);
        const note = job.error ?? `${job.status}, no schedule`;
        if (job.value_us === null) return { name: jobName(job), note, id, schedule: null };
        const schedule = await getSchedule(id, this.signal);
        return { name: jobName(job), note: schedule.method, id, revision: job.attempt ? job.revision : 0, schedule };
      }),
    );
    const all = [...jobs, ...(kept?.schedules ?? [])];
    const problem = kept?.problem ?? (published ? onlyProblem(all) : null);
    return problem ? [...all, ...(await this.#published(problem))] : all;
  }

  /**
   * The link that adds the published schedules of the one problem, or leaves them out.
   *
   * @param {Compared[]} compared
   * @param {boolean} published whether they are there
   * @param {boolean} file whether schedules of a file are
   */
  #offerPublished(compared, published, file) {
    const link = part(this.root, "published", HTMLAnchorElement);
    const ids = compared.flatMap(({ id }) => id ?? []);
    link.hidden = !onlyProblem(compared);
    link.textContent = published ? "Leave out published schedules" : "Add published schedules";
    link.href = compareHash(ids, file, !published);
  }

  /**
   * @param {Problem} problem
   * @returns {Promise<Compared[]>}
   */
  async #published(problem) {
    const methods = await comparePublished(problem, this.signal);
    return methods.map(({ method, summary, why_not: whyNot, schedule }) => ({
      name: method,
      note: whyNot ?? summary,
      schedule,
    }));
  }

  /** @param {Compared[]} compared */
  #show(compared) {
    const there = compared.filter(({ schedule }) => schedule);
    const isOneProblem = onlyProblem(there) !== null;
    part(this.root, "different", HTMLElement).hidden = isOneProblem || !there.length;
    const comparable = there.length > 1 && isOneProblem;
    const best = comparable ? Math.min(...there.map(({ schedule }) => schedule?.value_us ?? Infinity)) : null;
    part(this.root, "rows", HTMLTableSectionElement).replaceChildren(...there.map((entry) => comparedRow(entry, best, there)));
    part(this.root, "remove-head", HTMLElement).hidden = !there.some(({ id }) => id);
    this.#showMissing(compared.filter(({ schedule }) => !schedule));
    part(this.root, "table", HTMLElement).hidden = false;
    part(this.root, "figures", HTMLElement).hidden = !there.length;
    part(this.root, "missing", HTMLDetailsElement).open = !there.length;
    const searched = there.filter(({ revision }) => revision !== undefined);
    if (comparable && searched.length) this.#showSearches(searched).catch((error) => this.#tell(error));
    const endUs = Math.max(...there.map(({ schedule }) => (schedule ? durationUs(schedule) : 0)));
    const time = new TimeWindow(0, endUs);
    const host = part(this.root, "charts", HTMLElement);
    for (const { name, note, schedule } of there) {
      if (!schedule) continue;
      const section = element("section", "", "panel");
      const chartHost = element("div");
      const heading = element("h2", `${name} `);
      heading.append(element("span", note, "faint note"));
      section.append(heading, chartHost);
      host.append(section);
      const chart = new GanttChart(chartHost, { name, time, memory: false });
      chart.show(fromZero(schedule), false);
      this.#charts.push(chart);
    }
  }

  /** @param {Compared[]} missing those without a schedule, and why */
  #showMissing(missing) {
    part(this.root, "missing", HTMLElement).hidden = !missing.length;
    part(this.root, "missing-count", HTMLElement).textContent =
      missing.length === 1 ? "1 without a schedule, and why" : `${missing.length} without a schedule, and why`;
    part(this.root, "reasons", HTMLElement).replaceChildren(
      ...missing.flatMap(({ name, note }) => [element("dt", name), element("dd", note)]),
    );
  }

  /**
   * The searches of jobs that answer the same problem, on one axis.
   *
   * @param {Compared[]} compared
   */
  async #showSearches(compared) {
    const read = () => Promise.all(compared.map(({ id, revision }) => this.#readSearch(id ?? "", revision ?? 0)));
    const histories = await untilAnswered(read, this.signal, () => {}); // the schedules are there, and say enough
    const searched = compared.map(({ name }, index) => ({ name, points: histories[index] })).filter(({ points }) => points.length);
    if (searched.length < 2) return;
    part(this.root, "searches", HTMLElement).hidden = false;
    const svg = part(this.root, "searches-curve", SVGSVGElement);
    const entries = searched.map(({ name }, index) => {
      const entry = element("li");
      entry.append(element("span", "", `swatch ${seriesClass(index)}`), name);
      return entry;
    });
    const bound = element("li");
    bound.append(element("span", "", "swatch swatch-curve-bound"), "bound of each");
    part(this.root, "searches-legend", HTMLElement).replaceChildren(...entries, bound);
    const observer = new ResizeObserver(() => drawCurves(svg, searched.map(({ points }) => points)));
    observer.observe(svg);
    this.signal.addEventListener("abort", () => observer.disconnect());
  }

  /**
   * @param {string} id
   * @param {number} revision that the job has reached
   * @returns {Promise<import("../curve.js").Point[]>} none for a job that was answered at once
   */
  async #readSearch(id, revision) {
    const progress = new Progress();
    for await (const event of readHistory(id, 0, revision, this.signal)) progress.add(event);
    return progress.points;
  }

  /** @param {unknown} error */
  #tell(error) {
    if (this.signal.aborted) return;
    if (error instanceof ApiError && error.status === 404) {
      this.message.textContent = "One of these jobs is not there. Maybe it was deleted, or belongs to another key.";
    } else this.message.textContent = error instanceof Error ? error.message : String(error);
  }
}

/**
 * @param {Compared[]} compared
 * @returns {Problem | null} the problem that all their schedules answer; null: there are several, or none
 */
function onlyProblem(compared) {
  const problems = compared.flatMap(({ schedule }) => schedule?.problem ?? []);
  return new Set(problems.map(workKey)).size === 1 ? problems[0] : null;
}

/**
 * @param {Compared} compared
 * @param {number | null} bestUs null: the values are not of one problem
 * @param {Compared[]} all
 */
function comparedRow({ name, note, id, schedule }, bestUs, all) {
  const row = element("tr");
  const heading = element("th");
  heading.scope = "row";
  if (id) {
    const link = element("a", name);
    link.href = `#/jobs/${id}`;
    heading.append(link, " ", element("span", note, "faint"));
  } else heading.textContent = name;
  row.append(heading);
  if (!schedule) return row;
  const { value_us: value, bound_us: bound, gap, objective } = schedule;
  if (value === bestUs) row.className = "best";
  const figures = {
    Value: timeText(value),
    "To the best": toBestText(value, bestUs),
    Bubble: percentText(bubbleRate(schedule).bubble),
    "Highest peak": bytesText(highestPeakBytes(schedule)),
    Bound: timeText(bound),
    Gap: percentText(gap),
  };
  for (const [label, text] of Object.entries(figures)) {
    const cell = element("td", text);
    cell.dataset.label = label;
    row.append(cell);
  }
  if (id) {
    const others = all.flatMap((other) => (other.id && other.id !== id ? [other.id] : []));
    const shown = new URLSearchParams(location.hash.split("?")[1]);
    const file = shown.has("file");
    const published = shown.has("published") && (others.length > 0 || file);
    const leave = element("a", "×", "button quiet");
    leave.href = compareHash(others, file, published);
    leave.setAttribute("aria-label", `leave out ${name}`);
    const cell = element("td");
    cell.append(leave);
    row.append(cell);
  } else if (all.some((other) => other.id)) row.append(element("td"));
  row.title = `${OBJECTIVES[objective]}, ${note}`;
  return row;
}

/**
 * @param {number} valueUs
 * @param {number | null} bestUs
 */
function toBestText(valueUs, bestUs) {
  if (bestUs === null) return NONE;
  return valueUs === bestUs ? "best" : `+${percentText(valueUs / bestUs - 1)}`;
}
