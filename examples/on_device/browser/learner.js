// The learner in WebAssembly: memory of fixed size, nothing is sent anywhere.

const MESSAGES = [
  "",
  "The file is damaged or belongs to another learner.",
  "Nothing was read since the beginning of the text.",
  "The loss is NaN or infinite; the byte was left out.",
];

export class Learner {
  #exports;

  constructor(exports, weights) {
    this.#exports = exports;
    exports._initialize?.();
    this.memoryBytes = exports.memory_size();
    if (weights.length !== exports.weights_size()) throw new Error("learner.weights does not belong to learner.wasm.");
    this.#bytes(exports.weights_address(), weights.length).set(weights);
    this.begin();
  }

  /** A learner of the content of learner.wasm and learner.weights, both Uint8Array. */
  static async create(program, weights) {
    const { instance } = await WebAssembly.instantiate(program, {});
    return new Learner(instance.exports, weights);
  }

  #bytes(address, length) {
    return new Uint8Array(this.#exports.memory.buffer, address, length);
  }

  #check(outcome) {
    if (outcome !== 0) throw new Error(MESSAGES[outcome] ?? `error ${outcome}`);
  }

  /** Forget everything. */
  begin() {
    this.#check(this.#exports.begin());
  }

  /** Read a byte and learn from it: the bits that it cost before; 0 for the first byte. */
  learn(byte) {
    this.#check(this.#exports.learn(byte));
    const nats = new Float32Array(this.#exports.memory.buffer, this.#exports.nats_address(), 1)[0];
    return nats / Math.LN2;
  }

  /** The likeliest next bytes, most likely first. */
  suggestions(count) {
    this.#check(this.#exports.predict());
    const logits = new Float32Array(this.#exports.memory.buffer, this.#exports.logits_address(), 256);
    const order = Array.from(logits.keys()).sort((a, b) => logits[b] - logits[a]);
    return order.slice(0, count);
  }

  /** Everything that was learned, as a file. */
  save() {
    this.#exports.save();
    return this.#bytes(this.#exports.saved_address(), this.#exports.saved_size()).slice();
  }

  /** Continue from such a file. Throws an Error if it is damaged or of another learner; then nothing changes. */
  load(content) {
    if (content.length !== this.#exports.saved_size()) throw new Error(MESSAGES[1]);
    this.#bytes(this.#exports.saved_address(), content.length).set(content);
    this.#check(this.#exports.load());
  }
}
