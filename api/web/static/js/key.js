/** The bearer key: asked for when the server requires one, kept for this tab only. */

import { part } from "./elements.js";

const STORED = "optpipe.key";

/** @type {Promise<boolean> | null} */
let asking = null;

/** @returns {Record<string, string>} the header that carries the key, if there is one */
export function keyHeader() {
  const key = sessionStorage.getItem(STORED);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/**
 * Ask for a key. Requests that fail at the same time share one question.
 *
 * @param {boolean} refused whether a key was sent and not accepted
 * @returns {Promise<boolean>} whether one was given
 */
export function askForKey(refused) {
  asking ??= ask(refused).finally(() => {
    asking = null;
  });
  return asking;
}

/** @type {Set<() => void>} */
const listeners = new Set();

/** @param {() => void} listener called whenever another key was given */
export function onKeyChange(listener) {
  listeners.add(listener);
}

/** Show the button that forgets the key while there is one. */
export function startKey() {
  const button = part(document, "forget-key", HTMLButtonElement);
  button.addEventListener("click", () => {
    sessionStorage.removeItem(STORED);
    location.reload();
  });
  showButton();
}

function showButton() {
  part(document, "forget-key", HTMLButtonElement).hidden = !sessionStorage.getItem(STORED);
}

/**
 * @param {boolean} refused
 * @returns {Promise<boolean>}
 */
function ask(refused) {
  const dialog = part(document, "key-dialog", HTMLDialogElement);
  const input = part(dialog, "key", HTMLInputElement);
  const form = part(dialog, "key-form", HTMLFormElement);
  part(dialog, "key-refused", HTMLElement).hidden = !refused;
  input.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    /** @param {Event} event */
    const onSubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(STORED, input.value.trim());
      for (const listener of listeners) listener();
      dialog.close("given");
    };
    const onClose = () => {
      form.removeEventListener("submit", onSubmit);
      showButton();
      resolve(dialog.returnValue === "given");
    };
    form.addEventListener("submit", onSubmit);
    part(dialog, "key-cancel", HTMLButtonElement).onclick = () => dialog.close();
    dialog.addEventListener("close", onClose, { once: true });
  });
}
