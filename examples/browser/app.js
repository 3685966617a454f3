// The page: buttons and fields on one side, the worker with the model on the other.

import { drawChart } from "./chart.js";
import { Record } from "./record.js";
import { describeBytes, LEVELS, TextView } from "./text_view.js";

const find = (id) => document.getElementById(id);
const number = (value) => value.toLocaleString("en");
const size = (bytes) => (bytes < 1000 ? `${bytes} bytes` : `${(bytes / 1000).toFixed(1)} kB`);

const CONTROLS = ["draft", "file", "continue", "reset", "save", "load"];
const LONG_PASTE = 10_000; // characters; a text field becomes slow with many more
export const record = new Record();
const view = new TextView(find("text"), record, point);
const worker = new Worker("worker.js", { type: "module" });
let asked = 0; // messages to the worker
let busySince = null;
let pointedByKeys = null;
let changedFrom = Infinity; // first byte that is not drawn as it is

const handlers = {
  ready({ family, weights, hash, stateBytes }) {
    for (const id of CONTROLS) find(id).disabled = false;
    const stored = weights ? `, ${weights} weights` : "";
    find("model").textContent = `Model: ${family}${stored}, SHA-256 ${hash.slice(0, 12)}…`;
    find("state-size").textContent = `${size(stateBytes)} for any length of text`;
    say("Ready.");
  },

  bytes({ start, bytes, bits, generated }) {
    record.append(start, bytes, bits, generated);
    show(start);
  },

  progress({ done, total }) {
    find("progress").hidden = total <= 200;
    if (total <= 200) return;
    const seconds = (performance.now() - busySince) / 1000;
    const speed = seconds > 0.5 ? `, ${number(Math.round(done / seconds))} bytes/s` : "";
    say(`${number(done)} of ${number(total)} bytes${speed}`, "busy");
    find("progress").value = done / total;
  },

  begun({ note }) {
    record.append(0, [], [], false);
    find("begin").textContent = note ? `Continues from ${note}.` : "";
    find("draft").value = "";
    show(0);
    say(note ? `Loaded ${note}; write or press Continue.` : "Ready.");
  },

  saved({ file }) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([file], { type: "application/octet-stream" }));
    link.download = "state.safetensors";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
    say(`Saved ${size(file.length)} as state.safetensors.`);
  },

  idle({ note, received }) {
    if (received < asked) return; // more is on its way
    busySince = null;
    find("stop").disabled = true;
    find("progress").hidden = true;
    if (note) say(note);
    else if (note === "" && find("status").dataset.kind === "busy") say("Ready.");
  },

  error({ message, fatal }) {
    say(message, "error");
    if (fatal) find("model").textContent = "No model.";
  },
};

function say(message, kind = "") {
  find("status").textContent = message;
  find("status").dataset.kind = kind;
}

function ask(message) {
  if (["draft", "read", "generate"].includes(message.type)) {
    busySince ??= performance.now();
    find("stop").disabled = false;
  }
  asked += 1;
  worker.postMessage(message);
}

/** Draw the text from byte `start` on and its measures, once for a frame. */
function show(start) {
  const waiting = changedFrom < Infinity;
  changedFrom = Math.min(changedFrom, start);
  if (waiting) return;
  requestAnimationFrame(() => {
    view.update(changedFrom);
    changedFrom = Infinity;
    const mean = record.mean(0, record.length);
    find("bits").textContent = Number.isNaN(mean) ? "–" : mean.toFixed(3);
    find("length").textContent = number(record.length);
    find("predicted").textContent = `over ${number(record.predicted)} predicted bytes`;
    find("empty").hidden = record.length > 0;
    drawChart(find("line"), record);
  });
}

/** Show the bytes of a character near it: of the one under the pointer, else of the one that the keyboard chose. */
function point(span, byKeys) {
  if (byKeys) pointedByKeys = span;
  const shown = span ?? (pointedByKeys?.isConnected ? pointedByKeys : null);
  const tip = find("tip");
  tip.hidden = !shown || !inSight(shown);
  if (tip.hidden) return;
  const lines = describeBytes(record, Number(shown.dataset.start), Number(shown.dataset.end));
  tip.replaceChildren(...lines.map((line) => Object.assign(document.createElement("div"), { textContent: line })));
  if (byKeys) find("spoken").textContent = `${shown.textContent}: ${lines.join("; ")}`;
  const box = shown.getBoundingClientRect();
  const below = box.bottom + 6 + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 4))}px`;
  tip.style.top = `${below ? box.bottom + 6 : box.top - tip.offsetHeight - 6}px`;
}

function inSight(span) {
  const [box, around] = [span, find("text")].map((element) => element.getBoundingClientRect());
  return box.bottom > around.top && box.top < around.bottom;
}

function settings() {
  const fields = ["temperature", "count", "seed"].map(find);
  const wrong = fields.find((field) => !field.checkValidity() || field.value === "");
  if (wrong) {
    say(
      `${wrong.labels[0].firstChild.textContent.trim()} must be a number from ${wrong.min} to ${wrong.max}.`,
      "error",
    );
    wrong.focus();
    return null;
  }
  return Object.fromEntries(fields.map((field) => [field.id, Number(field.value)]));
}

function generate() {
  const chosen = settings();
  if (!chosen) return;
  say("Generating …", "busy");
  ask({ type: "generate", ...chosen });
  find("draft").value = ""; // it is now a part of the text
}

/** Append bytes to the text without a way through the text field. */
function readAtOnce(bytes) {
  find("draft").value = ""; // it is now a part of the text
  say("Reading …", "busy");
  ask({ type: "read", bytes });
}

async function readFile(file) {
  try {
    return await file.arrayBuffer();
  } catch {
    say(`${file.name} cannot be read.`, "error");
    return null;
  }
}

/** Let a button open a file, and hand its content on. */
function openWith(button, input, use) {
  find(button).addEventListener("click", () => find(input).click());
  find(input).addEventListener("change", async () => {
    const [file] = find(input).files;
    find(input).value = ""; // so that the same file can be chosen again
    const content = file && (await readFile(file));
    if (content) use(content, file.name);
  });
}

find("draft").addEventListener("input", () => {
  say("Reading …", "busy");
  ask({ type: "draft", bytes: new TextEncoder().encode(find("draft").value) });
});
find("draft").addEventListener("paste", (event) => {
  const pasted = event.clipboardData?.getData("text/plain") ?? "";
  if (pasted.length <= LONG_PASTE) return;
  event.preventDefault();
  readAtOnce(new TextEncoder().encode(pasted));
});
find("draft").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) generate();
});
find("continue").addEventListener("click", generate);
find("stop").addEventListener("click", () => ask({ type: "stop" }));
find("reset").addEventListener("click", () => ask({ type: "reset" }));
find("save").addEventListener("click", () => ask({ type: "save" }));
openWith("load", "load-input", (file, name) => ask({ type: "load", file, name }));
openWith("file", "file-input", (content) => readAtOnce(new Uint8Array(content)));

find("text").addEventListener("scroll", () => point(null, false));
addEventListener("resize", () => point(null, false));
find("legend").append(
  ...[0, ...LEVELS].map((begin, place) => {
    const item = document.createElement("li");
    item.className = `s${place}`;
    item.textContent = place < LEVELS.length ? `${begin}–${LEVELS[place]}` : `over ${begin}`;
    return item;
  }),
);
worker.onmessage = ({ data }) => handlers[data.type](data);
worker.onerror = (event) => {
  event.preventDefault();
  say("The page's worker cannot start; this browser may be too old, or a file of the page is missing.", "error");
};
say("Loading the model …", "busy");
