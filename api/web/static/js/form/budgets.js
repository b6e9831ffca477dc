/** Memory budgets of a problem, all raised or lowered by one factor. */

/** @typedef {import("../types.js").Problem} Problem */
/** @typedef {(number | null | undefined)[]} Budgets one for each device; null or undefined: no limit */

/**
 * @param {Problem} problem
 * @returns {Budgets}
 */
export function budgetsOf(problem) {
  return Array.isArray(problem.devices) ? problem.devices.map((device) => device?.memory_bytes) : [];
}

/**
 * @param {Problem} problem changed in place
 * @param {Budgets} budgets at factor 1
 * @param {number} factor
 */
export function scaleBudgets(problem, budgets, factor) {
  problem.devices.forEach((device, index) => {
    const budget = budgets[index];
    if (typeof budget === "number") device.memory_bytes = Math.floor(budget * factor);
  });
}

/** @param {Budgets} budgets */
export function hasLimits(budgets) {
  return budgets.some((budget) => typeof budget === "number");
}
