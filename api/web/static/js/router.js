/** Views by address, such as ``#/jobs/ID`` or ``#/compare?ids=ID,ID``. */

import { element, part } from "./elements.js";

/**
 * A view fills its root element and returns the function that ends it.
 *
 * @typedef {(root: HTMLElement, route: Route) => () => void} View
 *
 * @typedef {object} Route
 * @property {string} name
 * @property {string} argument the path after the name
 * @property {URLSearchParams} query
 */

const FIRST = "plan";

/**
 * @param {string} hash
 * @returns {Route}
 */
export function parseRoute(hash) {
  const [path, query = ""] = hash.replace(/^#?\/?/, "").split("?");
  const [name, argument = ""] = path.split("/");
  return { name: name || FIRST, argument: decoded(argument), query: new URLSearchParams(query) };
}

/** @param {string} text perhaps typed by hand, and so perhaps not decodable */
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
  const main = part(document, "view", HTMLElement);
  /** @type {() => void} */
  let end = () => {};
  /** @param {boolean} moved false for the first view of the page, which must not take the focus */
  const show = (moved) => {
    const route = parseRoute(location.hash);
    const name = route.name === "jobs" && route.argument ? "job" : route.name;
    end();
    // A view that has ended may still have requests under way: their results go to an element that is gone.
    const view = element("div", "", "view");
    main.replaceChildren(view);
    end = (Object.hasOwn(views, name) ? views[name] : views[FIRST])(view, route);
    markLink(Object.hasOwn(views, name) ? route.name : FIRST);
    if (!Object.hasOwn(views, name)) view.prepend(element("p", `There is nothing at ${location.hash}: this is the plan.`, "notice"));
    const heading = view.querySelector("h1");
    document.title = `${heading?.textContent || "OptPipe"} · OptPipe`;
    if (!moved) return;
    window.scrollTo(0, 0);
    heading?.focus();
  };
  window.addEventListener("hashchange", () => show(true));
  // The fragment of the address names a view, so the skip link cannot use one.
  part(document, "skip", HTMLAnchorElement).addEventListener("click", (event) => {
    event.preventDefault();
    main.focus();
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
