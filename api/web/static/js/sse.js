/** The text of a stream of server-sent events, cut into events. */

/** @typedef {{id: string, data: string}} Message */

export class MessageReader {
  #rest = "";

  #lastId = "";

  /**
   * @param {string} text the next piece, cut anywhere
   * @returns {Message[]} those that are whole now
   */
  read(text) {
    this.#rest = (this.#rest + text).replaceAll("\r\n", "\n");
    const blocks = this.#rest.split("\n\n");
    this.#rest = blocks.pop() ?? "";
    return blocks.flatMap((block) => this.#message(block));
  }

  /**
   * @param {string} block
   * @returns {Message[]} none for a comment that only keeps the connection alive
   */
  #message(block) {
    /** @type {Record<string, string[]>} */
    const fields = {};
    for (const line of block.split("\n")) {
      const [, name, value] = /^([^:]*):? ?(.*)$/.exec(line) ?? [];
      if (name) (fields[name] ??= []).push(value);
    }
    if (fields.id) this.#lastId = fields.id[0];
    if (!fields.data) return [];
    return [{ id: this.#lastId, data: fields.data.join("\n") }];
  }
}
