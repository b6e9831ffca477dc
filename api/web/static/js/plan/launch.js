/** Launch files of the strategy to take, for a trainer that is chosen: shown, copied, downloaded. */

import { announce } from "../announce.js";
import { getLaunch, launchPath } from "../api.js";
import { save } from "../download.js";
import { element, fromTemplate, part } from "../elements.js";
import { percentText, timeText } from "../units.js";

/** @typedef {import("../types.js").Launch} Launch */

const COPIED_MS = 2000;

export class LaunchFiles {
  #id = "";
  /** Seconds of a step that the plan predicts. */
  #planned = 0;
  /** What the files were made of: they are fetched anew only where that changes. */
  #source = "";
  #loading = new AbortController();

  /** @param {HTMLElement} root */
  constructor(root) {
    this.trainer = part(root, "trainer", HTMLSelectElement);
    this.of = part(root, "launch-of", HTMLElement);
    this.text = part(root, "launch-text", HTMLElement);
    this.lost = part(root, "lost", HTMLElement);
    this.files = part(root, "launch-files", HTMLElement);
    this.trainer.addEventListener("change", () => this.#load());
  }

  /**
   * @param {string} id of the plan
   * @param {Record<string, any>} best the strategy to take
   * @param {string} name of it
   */
  show(id, best, name) {
    this.of.textContent = `They start ${name}, the strategy to take.`;
    const source = `${id} ${JSON.stringify(best)}`;
    if (source === this.#source) return;
    this.#source = source;
    this.#id = id;
    this.#planned = best.seconds;
    this.#load();
  }

  stop() {
    this.#loading.abort();
  }

  async #load() {
    this.#loading.abort();
    this.#loading = new AbortController();
    const { signal } = this.#loading;
    const trainer = this.trainer.value;
    this.#fill(trainer ? "Making them." : "", [], []);
    if (!trainer) return;
    try {
      const { files, lost, seconds } = await getLaunch(this.#id, trainer, signal);
      const slower = seconds / this.#planned - 1;
      const text = `Predicted as the trainer runs it: ${timeText(1e6 * seconds)} a step` +
        `${slower > 0.001 ? `, ${percentText(slower)} more than the plan` : ""}.`;
      this.#fill(lost.length ? `${text} Lost against the plan:` : text, lost, files.map((file) => this.#file(trainer, file)));
    } catch (error) {
      if (!signal.aborted) this.#tell(error);
    }
  }

  /**
   * @param {string} text
   * @param {string[]} lost
   * @param {Node[]} files
   */
  #fill(text, lost, files) {
    this.text.classList.remove("fault");
    this.text.textContent = text;
    this.lost.replaceChildren(...lost.map((sentence) => element("li", sentence)));
    this.lost.hidden = !lost.length;
    this.files.replaceChildren(...files);
  }

  /**
   * @param {string} trainer
   * @param {Launch["files"][number]} file
   */
  #file(trainer, { name, text }) {
    const file = fromTemplate("template-launch-file");
    part(file, "file-name", HTMLElement).textContent = name;
    const shown = part(file, "file-text", HTMLElement);
    const copy = part(file, "copy", HTMLButtonElement);
    copy.hidden = text === null || !navigator.clipboard;
    copy.setAttribute("aria-label", `Copy ${name}`);
    if (text === null) shown.replaceWith(element("p", "The plan's schedule, which the trainer runs as it is.", "hint"));
    else shown.textContent = text;
    shown.setAttribute("aria-label", name);
    copy.addEventListener("click", async () => {
      await navigator.clipboard.writeText(text ?? "");
      announce(`${name} copied`);
      copy.textContent = "Copied";
      setTimeout(() => (copy.textContent = "Copy"), COPIED_MS);
    });
    const download = part(file, "save", HTMLButtonElement);
    download.setAttribute("aria-label", `Download ${name}`);
    const path = `${launchPath(this.#id, trainer)}&${new URLSearchParams({ file: name })}`;
    download.addEventListener("click", () => save(path, name).catch((error) => this.#tell(error)));
    return file;
  }

  /** @param {unknown} error */
  #tell(error) {
    this.text.classList.add("fault");
    this.text.textContent = error instanceof Error ? error.message : String(error);
  }
}
