/** Announcements of changes to screen readers. */

import { part } from "./elements.js";

/** Pause between announcements: a fast search would otherwise be read out without end. */
const PAUSE_MS = 1500;

let latest = "";
let timer = 0;

/**
 * Announce `text`; of several within a short time only the last one.
 *
 * @param {string} text
 */
export function announce(text) {
  latest = text;
  if (timer) return;
  say();
  timer = window.setTimeout(() => {
    timer = 0;
    if (latest) announce(latest);
  }, PAUSE_MS);
}

function say() {
  part(document, "live", HTMLElement).textContent = latest;
  latest = "";
}
