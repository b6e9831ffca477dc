/** Says in words, for those who do not see the page, what has changed on it. */

import { part } from "./elements.js";

/** Between two announcements, so that a quick search does not talk without end. */
const PAUSE_MS = 1500;

let latest = "";
let timer = 0;

/**
 * Announce `text`; of several within a short time the last one is heard.
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
