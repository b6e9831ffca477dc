/** Images filled pixel by pixel: a lane is one row of pixels stretched, a memory strip one column per moment. */

const canvas = document.createElement("canvas");
const context = canvas.getContext("2d", { willReadFrequently: true });

/** @typedef {{pixels: Uint32Array, width: number, height: number, image: ImageData}} Picture */

/**
 * An empty picture.
 *
 * @param {number} width in device pixels
 * @param {number} height in device pixels
 * @returns {Picture}
 */
export function picture(width, height) {
  const image = new ImageData(width, height);
  return { pixels: new Uint32Array(image.data.buffer), width, height, image };
}

/**
 * Hand a picture over for `target.drawImage`; it lasts until the next one.
 *
 * @param {Picture} made
 * @returns {HTMLCanvasElement}
 */
export function asSource({ image, width, height }) {
  if (canvas.width < width) canvas.width = width;
  if (canvas.height < height) canvas.height = height;
  context?.putImageData(image, 0, 0);
  return canvas;
}

/**
 * A colour as a pixel of such a picture.
 *
 * @param {import("../palette.js").Rgb} colour
 */
export function toPixel([red, green, blue]) {
  const byte = (/** @type {number} */ share) => Math.round(255 * share);
  return ((255 << 24) | (byte(blue) << 16) | (byte(green) << 8) | byte(red)) >>> 0;
}
