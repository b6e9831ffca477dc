/** Colour theme: that of the system, or dark or light as chosen here. */

import { part } from "./elements.js";

const STORED = "optpipe.theme";
const THEMES = /** @type {const} */ (["auto", "light", "dark"]);
const system = matchMedia("(prefers-color-scheme: dark)");

/** @type {Set<() => void>} */
const listeners = new Set();

/**
 * Call `listener` whenever colours may have changed; the answer ends that.
 *
 * @param {() => void} listener
 * @returns {() => void}
 */
export function onThemeChange(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** Apply the stored choice and listen to the button that changes it. */
export function startTheme() {
  const button = part(document, "theme", HTMLButtonElement);
  apply(button, localStorage.getItem(STORED) ?? "auto");
  button.addEventListener("click", () => {
    const now = THEMES.findIndex((theme) => theme === document.documentElement.dataset.theme);
    apply(button, THEMES[(now + 1) % THEMES.length]);
  });
  system.addEventListener("change", tell);
}

/**
 * @param {HTMLButtonElement} button
 * @param {string} theme
 */
function apply(button, theme) {
  document.documentElement.dataset.theme = theme;
  localStorage.setItem(STORED, theme);
  button.textContent = `Theme: ${theme}`;
  tell();
}

function tell() {
  for (const listener of listeners) listener();
}
