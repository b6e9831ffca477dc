/** Access to the page's templates and their named elements, with types checked. */

/**
 * A fresh copy of a template's content.
 *
 * @param {string} id
 * @returns {DocumentFragment}
 */
export function fromTemplate(id) {
  const template = document.getElementById(id);
  if (!(template instanceof HTMLTemplateElement)) throw new Error(`there is no template ${id}`);
  return /** @type {DocumentFragment} */ (document.importNode(template.content, true));
}

/**
 * The element that a template marks with ``data-part``.
 *
 * @template {Element} T
 * @param {ParentNode} root
 * @param {string} name
 * @param {new () => T} type
 * @returns {T}
 */
export function part(root, name, type) {
  const found = root.querySelector(`[data-part="${name}"]`);
  if (!(found instanceof type)) throw new Error(`there is no ${type.name} named ${name}`);
  return found;
}

/**
 * A new element with text; markup in it stays text.
 *
 * @template {keyof HTMLElementTagNameMap} N
 * @param {N} tag
 * @param {string} [text]
 * @param {string} [className]
 * @returns {HTMLElementTagNameMap[N]}
 */
export function element(tag, text = "", className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}
