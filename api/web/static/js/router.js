/** Which view the address names, such as ``#/jobs/ID`` or ``#/compare?ids=ID,ID``. */

import { element, part } from "./elements.js";

/**
 * A view fills its place and returns what ends it.
 *
 * @typedef {(place: HTMLElement, route: Route) => () => void} View
 *
 * @typedef {object} Route
 * @property {string} name
 * @property {string} argument what follows the name
 * @property {URLSearchParams} query
 */

const FIRST = "jobs";

/**
 * @param {string} hash
 * @returns {Route}
 */
export function parseRoute(hash) {
  const [path, query = ""] = hash.replace(/^#?\/?/, "").split("?");
  const [name, argument = ""] = path.split("/");
  return { name: name || FIRST, argument: decoded(argument), query: new URLSearchParams(query) };
}

/** @param {string} text perhaps typed by hand, and then perhaps none that can be decoded */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/**
 * Show the view of the address now, and of each one that follows.
 *
 * @param {Record<string, View>} views by name
 */
export function startRouter(views) {
  const place = part(document, "view", HTMLElement);
  /** @type {() => void} */
  let end = () => {};
  /** @param {boolean} moved whether the reader has gone there, and should be taken to its beginning */
  const show = (moved) => {
    const route = parseRoute(location.hash);
    const name = route.name === "jobs" && route.argument ? "job" : route.name;
    end();
    // What a view that has ended still does happens on an element that nobody sees.
    const view = element("div", "", "view");
    place.replaceChildren(view);
    end = (Object.hasOwn(views, name) ? views[name] : views[FIRST])(view, route);
    markLink(Object.hasOwn(views, name) ? route.name : FIRST);
    const heading = view.querySelector("h1");
    document.title = `${heading?.textContent || "OptPipe"} · OptPipe`;
    if (!moved) return;
    window.scrollTo(0, 0);
    heading?.focus();
  };
  window.addEventListener("hashchange", () => show(true));
  // The address names a view, and so cannot name a place on it.
  part(document, "skip", HTMLAnchorElement).addEventListener("click", (event) => {
    event.preventDefault();
    place.focus();
  });
  show(false);
}

/** @param {string} name */
function markLink(name) {
  for (const link of document.querySelectorAll("[data-route]")) {
    if (link.getAttribute("data-route") === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}
