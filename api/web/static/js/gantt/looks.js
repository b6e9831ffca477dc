/** Colours by kind of op and stage, computed once so that drawing only indexes them. */

import { KINDS } from "../kinds.js";
import { inkOn, opColour } from "../palette.js";
import { lookIndex } from "./model.js";
import { toPixel } from "./pixels.js";

/**
 * @typedef {object} Looks
 * @property {Uint32Array} pixels colour by look
 * @property {string[]} ink colour of what is written on it, by look
 */

/**
 * @param {import("../palette.js").Theme} theme
 * @param {number} stages on the device whose looks these are
 * @returns {Looks}
 */
function looksFor(theme, stages) {
  /** @type {Looks} */
  const looks = { pixels: new Uint32Array(lookIndex("F", Math.max(1, stages))), ink: [] };
  for (let rank = 0; rank < Math.max(1, stages); rank += 1) {
    for (const kind of KINDS) {
      const colour = opColour(theme, kind, rank, stages);
      looks.pixels[lookIndex(kind, rank)] = toPixel(colour);
      looks.ink[lookIndex(kind, rank)] = inkOn(colour);
    }
  }
  return looks;
}

/**
 * The looks of each device: devices with equally many stages share theirs.
 *
 * @param {import("./model.js").Model} model
 * @param {import("../palette.js").Theme} theme
 * @returns {Looks[]}
 */
export function buildLooks(model, theme) {
  /** @type {Map<number, Looks>} */
  const byStages = new Map();
  return model.devices.map(({ stages }) => {
    const looks = byStages.get(stages.length) ?? looksFor(theme, stages.length);
    byStages.set(stages.length, looks);
    return looks;
  });
}
