// The learner in a thread of its own.

import { Learner } from "./learner.js";

const WINDOW = 1000; // bytes of a point of the chart
const SLICE = 2048; // bytes between two reports

let learner;
let bytes = 0;
let bits = 0;
let points = [];
let sum = 0;
let stopped = false;

function report(state) {
  const suggestions = bytes > 0 && state !== "busy" ? suggested() : [];
  postMessage({ kind: state, bytes, bits, points, suggestions, memoryBytes: learner.memoryBytes });
}

function suggested() {
  try {
    return learner.suggestions(5);
  } catch {
    return []; // after the byte that ends a text
  }
}

async function fetchFile(name) {
  const response = await fetch(name, { cache: "no-cache" });
  if (!response.ok) throw new Error(`${name} is missing: run \`python prepare.py\` in this folder, then reload.`);
  return new Uint8Array(await response.arrayBuffer());
}

async function read(content) {
  stopped = false;
  for (let begin = 0; begin < content.length && !stopped; begin += SLICE) {
    for (const byte of content.subarray(begin, begin + SLICE)) {
      const cost = learner.learn(byte);
      bits += cost;
      sum += cost;
      bytes += 1;
      if (bytes % WINDOW === 0) {
        points.push(sum / WINDOW);
        sum = 0;
      }
    }
    if (begin + SLICE < content.length) report("busy");
    await new Promise((resolve) => setTimeout(resolve)); // hear of "stop"
  }
  report("ready");
}

function forget() {
  bytes = 0;
  bits = 0;
  sum = 0;
  points = [];
}

const actions = {
  read: ({ content }) => read(content),
  stop: () => {
    stopped = true;
  },
  begin: () => {
    learner.begin();
    forget();
    report("ready");
  },
  save: () => postMessage({ kind: "saved", content: learner.save() }),
  load: ({ content }) => {
    learner.load(content);
    forget();
    report("ready");
  },
};

let last = fetchFile("learner.wasm")
  .then(async (program) => {
    learner = await Learner.create(program, await fetchFile("learner.weights"));
    report("ready");
  })
  .catch((error) => postMessage({ kind: "failed", message: error.message }));

addEventListener("message", ({ data }) => {
  if (data.action === "stop") return actions.stop();
  last = last
    .then(() => learner && actions[data.action](data))
    .catch((error) => postMessage({ kind: "error", message: error.message }));
});
