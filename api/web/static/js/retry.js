/** Requests that are sent again where the server did not answer them: no event may come that would cause it. */

import { ApiError } from "./api.js";

export const FIRST_RETRY_MS = 500;
export const LONGEST_RETRY_MS = 15_000;

/**
 * Whether the same request may succeed a little later. What is no ApiError is an answer that broke off.
 *
 * @param {unknown} error
 */
export function maySucceedLater(error) {
  return !(error instanceof ApiError) || error.isTransient;
}

/**
 * @template T
 * @param {() => Promise<T>} send
 * @param {AbortSignal} signal
 * @param {(error: unknown) => void} onError is told of each attempt that failed, if another one follows
 * @returns {Promise<T>} throws what would fail again, and anything once `signal` is aborted
 */
export async function untilAnswered(send, signal, onError) {
  for (let pauseMs = FIRST_RETRY_MS; ; pauseMs = Math.min(LONGEST_RETRY_MS, 2 * pauseMs)) {
    try {
      return await send();
    } catch (error) {
      if (signal.aborted || !maySucceedLater(error)) throw error;
      onError(error);
      await pause(pauseMs, signal);
      if (signal.aborted) throw error;
    }
  }
}

/**
 * @param {number} milliseconds
 * @param {AbortSignal} signal ends it early
 * @returns {Promise<void>}
 */
export function pause(milliseconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      resolve();
    });
  });
}

/** An Idempotency-Key, with which a request that is sent again is one. Unlike randomUUID it is there without TLS too. */
export function randomKey() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
