/** Questions to the reader: confirmation of actions that cannot be undone, and short texts. */

import { part } from "./elements.js";

/**
 * @param {string} question
 * @param {string} consequence
 * @param {string} yes label of the button that confirms
 * @returns {Promise<boolean>}
 */
export function confirmed(question, consequence, yes) {
  const dialog = part(document, "confirm-dialog", HTMLDialogElement);
  const button = part(dialog, "confirm-yes", HTMLButtonElement);
  part(dialog, "confirm-question", HTMLElement).textContent = question;
  part(dialog, "confirm-consequence", HTMLElement).textContent = consequence;
  button.textContent = yes;
  button.onclick = () => dialog.close("yes");
  part(dialog, "confirm-no", HTMLButtonElement).onclick = () => dialog.close();
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

/**
 * @param {string} title
 * @param {string} label
 * @param {string} yes label of the button that confirms
 * @param {string} [text] to begin with
 * @param {boolean} [isLong] of several lines
 * @returns {Promise<string | null>} null: nothing was given
 */
export function askForText(title, label, yes, text = "", isLong = false) {
  const dialog = part(document, "text-dialog", HTMLDialogElement);
  const line = part(dialog, "text-input", HTMLInputElement);
  const lines = part(dialog, "text-area", HTMLTextAreaElement);
  const field = isLong ? lines : line;
  line.hidden = isLong;
  lines.hidden = !isLong;
  part(dialog, "text-label", HTMLLabelElement).htmlFor = field.id;
  part(dialog, "text-title", HTMLElement).textContent = title;
  part(dialog, "text-label", HTMLElement).textContent = label;
  part(dialog, "text-yes", HTMLElement).textContent = yes;
  part(dialog, "text-no", HTMLButtonElement).onclick = () => dialog.close();
  field.value = text;
  dialog.returnValue = "";
  dialog.showModal();
  field.focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "given" ? field.value : null), { once: true });
  });
}
