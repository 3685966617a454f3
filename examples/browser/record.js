// All bytes of the text with their surprise, and sums of it over any part.

export class Record {
  constructor() {
    this.length = 0;
    this.bytes = new Uint8Array(1 << 12);
    this.bits = new Float32Array(1 << 12);
    this.generated = new Uint8Array(1 << 12); // 1 where the model wrote the byte
    this.sums = new Float64Array(1 + (1 << 12)); // bits before each byte
    this.counts = new Float64Array(1 + (1 << 12)); // predicted bytes before each byte
  }

  /** Cut the text at `start` and append bytes. */
  append(start, bytes, bits, generated) {
    this.length = start + bytes.length;
    if (this.length > this.bytes.length) this.#grow();
    this.bytes.set(bytes, start);
    this.bits.set(bits, start);
    this.generated.fill(generated ? 1 : 0, start, this.length);
    for (let at = start; at < this.length; at++) {
      const predicted = !Number.isNaN(this.bits[at]);
      this.sums[at + 1] = this.sums[at] + (predicted ? this.bits[at] : 0);
      this.counts[at + 1] = this.counts[at] + (predicted ? 1 : 0);
    }
  }

  #grow() {
    for (const name of ["bytes", "bits", "generated", "sums", "counts"]) {
      const larger = new this[name].constructor(2 * this.length);
      larger.set(this[name]);
      this[name] = larger;
    }
  }

  /** Mean surprise of bytes [begin, end), or NaN where none was predicted. */
  mean(begin, end) {
    return (this.sums[end] - this.sums[begin]) / (this.counts[end] - this.counts[begin]);
  }

  /** Number of bytes that were predicted: all but the first of each text. */
  get predicted() {
    return this.counts[this.length];
  }
}
