// A text as the page shows it: its bytes, the bits of each, and where they come from.

export const READ = 0, GENERATED = 1, LEARNED = 2;

/** Upper ends of the classes of surprise, in bits; the last class has none. */
export const LEVELS = [0.5, 1, 2, 3, 4, 6, 8, 12];

const MOST_BINS = 256, LEAST_WIDTH = 32; // of the curve
const decoder = new TextDecoder("utf-8", { fatal: true });

export class Transcript {
  constructor(bytes = [], bits = [], kinds = []) {
    Object.assign(this, { bytes, bits, kinds });
  }

  get length() {
    return this.bytes.length;
  }

  copy() {
    return new Transcript(this.bytes.slice(), this.bits.slice(), this.kinds.slice());
  }

  /** Append bytes; `bits` is null where nothing was predicted. */
  add(bytes, bits, kind) {
    for (let place = 0; place < bytes.length; place++) {
      this.bytes.push(bytes[place]);
      this.bits.push(bits[place]);
      this.kinds.push(kind);
    }
  }

  /** Mean over all predicted bytes; null if there are none. */
  bitsPerByte() {
    const known = this.bits.filter((value) => value !== null);
    return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
  }

  /** Characters from a position on, as {character, begin, end}; character is null for a byte that is not UTF-8. */
  *characters(begin) {
    while (begin > 0 && (this.bytes[begin] & 0xc0) === 0x80) begin--;
    while (begin < this.length) {
      const lead = this.bytes[begin];
      let end = begin + (lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : lead >= 0xc0 ? 2 : 1);
      let character = null;
      try {
        character = decoder.decode(Uint8Array.from(this.bytes.slice(begin, end)));
      } catch {
        end = begin + 1;
      }
      yield { character, begin, end };
      begin = end;
    }
  }

  /** Mean bits along the text, as {x, mean, learned}, with x from 0 to 1. */
  curve() {
    let width = LEAST_WIDTH;
    while (this.length > width * MOST_BINS) width *= 2;
    const points = [];
    for (let begin = 0; begin < this.length; begin += width) {
      const end = Math.min(begin + width, this.length);
      const known = this.bits.slice(begin, end).filter((value) => value !== null);
      if (known.length) {
        const mean = known.reduce((sum, value) => sum + value, 0) / known.length;
        points.push({ x: (begin + end) / 2 / this.length, mean, learned: this.kinds[begin] === LEARNED });
      }
    }
    return points;
  }
}
