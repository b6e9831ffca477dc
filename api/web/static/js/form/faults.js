/** Errors of a request, shown at the form fields they are about. */

import { element } from "../elements.js";

/** @typedef {import("../types.js").Fault} Fault */

/**
 * A field that faults can stand at: `message` is below it and named by its aria-describedby.
 *
 * @typedef {object} Field
 * @property {string} pointer of what it edits, in the body that is sent
 * @property {HTMLElement} control
 * @property {HTMLElement} message
 */

/**
 * The fields below `root` that name what they edit.
 *
 * @param {ParentNode} root
 * @returns {Field[]}
 */
export function faultFields(root) {
  return [...root.querySelectorAll("[data-pointer]")].map((control) => {
    const message = root.querySelector(`#${control.id}-fault`);
    if (!(control instanceof HTMLElement) || !(message instanceof HTMLElement)) {
      throw new Error(`${control.id} has no place for faults`);
    }
    return { pointer: control.getAttribute("data-pointer") ?? "", control, message };
  });
}

/**
 * Put each fault at the field with the longest pointer around it, and clear all others.
 *
 * @param {Field[]} fields one of them with the empty pointer, where the rest goes
 * @param {Fault[]} faults
 * @param {(field: Field, fault: Fault) => HTMLElement} [asElement] how a fault is shown
 */
export function showFaults(fields, faults, asElement = (field, fault) => element("p", sentence(field, fault))) {
  /** @type {Map<Field, Fault[]>} */
  const byField = new Map(fields.map((field) => [field, []]));
  for (const fault of faults) byField.get(fieldAround(fields, fault.pointer))?.push(fault);
  for (const [field, found] of byField) {
    const { control, message } = field;
    message.replaceChildren(...found.map((fault) => asElement(field, fault)));
    if (found.length && control.matches("input, select, textarea")) control.setAttribute("aria-invalid", "true");
    else control.removeAttribute("aria-invalid");
  }
}

/**
 * @param {Field[]} fields
 * @param {string} pointer
 * @returns {Field}
 */
export function fieldAround(fields, pointer) {
  const around = fields.filter((field) => pointer === field.pointer || pointer.startsWith(`${field.pointer}/`));
  return around.reduce((best, field) => (field.pointer.length > best.pointer.length ? field : best));
}

/**
 * A fault as a whole sentence: many begin after the name of the field.
 *
 * @param {Field} field
 * @param {Fault} fault
 */
export function sentence({ control }, { detail }) {
  const isWhole = detail.charAt(0) === detail.charAt(0).toUpperCase();
  const label = document.querySelector(`label[for="${control.id}"]`);
  return isWhole || !label ? detail : `${label.textContent} ${detail}`;
}
