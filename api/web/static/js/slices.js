/** Units: microbatches, or slices of them, with costs of their own (docs/reference/documents.md). */

/** @typedef {import("./types.js").Problem} Problem */
/** @typedef {import("./types.js").Stage} Stage */
/** @typedef {import("./types.js").Offload} Offload */

/** @param {Problem} problem */
export function sliceCount(problem) {
  return problem.slices?.count ?? 1;
}

/**
 * @param {Problem} problem
 * @param {number} unit
 * @returns {string} the number of a microbatch, and that of its slice where there are slices: "2/0"
 */
export function unitName(problem, unit) {
  const count = sliceCount(problem);
  return count === 1 ? String(unit) : `${Math.floor(unit / count)}/${unit % count}`;
}

/**
 * @param {Problem} problem
 * @param {number} stage
 * @param {number} unit
 * @param {"bytes" | "transfer"} name
 */
export function factorOf(problem, stage, unit, name) {
  const count = sliceCount(problem);
  const own = problem.microbatch_factors?.[Math.floor(unit / count)]?.[name] ?? 1;
  const ofSlices = problem.stages[stage].slice_factors ?? problem.slices?.factors;
  return own * (ofSlices?.[name]?.[unit % count] ?? 1);
}

/** Share by which a product of decimals may be too large. */
const ROUNDING = 1e-12;

/**
 * @param {Problem} problem
 * @param {number} s
 * @param {number} unit
 * @returns {Stage & {takenBytes?: number, freedBytes?: number}} the stage with the sizes of a unit, each rounded up. Its
 *   backward takes `takenBytes` at its start, for gradients of keys and values, and frees `freedBytes` at its end.
 */
export function unitStage(problem, s, unit) {
  const stage = problem.stages[s];
  if (!problem.microbatch_factors && !problem.slices) return stage;
  /** @param {number} bytes @param {number} [of] */
  const size = (bytes, of = unit) => Math.ceil(bytes * factorOf(problem, s, of, "bytes") * (1 - ROUNDING));
  /** @param {number | undefined} bytes */
  const given = (bytes) => (bytes === undefined || bytes === null ? bytes : size(bytes));
  /** @param {Offload | null | undefined} copy */
  const moved = (copy) => copy && { ...copy, bytes: size(copy.bytes) };
  const workspaces = Object.entries(stage.workspace_bytes ?? {}).map(([kind, bytes]) => [kind, size(bytes)]);
  const gradient = stage.slice_gradient_bytes ?? 0;
  const count = sliceCount(problem);
  const isLast = unit % count === count - 1;
  const before = Array.from({ length: count - 1 }, (_, k) => size(gradient, unit - 1 - k));
  return {
    ...stage,
    activation_bytes: size(stage.activation_bytes),
    backward_weight_bytes: size(stage.backward_weight_bytes),
    workspace_bytes: Object.fromEntries(workspaces),
    offload: moved(stage.offload),
    modes: stage.modes?.map((mode) => ({
      ...mode,
      kept_bytes: given(mode.kept_bytes),
      forward_workspace_bytes: given(mode.forward_workspace_bytes),
      workspace_bytes: given(mode.workspace_bytes),
      segment_bytes: given(mode.segment_bytes),
      offload: moved(mode.offload),
    })),
    takenBytes: isLast ? before.reduce((sum, bytes) => sum + bytes, 0) : 0,
    freedBytes: isLast ? 0 : size(gradient),
  };
}
