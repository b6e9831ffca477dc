/** Solver configuration from the form's fields; empty fields take the server's defaults. */

const NUMBERS = /** @type {const} */ (["time_limit_s", "gap", "workers", "seed", "priority"]);

/** @typedef {Record<string, unknown>} Config */

/**
 * @param {HTMLFormElement} form
 * @returns {Config}
 */
export function readConfig(form) {
  /** @type {Config} */
  const config = { method: control(form, "method").value };
  for (const name of NUMBERS) {
    const { value } = control(form, name);
    if (value.trim()) config[name] = numberOrText(value);
  }
  const name = control(form, "name").value.trim();
  if (name) config.name = name;
  const tags = splitTags(control(form, "tags").value);
  if (tags.length) config.tags = tags;
  return config;
}

/**
 * @param {HTMLFormElement} form
 * @param {Config} config
 */
export function fillConfig(form, config) {
  for (const [name, value] of Object.entries(config)) {
    if (form.elements.namedItem(name)) control(form, name).value = Array.isArray(value) ? value.join(", ") : String(value);
  }
}

/**
 * A number where the text is one; otherwise the text itself, so that the server says what is wrong with it.
 *
 * @param {string} text
 */
export function numberOrText(text) {
  const number = Number(text);
  return text.trim() && Number.isFinite(number) ? number : text;
}

/** @param {string} text with commas between the tags */
export function splitTags(text) {
  return text
    .split(",")
    .map((tag) => tag.trim())
    .filter(Boolean);
}

/**
 * @param {HTMLFormElement} form
 * @param {string} name
 */
function control(form, name) {
  const found = form.elements.namedItem(name);
  if (found instanceof HTMLInputElement || found instanceof HTMLSelectElement) return found;
  throw new Error(`the form has no ${name}`);
}
