/** A new problem: from a preset, a file, fields or pasted text, checked by the server while it is edited. */

import { announce } from "../announce.js";
import { ApiError, getJob, getPreset, getProblem, listPresets, submit, validate } from "../api.js";
import { element, fromTemplate, part } from "../elements.js";
import { afterPause } from "../debounce.js";
import { droppedProblem, fileButton, takeFiles } from "../files.js";
import { NAMES, ProblemDocument } from "../form/document.js";
import { faultFields, sentence, showFaults } from "../form/faults.js";
import { findSpan } from "../form/json_span.js";
import { readConfig, fillConfig, numberOrText } from "../form/config.js";
import { PublishedPreview } from "../form/preview.js";
import { ValueField } from "../form/values.js";
import { randomKey, untilAnswered } from "../retry.js";
import { countText } from "../units.js";
import { keepProblem } from "../kept.js";

/** @typedef {import("../types.js").Fault} Fault */

const TYPING_PAUSE_MS = 400;
/** The preset that an empty form begins with. */
const FIRST_PRESET = "tiny";
/** Sliders of microbatches reach this far, or a multiple of what was loaded. */
const LEAST_SLIDER_END = 32;

/** @type {import("../router.js").View} */
export function newView(root, { query }) {
  root.append(fromTemplate("template-new"));
  const view = new NewProblem(root);
  view.start(query);
  return () => view.stop();
}

class NewProblem {
  /** The body that the key below was made for: the same body sent twice is one job. */
  #sent = "";
  #idempotencyKey = "";
  /** Of the view, and of what is being loaded: what is chosen later replaces it. */
  #ending = new AbortController();
  #loading = new AbortController();

  /** @param {HTMLElement} root */
  constructor(root) {
    this.root = root;
    this.form = part(root, "form", HTMLFormElement);
    this.editor = part(root, "problem", HTMLTextAreaElement);
    this.preset = part(root, "preset", HTMLSelectElement);
    this.about = part(root, "about", HTMLElement);
    this.devices = part(root, "devices", HTMLInputElement);
    this.devicesFault = part(root, "devices-fault", HTMLElement);
    this.microbatches = part(root, "microbatches", HTMLInputElement);
    this.objective = part(root, "objective", HTMLSelectElement);
    this.microbatchSlider = part(root, "microbatch-slider", HTMLInputElement);
    this.preview = new PublishedPreview(root);
    this.status = part(root, "check", HTMLElement);
    this.submit = part(root, "submit", HTMLButtonElement);
    this.compare = part(root, "compare", HTMLButtonElement);
    this.fields = faultFields(this.form);
    this.document = new ProblemDocument(this.editor);
    this.values = NAMES.map((name) => new ValueField(root, name, this.document));
    this.checking = afterPause((signal) => this.#check(signal), TYPING_PAUSE_MS);
  }

  /** @param {URLSearchParams} query ``from``: the job to begin with; ``budgets``: those to put in; ``file``: the dropped one */
  start(query) {
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    this.form.addEventListener("input", (event) => this.#onInput(event.target));
    this.compare.addEventListener("click", () => {
      if (!this.document.problem) return;
      keepProblem(this.document.problem);
      location.hash = "#/compare";
    });
    this.#listenToFiles();
    this.#showProblem();
    const from = query.get("from");
    const dropped = query.has("file") ? droppedProblem() : "";
    if (from) this.#loadJob(from, query.get("budgets"));
    else if (dropped) this.#loadText(dropped);
    this.#fillPresets(!from && !dropped);
  }

  stop() {
    this.#ending.abort();
    this.#loading.abort();
    this.checking.stop();
    this.preview.stop();
  }

  /** @param {EventTarget | null} target */
  #onInput(target) {
    if (target === this.preset) {
      this.#loadPreset(this.preset.value);
      return;
    }
    if (target === this.editor) this.#onText();
    else if (target === this.devices) this.#setDevices();
    else if (target === this.microbatches) this.document.setMicrobatches(numberOrText(this.microbatches.value));
    else if (target === this.objective) this.document.setObjective(this.objective.value);
    else if (target === this.microbatchSlider) {
      this.microbatches.value = this.microbatchSlider.value;
      this.document.setMicrobatches(Number(this.microbatchSlider.value));
    }
    if (target === this.microbatches) this.microbatchSlider.value = this.microbatches.value;
    for (const field of this.values) field.read(target);
    this.#changed();
  }

  /** Check the problem and draw its published schedules. */
  #changed() {
    this.checking.run();
    this.preview.update(this.document.problem);
  }

  #setDevices() {
    const count = numberOrText(this.devices.value);
    if (typeof count === "number") this.document.setDevices(count);
    const isThere = this.document.deviceCount === count;
    this.devicesFault.textContent = isThere ? "" : "This must be a whole number from 1 to 4,096.";
    if (isThere) this.#showProblem();
  }

  #onText() {
    this.#loading.abort();
    this.#showPreset("");
    this.document.readText();
    this.#showProblem();
  }

  /** @param {boolean} isEmpty whether the form begins with the first of them */
  async #fillPresets(isEmpty) {
    try {
      const presets = await untilAnswered(listPresets, this.#ending.signal, (error) => this.#tell(error));
      this.#hint();
      for (const { name, about } of presets) {
        const option = element("option", name);
        option.value = name;
        option.title = about;
        this.preset.append(option);
      }
      if (!isEmpty || !this.#isUntouched) return;
      const loaded = await this.#read(() => getPreset(FIRST_PRESET));
      if (!loaded || !this.#isUntouched) return;
      this.#showPreset(FIRST_PRESET);
      this.#load(loaded);
    } catch (error) {
      this.#tell(error);
    }
  }

  /** Nothing is chosen, and nobody is about to type or paste: the text would end up within that of a preset. */
  get #isUntouched() {
    return !this.editor.value && !this.preset.value && this.editor !== document.activeElement;
  }

  /** @param {string} name */
  async #loadPreset(name) {
    this.#showPreset(name);
    const loaded = await this.#read(async () => (name ? getPreset(name) : null));
    if (loaded) this.#load(loaded);
  }

  /** @param {string} name of the preset that the problem is; empty: none */
  #showPreset(name) {
    this.preset.value = name;
    this.about.textContent = this.preset.selectedOptions[0]?.title ?? "";
    this.about.hidden = !this.about.textContent;
  }

  /**
   * Read what is to be shown, unless something else is chosen before it is there.
   *
   * @template T
   * @param {() => Promise<T>} read
   * @returns {Promise<T | null>}
   */
  async #read(read) {
    this.#loading.abort();
    this.#loading = new AbortController();
    const { signal } = this.#loading;
    try {
      const loaded = await untilAnswered(read, signal, (error) => signal.aborted || this.#tell(error));
      return signal.aborted ? null : loaded;
    } catch (error) {
      if (!signal.aborted) this.#tell(error);
      return null;
    }
  }

  #listenToFiles() {
    fileButton(this.root);
    /** @param {string} text */
    const load = (text) => this.#loadText(text);
    takeFiles({ problem: load, schedule: load }, this.#ending.signal, () => this.document.problem);
  }

  /** @param {string} text of a problem, a body with one, or a schedule */
  #loadText(text) {
    this.#loading.abort();
    this.#showPreset("");
    this.#load(JSON.parse(text));
  }

  /** @param {any} loaded a problem, a body with one, or a schedule, which holds one */
  #load(loaded) {
    this.document.load(loaded?.problem ?? loaded);
    if (loaded?.config) fillConfig(this.form, loaded.config);
    this.#showProblem();
    this.#changed();
  }

  /**
   * Begin with what a job was submitted with.
   *
   * @param {string} id
   * @param {string | null} budgets for its devices, separated by commas, empty: no limit
   */
  async #loadJob(id, budgets) {
    const loaded = await this.#read(() => Promise.all([getProblem(id), getJob(id)]));
    if (!loaded) return;
    const [problem, job] = loaded;
    this.#load({ problem, config: job.config });
    if (budgets === null) return;
    this.document.setBudgets(budgets.split(",").map((budget) => (budget ? Number(budget) : null)));
    this.#showProblem();
    this.#changed();
  }

  /** Bring the fields that are views of the problem up to date with it. */
  #showProblem() {
    const { problem } = this.document;
    this.microbatches.value = String(problem?.microbatches ?? "");
    this.objective.value = String(problem?.objective ?? "makespan");
    this.microbatches.disabled = this.objective.disabled = this.microbatchSlider.disabled = !problem;
    this.microbatchSlider.max = String(Math.max(LEAST_SLIDER_END, 4 * Number(problem?.microbatches ?? 1)));
    this.microbatchSlider.value = this.microbatches.value;
    const { deviceCount } = this.document;
    if (this.devices !== document.activeElement) this.devices.value = String(deviceCount ?? problem?.devices?.length ?? "");
    this.devices.disabled = !deviceCount;
    this.devices.title = problem && !deviceCount ? "The placement has no rule by which there could be more; the text has it." : "";
    this.devicesFault.textContent = "";
    for (const field of this.values) field.show();
    this.submit.disabled = this.compare.disabled = !problem;
    if (this.document.error) this.#show([{ pointer: "/problem", code: "bad_json", detail: this.document.error }]);
    else showFaults(this.fields, []);
    this.#hint();
  }

  #hint() {
    if (!this.editor.value.trim()) this.status.textContent = "Choose a preset, or paste a problem.";
  }

  /** The problem goes as it was typed: a key that stands there twice is the server's to refuse. */
  #body() {
    return `{"problem": ${this.editor.value}, "config": ${JSON.stringify(readConfig(this.form))}}`;
  }

  /** @param {AbortSignal} signal */
  async #check(signal) {
    if (!this.document.problem) return;
    try {
      const check = () => validate(this.#body(), signal);
      const checked = await untilAnswered(check, signal, (error) => signal.aborted || this.#tell(error));
      this.#show([]);
      const sizes = [countText(checked.devices, "device"), countText(checked.stages, "stage")];
      sizes.push(countText(checked.microbatches, "microbatch", "microbatches"), countText(checked.ops, "op"));
      this.status.textContent = `Valid: ${sizes.join(", ")}.`;
    } catch (error) {
      if (!signal.aborted) this.#tell(error);
    }
  }

  async #submit() {
    if (!this.document.problem) return;
    const wrong = this.values.find((field) => field.isWrong);
    if (wrong) {
      wrong.text.focus();
      return;
    }
    this.checking.stop();
    this.submit.disabled = true;
    const body = this.#body();
    if (body !== this.#sent) {
      this.#sent = body;
      this.#idempotencyKey = randomKey();
    }
    try {
      const job = await submit(body, this.#idempotencyKey);
      announce("submitted");
      location.hash = `#/jobs/${job.id}`;
    } catch (error) {
      this.#tell(error);
      const invalid = this.form.querySelector("[aria-invalid]");
      if (invalid instanceof HTMLElement) invalid.focus();
    } finally {
      this.submit.disabled = false;
    }
  }

  /** @param {unknown} error */
  #tell(error) {
    if (error instanceof ApiError && error.faults.some(({ pointer }) => pointer)) {
      this.#show(error.faults);
      return;
    }
    this.status.textContent = error instanceof Error ? error.message : String(error);
  }

  /** @param {Fault[]} faults */
  #show(faults) {
    showFaults(this.fields, faults, (field, fault) => this.#faultElement(field, fault));
    if (faults.length) this.status.textContent = `${countText(faults.length, "error")}.`;
  }

  /**
   * A fault inside the problem can be gone to in its text.
   *
   * @param {import("../form/faults.js").Field} field
   * @param {Fault} fault
   */
  #faultElement(field, fault) {
    const isInside = field.control === this.editor && fault.pointer !== field.pointer;
    if (!isInside || !this.document.problem) return element("p", sentence(field, fault));
    const shown = element("p", fault.detail);
    const pointer = fault.pointer.slice("/problem".length);
    const button = element("button", pointer, "place");
    button.type = "button";
    button.addEventListener("click", () => this.#select(pointer));
    shown.prepend(button, " ");
    return shown;
  }

  /** @param {string} pointer into the problem */
  #select(pointer) {
    const { start, end } = findSpan(this.editor.value, pointer);
    this.editor.focus();
    this.editor.setSelectionRange(start, end);
    const line = this.editor.value.slice(0, start).split("\n").length - 1;
    const lineHeight = parseFloat(getComputedStyle(this.editor).lineHeight);
    this.editor.scrollTop = Math.max(0, (line - 2) * lineHeight);
  }
}
