/** A new problem: from a preset, a file or pasted text, checked by the server while it is edited. */

import { announce } from "../announce.js";
import { ApiError, getPreset, listPresets, submit, validate } from "../api.js";
import { element, fromTemplate, part } from "../elements.js";
import { afterPause } from "../debounce.js";
import { ProblemDocument } from "../form/document.js";
import { faultFields, sentence, showFaults } from "../form/faults.js";
import { findSpan } from "../form/json_span.js";
import { readConfig, fillConfig, numberOrText } from "../form/config.js";
import { countText } from "../units.js";
import { rememberProblem } from "./compare.js";

/** @typedef {import("../types.js").Fault} Fault */

const TYPING_PAUSE_MS = 400;
const MOST_FILE_BYTES = 16 * 2 ** 20;

/** @type {import("../router.js").View} */
export function newView(root) {
  root.append(fromTemplate("template-new"));
  const view = new NewProblem(root);
  view.start();
  return () => view.checking.stop();
}

class NewProblem {
  /** The body that the key below was made for: the same body sent twice is one job. */
  #sent = "";
  #idempotencyKey = "";

  /** @param {HTMLElement} root */
  constructor(root) {
    this.root = root;
    this.form = part(root, "form", HTMLFormElement);
    this.editor = part(root, "problem", HTMLTextAreaElement);
    this.preset = part(root, "preset", HTMLSelectElement);
    this.microbatches = part(root, "microbatches", HTMLInputElement);
    this.objective = part(root, "objective", HTMLSelectElement);
    this.factor = part(root, "budget-factor", HTMLInputElement);
    this.status = part(root, "check", HTMLElement);
    this.submit = part(root, "submit", HTMLButtonElement);
    this.compare = part(root, "compare", HTMLButtonElement);
    this.fields = faultFields(this.form);
    this.document = new ProblemDocument(this.editor);
    this.checking = afterPause((signal) => this.#check(signal), TYPING_PAUSE_MS);
  }

  start() {
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    this.form.addEventListener("input", (event) => this.#onInput(event.target));
    this.compare.addEventListener("click", () => {
      if (!this.document.problem) return;
      rememberProblem(this.document.problem);
      location.hash = "#/compare";
    });
    this.#listenToFiles();
    this.#fillPresets();
    this.#showProblem();
  }

  /** @param {EventTarget | null} target */
  #onInput(target) {
    if (target === this.preset) {
      this.#loadPreset(this.preset.value);
      return;
    }
    if (target === this.editor) this.#onText();
    else if (target === this.microbatches) this.document.set("microbatches", numberOrText(this.microbatches.value));
    else if (target === this.objective) this.document.set("objective", this.objective.value);
    else if (target === this.factor) this.#onFactor();
    this.checking.run();
  }

  #onText() {
    this.preset.value = "";
    this.document.readText();
    this.factor.value = "1";
    this.#showProblem();
  }

  #onFactor() {
    const factor = Number(this.factor.value);
    const right = this.factor.value.trim() !== "" && factor > 0 && Number.isFinite(factor);
    part(this.root, "budget-factor-fault", HTMLElement).textContent = right ? "" : "This must be a number above 0.";
    if (right) this.document.scaleBudgets(factor);
  }

  async #fillPresets() {
    try {
      for (const { name, about } of await listPresets()) {
        const option = element("option", name);
        option.value = name;
        option.title = about;
        this.preset.append(option);
      }
    } catch (error) {
      this.#tell(error);
    }
  }

  /** @param {string} name */
  async #loadPreset(name) {
    if (!name) return;
    try {
      this.#load(await getPreset(name));
    } catch (error) {
      this.#tell(error);
    }
  }

  #listenToFiles() {
    const input = part(this.root, "file", HTMLInputElement);
    part(this.root, "open-file", HTMLButtonElement).addEventListener("click", () => input.click());
    input.addEventListener("change", () => this.#readFile(input.files?.[0]));
    this.editor.addEventListener("dragover", (event) => {
      event.preventDefault();
      this.editor.setAttribute("data-dropping", "");
    });
    this.editor.addEventListener("dragleave", () => this.editor.removeAttribute("data-dropping"));
    this.editor.addEventListener("drop", (event) => {
      if (!event.dataTransfer?.files.length) return;
      event.preventDefault();
      this.editor.removeAttribute("data-dropping");
      this.#readFile(event.dataTransfer.files[0]);
    });
  }

  /** @param {File | undefined} file */
  async #readFile(file) {
    if (!file) return;
    if (file.size > MOST_FILE_BYTES) {
      this.status.textContent = `${file.name} is too large for a problem. Maybe it is another file.`;
      return;
    }
    this.preset.value = "";
    const text = await file.text();
    try {
      this.#load(JSON.parse(text));
    } catch {
      this.editor.value = text;
      this.#onText();
      this.checking.run();
    }
  }

  /** @param {any} loaded a problem, a body with one, or a schedule, which holds one */
  #load(loaded) {
    this.document.load(loaded?.problem ?? loaded);
    if (loaded?.config) fillConfig(this.form, loaded.config);
    this.factor.value = "1";
    this.#showProblem();
    this.checking.run();
  }

  /** Bring the fields that are views of the problem up to date with it. */
  #showProblem() {
    const { problem } = this.document;
    this.microbatches.value = String(problem?.microbatches ?? "");
    this.objective.value = String(problem?.objective ?? "makespan");
    this.microbatches.disabled = this.objective.disabled = !problem;
    part(this.root, "budget-factor-fault", HTMLElement).textContent = "";
    this.factor.disabled = !this.document.hasLimits;
    this.submit.disabled = this.compare.disabled = !problem;
    if (this.document.error) this.#show([{ pointer: "/problem", code: "bad_json", detail: this.document.error }]);
    else showFaults(this.fields, []);
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
      const checked = await validate(this.#body(), signal);
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
    if (faults.length) this.status.textContent = `${countText(faults.length, "thing")} to mend.`;
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

/** Unlike randomUUID this is there without TLS too. */
function randomKey() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
