/** A problem as text that people can read: one device or stage a line. */

const LINE_FIELDS = new Set(["devices", "stages"]);

/** @param {unknown} problem */
export function problemText(problem) {
  if (typeof problem !== "object" || problem === null || Array.isArray(problem)) return JSON.stringify(problem, null, 2);
  const lines = Object.entries(problem).map(([name, value]) => `  ${JSON.stringify(name)}: ${fieldText(name, value)}`);
  return `{\n${lines.join(",\n")}\n}\n`;
}

/**
 * @param {string} name
 * @param {unknown} value
 */
function fieldText(name, value) {
  if (!LINE_FIELDS.has(name) || !Array.isArray(value)) return onOneLine(value);
  return `[\n${value.map((entry) => `    ${onOneLine(entry)}`).join(",\n")}\n  ]`;
}

/**
 * @param {unknown} value
 * @returns {string}
 */
function onOneLine(value) {
  if (Array.isArray(value)) return `[${value.map(onOneLine).join(", ")}]`;
  if (typeof value !== "object" || value === null) return JSON.stringify(value) ?? "null";
  const fields = Object.entries(value).map(([name, field]) => `${JSON.stringify(name)}: ${onOneLine(field)}`);
  return `{${fields.join(", ")}}`;
}
