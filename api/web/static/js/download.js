/** Downloads. They are fetched, because a plain link cannot send the key. */

import { announce } from "./announce.js";
import { jobPath, planPath, request } from "./api.js";
import { element, part } from "./elements.js";
import { keyHeader } from "./key.js";

/**
 * Download the schedule in the format of a button: without `data-format` the document itself.
 *
 * @param {import("./types.js").Job} job
 * @param {HTMLButtonElement} button
 * @param {boolean} offloads whether the schedule has offloads, which some formats cannot hold
 * @param {string} strategy of a plan, such as ``tp=8,pp=4``; empty: the job is no plan
 */
export async function download(job, button, offloads, strategy = "") {
  const { format, ending, dropsOffload } = button.dataset;
  const query = new URLSearchParams(format && { format });
  if (dropsOffload !== undefined && offloads) query.set("drop_offload", "true");
  if (strategy) query.set("strategy", strategy);
  await save(`${strategy ? planPath(job.id) : jobPath(job.id)}/schedule?${query}`, `${fileStem(job)}.${ending}`);
}

/**
 * @param {string} path on the server
 * @param {string} fileName
 */
export async function save(path, fileName) {
  const answer = await request("GET", path);
  const url = URL.createObjectURL(await answer.blob());
  const link = element("a");
  link.href = url;
  link.download = fileName;
  link.click();
  // The browser reads the file after this turn; a minute is enough to begin.
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

/** Have the link to the description of the HTTP interface send the key, where there is one. */
export function startDescription() {
  const link = part(document, "description", HTMLAnchorElement);
  link.addEventListener("click", (event) => {
    if (!("Authorization" in keyHeader())) return;
    event.preventDefault();
    save("/openapi.json", "openapi.json").catch((error) => announce(String(error)));
  });
}

/** @param {import("./types.js").Job} job */
function fileStem(job) {
  const plain = job.name.replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[-.]+|[-.]+$/g, "");
  return plain.slice(0, 80) || `schedule-${job.id.slice(0, 8)}`;
}
