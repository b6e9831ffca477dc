/** Files that are opened, or dropped anywhere on the page: the server says what each is, and the view for it opens. */

import { announce } from "./announce.js";
import { ApiError, recognize } from "./api.js";
import { part } from "./elements.js";
import { compareHash, keep } from "./kept.js";

/** @typedef {import("./types.js").Recognized} Recognized */
/** @typedef {(text: string, name: string, found: Recognized) => void} Taker */
/** @typedef {{[kind in Recognized["kind"]]?: Taker}} Takers */

const MOST_FILE_BYTES = 15 * 2 ** 20;
/** Addresses that are longer are not taken by every browser. */
const MOST_CONFIG = 100_000;

/** Of the view that is shown, which takes files of some kinds itself. @type {{takers: Takers, costs: () => unknown}} */
let current = { takers: {}, costs: () => null };
let dropped = "";

/** @type {Required<Takers>} */
const OPENERS = {
  problem: openProblem,
  schedule: openSchedules,
  trace: openSchedules,
  "torch-csv": openSchedules,
  config: (text) => go(`#/plan?${new URLSearchParams({ model: "own", config: JSON.stringify(JSON.parse(text)) })}`),
};

/** @param {string} text of a problem to begin a new one with */
export function openProblem(text) {
  dropped = text;
  go("#/new?file");
}

/** The text of the problem that was opened last. */
export function droppedProblem() {
  return dropped;
}

/**
 * Take files of some kinds within a view, until it ends.
 *
 * @param {Takers} takers
 * @param {AbortSignal} signal
 * @param {() => unknown} [costs] a problem with the costs of a schedule CSV, null: there is none
 */
export function takeFiles(takers, signal, costs = () => null) {
  const own = { takers, costs };
  current = own;
  signal.addEventListener("abort", () => {
    if (current === own) current = { takers: {}, costs: () => null };
  });
}

/**
 * Have the button of a view open what is chosen.
 *
 * @param {HTMLElement} root
 */
export function fileButton(root) {
  const input = part(root, "file", HTMLInputElement);
  part(root, "open-file", HTMLButtonElement).addEventListener("click", () => input.click());
  input.addEventListener("change", () => {
    const chosen = [...(input.files ?? [])];
    input.value = ""; // the same file may be opened again, once it was changed
    openFiles(chosen);
  });
}

/**
 * Open one file, or the schedules of several together.
 *
 * @param {File[]} files
 */
async function openFiles(files) {
  if (!files.length) return;
  const message = part(document, "file-message", HTMLElement);
  message.textContent = "";
  try {
    const opened = await Promise.all(files.map(read));
    const [{ text, file, found }] = opened;
    if (opened.length === 1) (current.takers[found.kind] ?? OPENERS[found.kind])(text, file.name, found);
    else {
      const other = opened.find((one) => !one.found.schedules.length);
      if (other) throw new Error(`${other.file.name} is ${NAMES[other.found.kind]}; several files open where all are schedules. Maybe open it alone.`);
      compare(opened.flatMap((one) => one.found.schedules), opened.flatMap((one) => one.found.notes.map((note) => `${one.file.name}: ${note}`)));
    }
    announce(opened.map((one) => `${one.file.name} is ${NAMES[one.found.kind]}`).join(", "));
  } catch (error) {
    // The file stands in the request as text, which no reader has to know.
    const faults = error instanceof ApiError ? error.faults.map(({ detail }) => detail) : [];
    message.textContent = faults.join(" ") || (error instanceof Error ? error.message : String(error));
  }
}

/** @param {File} file */
async function read(file) {
  if (file.size > MOST_FILE_BYTES) throw new Error(`${file.name} is too large. Maybe give it to the command line.`);
  const text = await file.text();
  return { file, text, found: await recognized(file.name, text) };
}

/** Open what is dropped, wherever that is. */
export function startDrops() {
  const isFile = (/** @type {DragEvent} */ event) => event.dataTransfer?.types.includes("Files");
  document.addEventListener("dragover", (event) => {
    if (!isFile(event)) return;
    event.preventDefault();
    document.body.setAttribute("data-dropping", "");
  });
  document.addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) document.body.removeAttribute("data-dropping");
  });
  document.addEventListener("drop", (event) => {
    document.body.removeAttribute("data-dropping");
    if (!isFile(event)) return;
    event.preventDefault();
    openFiles([...(event.dataTransfer?.files ?? [])]);
  });
  window.addEventListener("hashchange", () => part(document, "file-message", HTMLElement).replaceChildren());
}

const NAMES = {
  problem: "a problem",
  schedule: "a schedule",
  trace: "a measured step",
  "torch-csv": "a schedule CSV of torch",
  config: "a model's config.json",
};

/**
 * @param {string} name
 * @param {string} text
 * @returns {Promise<Recognized>}
 */
async function recognized(name, text) {
  const problem = current.costs();
  if (!problem) return recognize(name, text);
  // The problem in the form has the costs of a CSV; where it does not fit, or is not valid, the file stands for itself.
  return recognize(name, text, problem).catch(() => recognize(name, text));
}

/** @type {Taker} */
function openSchedules(_text, _name, { schedules, notes }) {
  compare(schedules, notes);
}

/**
 * @param {Recognized["schedules"]} schedules
 * @param {string[]} notes
 */
function compare(schedules, notes) {
  keep({ schedules, notes });
  const [path, query] = location.hash.split("?");
  const shown = new URLSearchParams(path === "#/compare" ? query : "");
  const ids = (shown.get("ids") ?? "").split(",").filter(Boolean);
  go(compareHash(ids, true, shown.has("published")));
}

/** @param {string} hash to show, anew where it is shown already */
function go(hash) {
  if (hash.length > MOST_CONFIG) throw new Error("This config.json is too large. Maybe it is another file.");
  if (location.hash === hash) window.dispatchEvent(new HashChangeEvent("hashchange"));
  else location.hash = hash;
}
