/**
 * Events of jobs as they happen: one stream of all jobs, shared by all tabs with the same key, and the history of one.
 *
 * A browser opens no more than six HTTP/1.1 connections to a server. A stream holds one of them for good, so only one
 * tab reads the stream, the one that holds a Web Lock, and broadcasts what it reads; when it is closed the next tab
 * gets the lock and resumes. Where there are no locks (plain HTTP to another machine) each tab reads by itself, but
 * only while it is visible.
 */

import { ApiError, jobPath, request } from "./api.js";
import { keyHeader, onKeyChange } from "./key.js";
import { FIRST_RETRY_MS, LONGEST_RETRY_MS, pause } from "./retry.js";

/** The server sends something every ten seconds, if only a comment: after so much silence it is gone. */
const LONGEST_SILENCE_MS = 30_000;

/** @typedef {import("./types.js").JobEvent} JobEvent */

/**
 * State of the stream: open, or lost until another try in so many seconds.
 *
 * @typedef {{open: boolean, pauseS: number}} State
 *
 * @typedef {object} Listener
 * @property {(event: JobEvent) => void} onEvent
 * @property {(state: State) => void} onState
 */

/** @typedef {{hello: true} | {event: JobEvent, id: string} | {state: State, id: string}} Message */

/** @type {Set<Listener>} */
const listeners = new Set();

/** @type {Stream | null} */
let stream = null;

/**
 * Listen to the events of all jobs. The listener is told the state of the stream once it is known: whenever it opens,
 * events before it may have been missed.
 *
 * @param {Listener} listener
 * @param {AbortSignal} signal
 */
export function subscribe(listener, signal) {
  listeners.add(listener);
  signal.addEventListener("abort", () => listeners.delete(listener));
  if (stream?.state) listener.onState(stream.state);
  stream ??= new Stream();
}

onKeyChange(() => {
  stream?.end();
  stream = listeners.size ? new Stream() : null;
});

class Stream {
  /** @type {State | null} */
  state = null;
  #lastId = "";
  #leads = false;
  #ending = new AbortController();

  constructor() {
    const name = `optpipe.events ${keyHeader().Authorization ?? ""}`;
    this.channel = new BroadcastChannel(name);
    this.channel.onmessage = ({ data }) => this.#receive(data);
    this.#broadcast({ hello: true });
    this.#lead(name);
  }

  end() {
    this.#ending.abort();
    this.channel.close();
  }

  /** @param {string} name of the lock */
  async #lead(name) {
    const { signal } = this.#ending;
    if (navigator.locks) {
      await navigator.locks.request(name, { signal }, () => this.#read(signal)).catch(() => {}); // ended before its turn
      return;
    }
    while (!signal.aborted) {
      const changed = new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
      if (!document.hidden) {
        const hiding = new AbortController();
        changed.then(() => hiding.abort());
        await this.#read(AbortSignal.any([signal, hiding.signal]));
        if (!document.hidden) return; // refused, until there is another key
      }
      await changed;
    }
  }

  /**
   * Read the stream, again and again where it breaks, until it is ended or refused.
   *
   * @param {AbortSignal} signal
   */
  async #read(signal) {
    this.#leads = true;
    let pauseMs = FIRST_RETRY_MS;
    while (!signal.aborted) {
      try {
        const onOpen = () => this.#announce({ open: true, pauseS: 0 });
        for await (const { id, data } of readMessages("/v1/events", this.#lastId, signal, onOpen)) {
          pauseMs = FIRST_RETRY_MS;
          this.#lastId = id;
          if (data) this.#emit(JSON.parse(data));
        }
      } catch (error) {
        if (signal.aborted) break;
        if (error instanceof ApiError && error.status === 401) break; // until there is another key
        // An id that this server never sent, such as one of a database that was restored: begin anew.
        if (error instanceof ApiError && error.status === 422) this.#lastId = "";
      }
      // Half of the pause is random, so that many pages do not come back at the same instant.
      const waitMs = pauseMs * (0.5 + Math.random() / 2);
      this.#announce({ open: false, pauseS: waitMs / 1000 });
      await pause(waitMs, signal);
      pauseMs = Math.min(LONGEST_RETRY_MS, 2 * pauseMs);
    }
    this.#leads = false;
  }

  /** @param {JobEvent} event that this tab has read */
  #emit(event) {
    this.#broadcast({ event, id: this.#lastId });
    for (const listener of listeners) listener.onEvent(event);
  }

  /** @param {State} state that this tab has seen */
  #announce(state) {
    this.#broadcast({ state, id: this.#lastId });
    this.#setState(state);
  }

  /** @param {Message} message */
  #broadcast(message) {
    if (!this.#ending.signal.aborted) this.channel.postMessage(message);
  }

  /** @param {Message} message of another tab */
  #receive(message) {
    if ("hello" in message) {
      if (this.#leads && this.state) this.#broadcast({ state: this.state, id: this.#lastId });
      return;
    }
    if (this.#leads) return;
    this.#lastId = message.id;
    if ("state" in message) this.#setState(message.state);
    else for (const listener of listeners) listener.onEvent(message.event);
  }

  /** @param {State} state */
  #setState(state) {
    this.state = state;
    for (const listener of listeners) listener.onState(state);
  }
}

/**
 * Events of one job from behind revision `after` up to `until`, which it has reached; throws an ApiError where the
 * stream ends before that.
 *
 * @param {string} id
 * @param {number} after
 * @param {number} until
 * @param {AbortSignal} signal
 * @returns {AsyncGenerator<JobEvent>}
 */
export async function* readHistory(id, after, until, signal) {
  if (after >= until) return;
  const reading = new AbortController();
  const either = AbortSignal.any([signal, reading.signal]);
  try {
    for await (const { data } of readMessages(`${jobPath(id)}/events`, after ? String(after) : "", either, () => {})) {
      if (!data) continue;
      /** @type {JobEvent} */
      const event = JSON.parse(data);
      yield event;
      if (event.revision >= until) return;
    }
    throw new ApiError(0, "The server broke off in the history of this job.");
  } finally {
    reading.abort(); // gives the connection back
  }
}

/** @param {import("./types.js").Status} status */
export function hasEnded(status) {
  return status !== "queued" && status !== "running";
}

/**
 * Messages of a stream of server-sent events; `data` is empty where only the id moves on. `fetch` instead of
 * EventSource, which cannot send a key.
 *
 * @param {string} path
 * @param {string} lastId resume behind it; empty: from the beginning
 * @param {AbortSignal} signal
 * @param {() => void} onOpen
 * @returns {AsyncGenerator<{id: string, data: string}>}
 */
async function* readMessages(path, lastId, signal, onOpen) {
  /** @type {Record<string, string>} */
  const headers = { Accept: "text/event-stream" };
  if (lastId) headers["Last-Event-ID"] = lastId;
  const silence = new AbortController();
  const answer = await request("GET", path, { headers, signal: AbortSignal.any([signal, silence.signal]), asksForKey: false });
  if (answer.status === 204 || !answer.body) return;
  onOpen();
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const timer = setTimeout(() => silence.abort(), LONGEST_SILENCE_MS);
    const { value, done } = await reader.read().finally(() => clearTimeout(timer));
    if (done) return;
    const blocks = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
    rest = blocks.pop() ?? "";
    for (const block of blocks) {
      const fields = readFields(block);
      if (fields.id) lastId = fields.id;
      if (fields.id || fields.data) yield { id: lastId, data: fields.data ?? "" };
    }
  }
}

/**
 * @param {string} block of lines such as ``data: {}``
 * @returns {Record<string, string>}
 */
function readFields(block) {
  /** @type {Record<string, string>} */
  const fields = {};
  for (const line of block.split("\n")) {
    const [, name, value] = /^([^:]*):? ?(.*)$/.exec(line) ?? [];
    if (name) fields[name] = name in fields ? `${fields[name]}\n${value}` : value;
  }
  return fields;
}
