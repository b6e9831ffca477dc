/** A plan for a cluster: the question, its strategies as they end, and one of them with its memory and schedule. */

import { announce } from "../announce.js";
import {
  ApiError,
  act,
  getJob,
  getPlan,
  getPlanRequest,
  getStrategySchedule,
  listChoices,
  listPlans,
  remove,
  submitPlan,
} from "../api.js";
import { afterPause } from "../debounce.js";
import { download } from "../download.js";
import { element, fromTemplate, part } from "../elements.js";
import { hasEnded, subscribe } from "../events.js";
import { fileButton, openProblem, takeFiles } from "../files.js";
import { numberOrText, splitTags } from "../form/config.js";
import { faultFields, showFaults } from "../form/faults.js";
import { GanttChart } from "../gantt/chart.js";
import { instantElement, stateText } from "../jobs.js";
import { fillRanks, fillTimes } from "../plan/bars.js";
import { LaunchFiles } from "../plan/launch.js";
import { StrategyTable, bestOf, strategyKey, strategyName } from "../plan/strategies.js";
import { randomKey, untilAnswered } from "../retry.js";
import { bytesText, memoryUnit, percentText, timeText } from "../units.js";

/** @typedef {import("../types.js").Job} Job */
/** @typedef {import("../types.js").Plan} Plan */
/** @typedef {Plan["strategies"][number]} Strategy */

const CHANGE_PAUSE_MS = 600;
const REFRESH_PAUSE_MS = 400;
/** A cancelled plan has ended by then. */
const END_MS = 1500;
const OWN = "";
const FIRST_MODEL = "llama-3.1-70b";
const FIRST_MACHINE = "h100";
const NUMBERS = /** @type {const} */ (["gpus", "sequence", "batch"]);

/** @type {import("../router.js").View} */
export function planView(root, { argument, query }) {
  root.append(fromTemplate("template-plan"));
  const view = new PlanView(root);
  view.start(argument, query);
  return () => view.stop();
}

class PlanView {
  #ending = new AbortController();
  /** Of the plan that is followed; another question replaces it. */
  #following = new AbortController();
  /** @type {Job | null} */
  #job = null;
  /** @type {Plan | null} */
  #plan = null;
  /** Revision of the plan on the page. */
  #shown = 0;
  #refreshing = false;
  #isBehind = false;
  /** Key of the open strategy, and whether the reader chose it. */
  #open = "";
  #isChosen = false;
  /** @type {GanttChart | null} */
  #chart = null;
  #offloads = false;
  /** Of the pipeline that the chart shows. @type {import("../types.js").Problem | null} */
  #problem = null;
  /** What the chart shows: it is fetched anew only where that changes. */
  #drawn = "";
  #drawing = new AbortController();
  /** The object of a config.json that was opened. @type {Record<string, unknown> | null} */
  #config = null;

  /** @param {HTMLElement} root */
  constructor(root) {
    this.root = root;
    this.form = part(root, "form", HTMLFormElement);
    this.model = part(root, "model", HTMLSelectElement);
    this.machine = part(root, "machine", HTMLSelectElement);
    this.limit = part(root, "limit", HTMLInputElement);
    this.numbers = NUMBERS.map((name) => ({
      name,
      text: part(root, name, HTMLInputElement),
      slider: part(root, `${name}-slider`, HTMLInputElement),
    }));
    this.fixed = /** @type {NodeListOf<HTMLInputElement | HTMLSelectElement>} */ (
      root.querySelectorAll(".plan-fixed [name]")
    );
    this.state = part(root, "state", HTMLElement);
    this.cancel = part(root, "cancel", HTMLButtonElement);
    this.fields = faultFields(this.form);
    this.table = new StrategyTable(root, (strategy, byUser) => this.#openStrategy(strategy, byUser));
    this.launch = new LaunchFiles(root);
    this.changing = afterPause(async () => this.#ask(), CHANGE_PAUSE_MS);
  }

  /**
   * @param {string} id of a plan that was made before; empty: none
   * @param {URLSearchParams} query the question, to be asked at once
   */
  async start(id, query) {
    this.#listen();
    subscribe(
      {
        onEvent: (event) => event.job_id === this.#job?.id && this.#refresh(),
        onState: ({ open }) => open && this.#job && this.#refresh(),
      },
      this.#ending.signal,
    );
    for (const { text, slider } of this.numbers) slider.value = String(Math.log2(Number(text.value)));
    await this.#fillChoices();
    if (this.#ending.signal.aborted) return;
    this.#fillEarlier();
    if (id) this.#follow(id);
    else if (query.has("model")) {
      this.#readQuery(query);
      this.#ask();
    } else this.state.textContent = "Choose a model and GPUs; every change plans anew once you have pressed Plan.";
  }

  stop() {
    this.#ending.abort();
    this.#following.abort();
    this.#drawing.abort();
    this.changing.stop();
    this.launch.stop();
    this.#chart?.destroy();
  }

  #listen() {
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#ask();
    });
    this.form.addEventListener("input", ({ target }) => {
      for (const { text, slider } of this.numbers) {
        if (target === slider) text.value = String(2 ** Number(slider.value));
        else if (target === text) slider.value = String(Math.log2(Number(text.value)) || 0);
      }
      if (target instanceof HTMLInputElement && target.type === "file") return;
      if (this.#job) this.changing.run();
    });
    this.cancel.addEventListener("click", () => this.#cancel());
    const link = part(this.root, "link", HTMLButtonElement);
    link.hidden = !navigator.clipboard;
    link.addEventListener("click", async () => {
      await navigator.clipboard.writeText(location.href);
      announce("link copied");
    });
    fileButton(this.root);
    takeFiles({ config: (text, name) => this.#takeConfig(JSON.parse(text), name) }, this.#ending.signal);
    part(this.root, "as-problem", HTMLButtonElement).addEventListener("click", () => {
      if (this.#problem) openProblem(JSON.stringify(this.#problem));
    });
    for (const button of part(this.root, "downloads", HTMLElement).querySelectorAll("button[data-ending]")) {
      if (button instanceof HTMLButtonElement) button.addEventListener("click", () => this.#download(button));
    }
  }

  async #fillChoices() {
    try {
      const { signal } = this.#ending;
      const { models, machines } = await untilAnswered(listChoices, signal, (error) => this.#tell(error));
      for (const { name, parameters } of models) addOption(this.model, name, `${name} · ${parametersText(parameters)}`);
      for (const { name, facts } of machines) addOption(this.machine, name, `${name} · ${bytesText(facts.memory_bytes)}`);
      this.model.value = FIRST_MODEL;
      this.machine.value = FIRST_MACHINE;
      this.state.textContent = "";
    } catch (error) {
      this.#tell(error);
    }
  }

  async #fillEarlier() {
    const all = await listPlans().catch(() => []); // a list that is not there is no harm
    // A question that was asked again is one plan.
    const plans = [...new Map(all.reverse().map((job) => [`${job.name} ${job.value_us}`, job])).values()].reverse();
    part(this.root, "earlier", HTMLElement).hidden = !plans.length;
    part(this.root, "examples", HTMLElement).hidden = Boolean(this.#job);
    part(this.root, "earlier-plans", HTMLElement).replaceChildren(
      ...plans.map((job) => {
        const link = element("a", job.name);
        link.href = `#/plan/${job.id}`;
        const item = element("li");
        item.append(link, ` ${timeText(job.value_us)} a step, `, instantElement(job.submitted_at));
        return item;
      }),
    );
  }

  /**
   * @param {Record<string, unknown>} config
   * @param {string} name
   */
  #takeConfig(config, name) {
    this.#setConfig(config, name);
    this.#ask();
  }

  /**
   * @param {Record<string, unknown>} config
   * @param {string} name
   */
  #setConfig(config, name) {
    this.#config = config;
    const own = [...this.model.options].find(({ value }) => value === OWN) ?? addOption(this.model, OWN, "");
    own.textContent = String(config._name_or_path || config.model_type || name);
    this.model.value = OWN;
  }

  /** @returns {import("../types.js").PlanRequest} */
  #question() {
    const [gpus, sequence, batch] = this.numbers.map(({ text }) => numberOrText(text.value));
    /** @type {Record<string, unknown>} */
    const fixed = {};
    for (const { name, value } of this.fixed) if (value.trim()) fixed[name] = splitTags(value).map(numberOrText);
    const model = this.model.value === OWN && this.#config ? this.#config : this.model.value;
    return { model, gpus, machine: this.machine.value, sequence, global_batch: batch, fixed };
  }

  /** Put the question into the fields. @param {import("../types.js").PlanRequest} question */
  #fill({ model, gpus, machine, sequence, global_batch: batch, fixed = {} }) {
    if (typeof model === "string") this.model.value = model;
    else this.#setConfig(model, "config.json");
    if (typeof machine === "string") this.machine.value = machine;
    [gpus, sequence, batch].forEach((value, k) => {
      this.numbers[k].text.value = String(value);
      this.numbers[k].slider.value = String(Math.log2(Number(value)) || 0);
    });
    for (const field of this.fixed) field.value = [fixed[field.name] ?? ""].flat().join(", ");
    if (Object.keys(fixed).length) part(this.root, "more", HTMLDetailsElement).open = true;
  }

  /** @param {URLSearchParams} query as `#query` makes it */
  #readQuery(query) {
    /** @type {Record<string, unknown>} */
    const fixed = {};
    for (const { name } of this.fixed) if (query.get(name)) fixed[name] = query.get(name);
    const config = query.get("config");
    const [gpus, sequence, batch] = this.numbers.map(({ name, text }) => query.get(name) ?? text.value);
    let model = /** @type {string | Record<string, unknown>} */ (query.get("model") ?? FIRST_MODEL);
    try {
      if (config) model = JSON.parse(config);
    } catch {
      this.state.textContent = "The config.json in the address is not whole. Maybe the link was cut off.";
    }
    this.#fill({ model, gpus, machine: query.get("machine") ?? FIRST_MACHINE, sequence, global_batch: batch, fixed });
    this.limit.value = query.get("limit") ?? this.limit.value;
    this.#open = query.get("strategy") ?? "";
    this.#isChosen = Boolean(this.#open);
  }

  /** Put the question into the address, which is the link to share. */
  #writeQuery() {
    const query = new URLSearchParams({ model: this.model.value || "own", machine: this.machine.value });
    if (this.model.value === OWN && this.#config) query.set("config", JSON.stringify(this.#config));
    for (const { name, text } of this.numbers) query.set(name, text.value);
    for (const { name, value } of this.fixed) if (value.trim()) query.set(name, value.trim());
    query.set("limit", this.limit.value);
    if (this.#isChosen) query.set("strategy", this.#open);
    history.replaceState(null, "", `#/plan?${query}`);
  }

  /** Ask the question in the fields; the one before is given up. */
  async #ask() {
    this.changing.stop();
    const before = this.#job;
    this.#following.abort();
    this.#following = new AbortController();
    const { signal } = this.#following;
    const body = JSON.stringify({ ...this.#question(), config: { time_limit_s: numberOrText(this.limit.value) } });
    const key = randomKey();
    if (before && !hasEnded(before.status)) this.#giveUp(before.id);
    try {
      const send = () => submitPlan(body, key);
      const job = await untilAnswered(send, signal, (error) => signal.aborted || this.#tell(error));
      if (signal.aborted) {
        this.#giveUp(job.id);
        return;
      }
      showFaults(this.fields, []);
      this.#begin(job);
      this.#writeQuery();
    } catch (error) {
      if (!signal.aborted) this.#tell(error);
    }
  }

  /** @param {string} id of a plan that nobody waits for */
  async #giveUp(id) {
    await act(id, "cancel").catch(() => {});
    await new Promise((resolve) => setTimeout(resolve, END_MS));
    await remove(id).catch(() => {}); // it stays where it has not ended yet
  }

  /** @param {string} id of a plan that was asked for before */
  async #follow(id) {
    try {
      const [job, question] = await Promise.all([getJob(id), getPlanRequest(id)]);
      this.#fill(question);
      this.limit.value = String(job.config?.time_limit_s ?? this.limit.value);
      this.#begin(job);
    } catch (error) {
      const isGone = error instanceof ApiError && error.status === 404;
      if (isGone) this.state.textContent = "There is no such plan. Maybe it was deleted, or belongs to another key.";
      else this.#tell(error);
    }
  }

  /** @param {Job} job */
  #begin(job) {
    this.#job = job;
    this.#shown = 0;
    part(this.root, "examples", HTMLElement).hidden = true;
    this.table.reset();
    if (!this.#isChosen) this.#open = "";
    this.#showState();
    this.#refresh();
  }

  /** Read the job and its plan, again where there were events meanwhile. */
  async #refresh() {
    this.#isBehind = true;
    if (this.#refreshing) return;
    this.#refreshing = true;
    try {
      while (this.#isBehind && this.#job && !this.#ending.signal.aborted) {
        this.#isBehind = false;
        await this.#read(this.#job.id, this.#following.signal);
        await new Promise((resolve) => setTimeout(resolve, REFRESH_PAUSE_MS));
      }
    } finally {
      this.#refreshing = false;
    }
  }

  /**
   * @param {string} id
   * @param {AbortSignal} signal
   */
  async #read(id, signal) {
    try {
      const retried = (/** @type {unknown} */ error) => signal.aborted || this.#tell(error);
      const job = await untilAnswered(() => getJob(id, signal), signal, retried);
      const isNew = job.value_us !== null && job.revision > this.#shown;
      const plan = isNew ? await untilAnswered(() => getPlan(id, signal), signal, retried) : this.#plan;
      if (signal.aborted) return;
      const ended = this.#job && !hasEnded(this.#job.status) && hasEnded(job.status);
      this.#job = job;
      this.#shown = job.revision;
      if (isNew && plan) this.#showPlan(plan);
      if (job.value_us === null && hasEnded(job.status)) part(this.root, "result", HTMLElement).hidden = true;
      this.#showState();
      if (ended) {
        announce(`plan ${job.status}: ${timeText(job.value_us)} a step`);
        this.#fillEarlier();
      }
    } catch (error) {
      if (!signal.aborted) this.#tell(error);
    }
  }

  #showState() {
    const job = this.#job;
    if (!job) return;
    this.cancel.hidden = hasEnded(job.status);
    this.state.classList.toggle("fault", job.status === "failed");
    if (job.status === "queued") this.state.textContent = `Waiting for a worker${stateText(job) ? `: ${stateText(job)}` : ""}.`;
    else if (job.status === "running") {
      const limit = `for up to ${job.config?.time_limit_s} s`;
      this.state.textContent = job.value_us === null ? `Rating strategies, ${limit}.` : `Searching for better schedules, ${limit}.`;
    } else if (job.error) this.state.textContent = job.error.charAt(0).toUpperCase() + job.error.slice(1);
    else this.state.textContent = job.status === "cancelled" ? "Cancelled; this is what was found by then." : "";
  }

  /** @param {Plan} plan */
  #showPlan(plan) {
    this.#plan = plan;
    part(this.root, "result", HTMLElement).hidden = false;
    const best = bestOf(plan);
    const memory = memoryUnit(plan.device_memory_bytes);
    const figures = {
      step: timeText(1e6 * plan.best?.seconds),
      tokens: Math.round(plan.best?.tokens_per_s_per_gpu).toLocaleString("en-US"),
      utilization: percentText(plan.best?.utilization),
      fullest: `${((best?.memory_bytes ?? 0) / memory.size).toPrecision(3)} of ${bytesText(plan.device_memory_bytes, memory)}`,
      bound: timeText(1e6 * plan.best?.bound_s),
      gap: this.#job?.gap ? `gap ${percentText(this.#job.gap)}` : "",
    };
    for (const [name, text] of Object.entries(figures)) part(this.root, name, HTMLElement).textContent = text;
    part(this.root, "advice", HTMLElement).textContent = adviceText(plan, best);
    const open = plan.strategies.find((one) => strategyKey(one) === this.#open);
    const shown = this.#isChosen && open ? open : best;
    this.table.show(plan, shown ? strategyKey(shown) : "");
    if (shown) this.#openStrategy(shown, false);
    if (this.#job && plan.best && best) this.launch.show(this.#job.id, plan.best, strategyName(best));
  }

  /**
   * @param {Strategy} strategy
   * @param {boolean} byUser
   */
  async #openStrategy(strategy, byUser) {
    const plan = this.#plan;
    if (!this.#job || !plan) return;
    this.#open = strategyKey(strategy);
    this.table.choose(this.#open);
    const panel = part(this.root, "opened", HTMLElement);
    panel.hidden = false;
    const name = strategyName(strategy);
    part(this.root, "opened-title", HTMLElement).textContent = name;
    part(this.root, "opened-text", HTMLElement).textContent = openedText(strategy, plan);
    fillTimes(part(this.root, "times", HTMLElement), strategy);
    const legend = part(this.root, "memory-legend", HTMLElement);
    fillRanks(part(this.root, "ranks", HTMLElement), legend, strategy, plan.device_memory_bytes);
    if (byUser) {
      this.#isChosen = true;
      this.#writeQuery();
      part(this.root, "opened-title", HTMLElement).focus({ preventScroll: true });
      panel.scrollIntoView();
    }
    const drawn = `${this.#job.id} ${this.#open} ${strategy.solved ?? ""} ${strategy.seconds}`;
    if (drawn === this.#drawn) return;
    this.#drawn = drawn;
    await this.#draw(name);
  }

  /** @param {string} name */
  async #draw(name) {
    if (!this.#job) return;
    this.#drawing.abort();
    this.#drawing = new AbortController();
    const { signal } = this.#drawing;
    const waiting = part(this.root, "waiting", HTMLElement);
    const host = part(this.root, "chart-host", HTMLElement);
    if (!this.#chart) waiting.textContent = "Drawing its schedule.";
    waiting.hidden = !waiting.textContent;
    try {
      const schedule = await getStrategySchedule(this.#job.id, this.#open, signal);
      if (signal.aborted) return;
      waiting.textContent = "";
      waiting.hidden = true;
      host.hidden = false;
      this.#chart ??= new GanttChart(host, { name });
      this.#chart.rename(name);
      this.#chart.show(schedule);
      this.#problem = schedule.problem;
      part(this.root, "as-problem", HTMLButtonElement).hidden = false;
      this.#offloads = schedule.devices.some((plan) => plan.offload?.length);
      for (const dropped of this.root.querySelectorAll("[data-part=dropped]")) dropped.toggleAttribute("hidden", !this.#offloads);
    } catch (error) {
      if (signal.aborted) return;
      this.#drawn = "";
      host.hidden = true;
      part(this.root, "as-problem", HTMLButtonElement).hidden = true;
      waiting.hidden = false;
      waiting.textContent = `There is no picture of its schedule: ${error instanceof Error ? error.message : error}`;
    }
  }

  async #cancel() {
    if (!this.#job) return;
    this.cancel.disabled = true;
    try {
      this.#job = await act(this.#job.id, "cancel");
      announce("cancel requested; what was found is kept");
      this.#refresh();
    } catch (error) {
      this.#tell(error);
    } finally {
      this.cancel.disabled = false;
    }
  }

  /** @param {HTMLButtonElement} button */
  async #download(button) {
    if (!this.#job) return;
    try {
      await download(this.#job, button, this.#offloads, this.#open);
    } catch (error) {
      this.#tell(error);
    }
  }

  /** @param {unknown} error */
  #tell(error) {
    if (error instanceof ApiError && error.faults.length) {
      showFaults(this.fields, error.faults);
      if (error.faults.some(({ pointer }) => /^.(fixed|config)/.test(pointer))) part(this.root, "more", HTMLDetailsElement).open = true;
      this.state.textContent = "";
      return;
    }
    this.state.textContent = error instanceof Error ? error.message : String(error);
  }
}

/**
 * @param {HTMLSelectElement} select
 * @param {string} value
 * @param {string} text
 */
function addOption(select, value, text) {
  const option = element("option", text);
  option.value = value;
  select.append(option);
  return option;
}

/** @param {number} count */
function parametersText(count) {
  const [name, size] = count >= 1e12 ? ["T", 1e12] : count >= 1e9 ? ["B", 1e9] : ["M", 1e6];
  return `${(count / Number(size)).toPrecision(3)} ${name}`;
}

/**
 * @param {Plan} plan
 * @param {Strategy | undefined} best
 */
function adviceText({ strategies, error, machine, assumptions }, best) {
  if (!best) return "";
  const fastest = strategies[0].seconds ?? 0;
  const ties = strategies.filter(({ seconds }) => seconds !== null && seconds <= fastest * (1 + error)).length;
  const texts = [`Take ${strategyName(best)}.`];
  if (!error) texts.push(`Nothing was measured on ${machine}: these are guesses from other machines.`);
  else if (ties > 1) {
    texts.push(`Half of the published steps on ${machine} are predicted within ${percentText(error)}; ` +
      `${ties} strategies tie with the fastest, and it is the simplest of them.`);
  }
  return [...texts, ...assumptions].join(" ");
}

/**
 * @param {Strategy} strategy
 * @param {Plan} plan
 */
function openedText({ end, seconds, bound_s: boundS, reason }, { strategies }) {
  const fastest = strategies[0].seconds ?? 0;
  if (end === "does_not_fit") return `It does not fit: ${reason}.`;
  if (seconds === null) return `It takes at least ${timeText(1e6 * boundS)}: ${reason} than the fastest.`;
  const slower = seconds / fastest - 1;
  return `${timeText(1e6 * seconds)} a step${slower > 0 ? `, ${percentText(slower)} more than the fastest` : ", the fastest"}; ${reason}.`;
}
