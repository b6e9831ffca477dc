/** What happens to a job, as it happens: a stream that finds its way back after an interruption. */

import { ApiError, jobPath, request } from "./api.js";
import { MessageReader } from "./sse.js";

const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 15_000;
/** The server says something every ten seconds, if only that it is there: after so much silence it is not. */
const LONGEST_SILENCE_MS = 30_000;

/**
 * @typedef {object} Listener
 * @property {(event: import("./types.js").JobEvent) => void} onEvent
 * @property {() => void} onOpen the stream is there (again)
 * @property {(pauseS: number) => void} onLost it broke; another try follows in so many seconds
 * @property {(error: ApiError) => void} onRefused the server will not give it: there is no other try
 */

/**
 * How far a job was followed: the id of the last event (none: from the first on), and a revision that it is known to
 * have reached. A job that was solved again has ended before; only an end from `known` on is its end.
 *
 * @typedef {{lastId: string, known: number}} Position
 */

/**
 * Follow a job until it has ended. `fetch` instead of EventSource, which cannot send a key.
 *
 * @param {string} id
 * @param {Position} position kept up to date
 * @param {Listener} listener
 * @param {AbortSignal} signal ends it
 */
export async function follow(id, position, listener, signal) {
  let pauseMs = FIRST_PAUSE_MS;
  while (!signal.aborted) {
    try {
      const ended = await readStream(id, position, signal, listener, () => {
        pauseMs = FIRST_PAUSE_MS;
      });
      if (ended) return;
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof ApiError && isFinal(error.status)) {
        listener.onRefused(error);
        return;
      }
    }
    // Half of the pause is drawn by chance, so that many pages do not come back at the same instant.
    const waitMs = pauseMs * (0.5 + Math.random() / 2);
    listener.onLost(waitMs / 1000);
    await pause(waitMs, signal);
    pauseMs = Math.min(LONGEST_PAUSE_MS, 2 * pauseMs);
  }
}

/** @param {number} status */
function isFinal(status) {
  return status >= 400 && status < 500 && status !== 408 && status !== 429;
}

/**
 * @param {string} id
 * @param {Position} position
 * @param {AbortSignal} signal
 * @param {Listener} listener
 * @param {() => void} onProgress
 * @returns {Promise<boolean>} whether the job has ended
 */
async function readStream(id, position, signal, listener, onProgress) {
  /** @type {Record<string, string>} */
  const headers = { Accept: "text/event-stream" };
  if (position.lastId) headers["Last-Event-ID"] = position.lastId;
  const silence = new AbortController();
  const whole = AbortSignal.any([signal, silence.signal]);
  const answer = await request("GET", `${jobPath(id)}/events`, { headers, signal: whole });
  if (answer.status === 204) return true;
  if (!answer.body) throw new ApiError(0, "The server's answer has no body.");
  listener.onOpen();
  const messages = new MessageReader();
  const stream = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const timer = setTimeout(() => silence.abort(), LONGEST_SILENCE_MS);
    const { value, done } = await stream.read().finally(() => clearTimeout(timer));
    if (done) return false;
    onProgress();
    for (const message of messages.read(value)) {
      position.lastId = message.id;
      const event = /** @type {import("./types.js").JobEvent} */ (JSON.parse(message.data));
      listener.onEvent(event);
      if (event.kind === "status" && hasEnded(event.status) && event.revision >= position.known) return true;
    }
  }
}

/** @param {import("./types.js").Status} status */
export function hasEnded(status) {
  return status !== "queued" && status !== "running";
}

/**
 * @param {number} milliseconds
 * @param {AbortSignal} signal
 * @returns {Promise<void>}
 */
function pause(milliseconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      resolve();
    });
  });
}
