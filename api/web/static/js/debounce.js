/** Debounced work: of several calls within a short time only the last one runs. */

/**
 * @param {(signal: AbortSignal) => Promise<void>} work is told when a later call makes it useless
 * @param {number} pauseMs
 * @returns {{run: () => void, stop: () => void}}
 */
export function afterPause(work, pauseMs) {
  let timer = 0;
  let running = new AbortController();
  const stop = () => {
    clearTimeout(timer);
    running.abort();
  };
  const run = () => {
    stop();
    running = new AbortController();
    const { signal } = running;
    timer = window.setTimeout(() => work(signal), pauseMs);
  };
  return { run, stop };
}
