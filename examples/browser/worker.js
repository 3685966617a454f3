// The model in a thread of its own, so that the page stays responsive while it reads or generates.
//
// Messages in:  {type: "draft", bytes}, {type: "read", bytes}, {type: "generate", count, temperature, seed},
//               {type: "stop"}, {type: "reset"}, {type: "save"}, {type: "load", file, name}.
// Messages out: {type: "ready", …}, {type: "bytes", start, bytes, bits, generated}, {type: "progress", done, total},
//               {type: "begun", note}, {type: "saved", file}, {type: "error", message, fatal}, and
//               {type: "idle", note, received} when all of the received messages have been dealt with.

import { loadModel } from "./model.js";
import { predict, Text } from "./reader.js";
import { chooseByte, seededRandom } from "./sampling.js";
import { decodeState, encodeState } from "./state_file.js";

const SLICE = 40; // milliseconds between two looks at the messages
let model, text;
let tasks = [];
let running = null; // the task at work
let stopped = false;
let received = 0;

const { port1, port2 } = new MessageChannel();
const otherEvents = () => new Promise((resolve) => ((port1.onmessage = resolve), port2.postMessage(null)));

/** Collects bytes and their surprise, and sends them to the page a slice at a time. */
class Slices {
  constructor(total, generated) {
    Object.assign(this, {
      total,
      generated,
      done: 0,
      bytes: [],
      bits: [],
      since: performance.now(),
      start: text.length,
    });
  }

  /** Resolves to false when the task is to end. */
  async add(byte, bits) {
    this.bytes.push(byte);
    this.bits.push(bits);
    this.done += 1;
    if (performance.now() - this.since < SLICE) return true;
    this.send();
    await otherEvents();
    return !stopped;
  }

  send() {
    const [bytes, bits] = [Uint8Array.from(this.bytes), Float32Array.from(this.bits)];
    postMessage({ type: "bytes", start: this.start, bytes, bits, generated: this.generated });
    postMessage({ type: "progress", done: this.done, total: this.total });
    Object.assign(this, { start: this.start + bytes.length, bytes: [], bits: [], since: performance.now() });
  }
}

async function readAll(bytes) {
  const slices = new Slices(bytes.length, false);
  try {
    for (const byte of bytes) if (!(await slices.add(byte, await text.append(byte)))) break;
  } finally {
    slices.send();
  }
}

const handlers = {
  async draft({ bytes }) {
    await readAll(bytes.subarray(text.rewind(bytes)));
  },

  async read({ bytes }) {
    text.keep();
    await readAll(bytes);
    text.keep();
  },

  async generate({ count, temperature, seed }) {
    text.keep();
    const random = seededRandom(seed);
    const slices = new Slices(count, true);
    let note = "";
    try {
      while (slices.done < count) {
        const prediction = await predict(model, text.position);
        if (prediction === null) return "Nothing to continue yet: write at least one byte first.";
        const byte = chooseByte(prediction.logits, temperature, random);
        const goesOn = await slices.add(byte, await text.append(byte));
        if (byte === model.endByte) note = "The model ended the text; what follows begins a new one.";
        if (note || !goesOn) break;
      }
    } finally {
      slices.send();
      text.keep();
    }
    return note;
  },

  reset() {
    begin({ state: model.zeroState(), pending: null }, "");
  },

  save() {
    const { state, pending } = text.position;
    const arrays = Object.fromEntries(Object.entries(state).map(([name, tensor]) => [name, tensor.data]));
    postMessage({ type: "saved", file: encodeState(arrays, pending, model.specification) });
  },

  load({ file, name }) {
    const { state, pending } = decodeState(file, model.specification);
    begin({ state: model.tensors(state), pending }, name);
  },
};

function begin(position, note) {
  text = new Text(model, position);
  postMessage({ type: "begun", note });
}

async function work() {
  let note = "";
  while (tasks.length) {
    running = tasks.shift();
    stopped = false;
    try {
      note = (await handlers[running.type](running)) ?? "";
    } catch (error) {
      note = null; // the error stays in sight
      postMessage({ type: "error", message: error.message });
    }
  }
  running = null;
  postMessage({ type: "idle", note, received });
}

onmessage = ({ data }) => {
  received += 1;
  if (data.type === "stop") {
    stopped = true;
    tasks = [];
    if (!running) work();
    return;
  }
  if (data.type === "draft") {
    // Of drafts that follow each other only the newest counts.
    if (tasks.at(-1)?.type === "draft") tasks.pop();
    else if (!tasks.length && running?.type === "draft") stopped = true;
  }
  if (data.type === "reset" || data.type === "load") {
    tasks = [];
    stopped = true;
  }
  tasks.push(data);
  if (!running) work();
};

try {
  model = await loadModel();
  const { model_type: family, weights, weights_hash: hash } = model.specification;
  postMessage({ type: "ready", family, weights, hash, stateBytes: model.stateBytes });
  handlers.reset();
} catch (error) {
  postMessage({ type: "error", message: error.message, fatal: true });
}
