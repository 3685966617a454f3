// Buttons and fields; the learner works in worker.js.

const find = (id) => document.getElementById(id);
const worker = new Worker("worker.js", { type: "module" });
const encoder = new TextEncoder();
const buttons = ["file", "save", "load", "begin"];
let typed = ""; // what of the text field was read

function setStatus(kind, text) {
  find("status").dataset.kind = kind;
  find("status").textContent = text;
}

function show({ bytes, bits, points, suggestions }) {
  find("bytes").textContent = bytes.toLocaleString("en");
  find("bits").textContent = bytes ? (bits / bytes).toFixed(2) : "–";
  find("recent").textContent = points.length ? points.at(-1).toFixed(2) : "–";
  find("next").textContent = suggestions.map(shown).join(" ") || "–";
  const places = points.map((value, k) => `${(100 * (k + 0.5)) / points.length},${80 - 10 * Math.min(value, 8)}`);
  find("line").setAttribute("points", places.join(" "));
}

function shown(byte) {
  if (byte === 32) return "␣";
  if (byte === 10) return "⏎";
  return byte > 32 && byte < 127 ? String.fromCharCode(byte) : byte.toString(16).padStart(2, "0");
}

function enable(ready) {
  for (const id of buttons) find(id).disabled = !ready;
  find("text").disabled = !ready && find("text").disabled;
  find("stop").disabled = ready;
}

function send(message) {
  enable(false);
  worker.postMessage(message);
}

worker.addEventListener("message", ({ data }) => {
  const { kind } = data;
  if (kind === "ready" || kind === "busy") {
    show(data);
    const memory = `${Math.round(data.memoryBytes / 1000)} kB of memory`;
    setStatus(kind, kind === "busy" ? "Reading …" : `Ready: a learner in ${memory}.`);
  } else if (kind === "saved") {
    const link = Object.assign(document.createElement("a"), { download: "learned.bin" });
    link.href = URL.createObjectURL(new Blob([data.content]));
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  } else {
    setStatus(kind, data.message);
  }
  if (kind === "ready") find("text").disabled = false;
  if (kind !== "busy" && kind !== "failed") enable(true);
});

find("text").addEventListener("input", () => {
  // Only what was added at the end is read: a learner cannot unread.
  const { value } = find("text");
  if (value.startsWith(typed)) send({ action: "read", content: encoder.encode(value.slice(typed.length)) });
  typed = value;
});

async function readFile(file) {
  if (file) send({ action: "read", content: new Uint8Array(await file.arrayBuffer()) });
}

for (const [id, action] of [
  ["file", (file) => readFile(file)],
  ["load", async (file) => file && send({ action: "load", content: new Uint8Array(await file.arrayBuffer()) })],
]) {
  find(id).addEventListener("click", () => find(`${id}-input`).click());
  find(`${id}-input`).addEventListener("change", ({ target }) => {
    action(target.files[0]);
    target.value = "";
  });
}

find("stop").addEventListener("click", () => worker.postMessage({ action: "stop" }));
find("save").addEventListener("click", () => send({ action: "save" }));
find("begin").addEventListener("click", () => {
  find("text").value = typed = "";
  send({ action: "begin" });
});

document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  if (!find("file").disabled) readFile(event.dataTransfer.files[0]);
});
