// A text and the positions of the model in it.
//
// A position is {state, pending}: the state before the pending byte, which is the last one of the text and is read when
// the next one is asked for. It is null where a text begins. Positions never change, so any of them can be returned to.

import { surprise } from "./sampling.js";

const MOST_POSITIONS = 128;

/** The logits of the next byte and the state after the pending one, or null where a text begins. */
export async function predict(model, position) {
  if (position.pending === null) return null;
  position.prediction ??= await model.step(position.pending, position.state);
  return position.prediction;
}

/** The position after one more byte, and the byte's surprise in bits: NaN for the first byte of a text. */
export async function advance(model, position, byte) {
  const prediction = await predict(model, position);
  const bits = prediction === null ? NaN : surprise(prediction.logits, byte);
  // After the end of a text another one begins, with the zero state.
  if (byte === model.endByte) return { bits, position: { state: model.zeroState(), pending: null } };
  return { bits, position: { state: prediction?.state ?? position.state, pending: byte } };
}

/** The text that a model reads: bytes, of which the last ones, the draft, may still be rewritten. */
export class Text {
  #model;
  #draft = []; // bytes
  #marks = []; // [{length, position}] within the draft, ascending
  #spacing = 16;

  constructor(model, position) {
    this.#model = model;
    this.position = position;
    this.length = 0;
    this.#begin();
  }

  #begin() {
    this.#draft = [];
    this.#marks = [{ length: 0, position: this.position }];
    this.#spacing = 16;
  }

  /** Number of bytes before the draft. */
  get kept() {
    return this.length - this.#draft.length;
  }

  /** Make the draft a part of the text that stays. */
  keep() {
    this.#begin();
  }

  /** Append a byte to the draft and return its surprise. */
  async append(byte) {
    const { bits, position } = await advance(this.#model, this.position, byte);
    this.position = position;
    this.#draft.push(byte);
    this.length += 1;
    if (this.#draft.length % this.#spacing === 0) this.#mark();
    return bits;
  }

  #mark() {
    this.#marks.push({ length: this.#draft.length, position: this.position });
    if (this.#marks.length > MOST_POSITIONS) {
      this.#spacing *= 2;
      this.#marks = this.#marks.filter(({ length }) => length % this.#spacing === 0);
    }
  }

  /** Go back to the last known position at which the draft is a prefix of `bytes`; return the draft's length there. */
  rewind(bytes) {
    let common = 0;
    while (common < bytes.length && common < this.#draft.length && bytes[common] === this.#draft[common]) common++;
    if (common === this.#draft.length) return common;
    this.#marks = this.#marks.filter(({ length }) => length <= common);
    const { length, position } = this.#marks.at(-1);
    this.length -= this.#draft.length - length;
    this.#draft.length = length;
    this.position = position;
    return length;
  }
}
