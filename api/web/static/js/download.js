/** Downloads of a job's schedule. They are fetched, because a plain link cannot send the key. */

import { jobPath, request } from "./api.js";
import { element } from "./elements.js";

/** Values of ``?format=`` (empty: the schedule itself) and file name endings, by the name of the button. */
export const FORMATS = /** @type {const} */ ({
  json: { format: "", ending: "schedule.json" },
  "torch-csv": { format: "torch-csv", ending: "torch.csv" },
  "chrome-trace": { format: "chrome-trace", ending: "trace.json" },
  svg: { format: "svg", ending: "svg" },
  png: { format: "png", ending: "png" },
});

/**
 * @param {import("./types.js").Job} job
 * @param {keyof typeof FORMATS} name
 * @param {boolean} offloads whether the schedule has offloads, which torch's own runtime does not know
 */
export async function download(job, name, offloads) {
  const { format, ending } = FORMATS[name];
  const query = new URLSearchParams(format && { format });
  if (name === "torch-csv" && offloads) query.set("drop_offload", "true");
  const answer = await request("GET", `${jobPath(job.id)}/schedule?${query}`);
  const url = URL.createObjectURL(await answer.blob());
  const link = element("a");
  link.href = url;
  link.download = `${fileStem(job)}.${ending}`;
  link.click();
  // The browser reads the file after this turn; a minute is enough to begin.
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

/** @param {import("./types.js").Job} job */
function fileStem(job) {
  const plain = job.name.replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[-.]+|[-.]+$/g, "");
  return plain.slice(0, 80) || `schedule-${job.id.slice(0, 8)}`;
}
