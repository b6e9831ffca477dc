/** Confirmation of actions that cannot be undone. */

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
