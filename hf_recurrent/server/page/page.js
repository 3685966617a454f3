// The page: texts, each a session of the server with its transcript, and the buttons that work on the text in use.

import { draw, drawLegend } from "./drawing.js";
import { call, send, ServerError, setKey, stream } from "./server.js";
import { GENERATED, LEARNED, READ, Transcript } from "./transcript.js";

const DRAW_MILLISECONDS = 100; // between two drawings of a text that grows
const find = (id) => document.getElementById(id);

let text = null; // the one in use
const texts = [];
let textsMade = 0;
let isBusy = false;
let isStopped = false;

/** Begin a text: empty, or continuing `from`. */
function addText(from = {}) {
  text = { id: null, learns: false, transcript: new Transcript(), marks: [], marksMade: 0, origin: null, ...from };
  text.name = `Text ${++textsMade}`;
  texts.push(text);
  return text;
}

/** The id of the session of a text, which begins with its first use. */
async function session(text) {
  text.id ??= (await call("POST", "/v1/sessions", text.learns ? { learns: true } : undefined)).id;
  return text.id;
}

// ---- Drawing

function note(message, isError = false) {
  find("note").textContent = message;
  find("note").classList.toggle("error", isError);
}

function button(label, title, action) {
  const element = document.createElement("button");
  Object.assign(element, { type: "button", textContent: label, title });
  element.addEventListener("click", action);
  return element;
}

function drawTexts() {
  const buttons = texts.map((each) => {
    const element = button(each.name, `Switch to ${each.name}`, () => run(() => void (text = each)));
    element.setAttribute("aria-pressed", each === text);
    return element;
  });
  find("texts").replaceChildren(...buttons);
}

function drawMarks() {
  const buttons = text.marks.map((mark) => {
    const label = `↩ ${mark.name}: ${mark.transcript.length.toLocaleString("en")} bytes`;
    return button(label, `Rewind to mark ${mark.name}`, () => run(() => rewind(mark)));
  });
  if (buttons.length) find("marks").replaceChildren(...buttons);
  else find("marks").replaceChildren(hint);
}

let drawnAt = 0;

/** Show the text as it grows; at most ten times per second. */
function drawGrowing() {
  if (performance.now() - drawnAt < DRAW_MILLISECONDS) return;
  draw(text.transcript, text.origin);
  drawnAt = performance.now();
}

function drawAll() {
  draw(text.transcript, text.origin);
  drawTexts();
  drawMarks();
  find("learns").checked = text.learns;
  for (const element of document.querySelectorAll("main button, main input[type=checkbox]")) {
    element.disabled = isBusy !== (element.id === "stop");
  }
}

/** Run an action, which returns a sentence about its result, and show it. */
async function run(action) {
  if (isBusy) return;
  [isBusy, isStopped] = [true, false];
  note("");
  drawAll();
  try {
    note((await action()) ?? "");
  } catch (error) {
    if (!(error instanceof ServerError)) console.error(error);
    note(error.status === 404 ? `${error.message} If the server has forgotten the text, press New.` : error.message, true);
    if (error.status === 401) askForKey(error.message);
  }
  isBusy = false;
  drawAll();
}

// ---- Actions

/** Read the draft, several times where it is to be learned. */
async function read() {
  const content = find("draft").value;
  if (!content) throw new Error("Write something first.");
  const times = text.learns ? setting("times") : 1;
  const id = await session(text);
  const bytes = new TextEncoder().encode(content);
  for (let done = 1; done <= times && !isStopped; done++) {
    const { bits } = await call("POST", `/v1/sessions/${id}/read`, { text: content });
    text.transcript.add(bytes, bits, text.learns ? LEARNED : READ);
    note(times > 1 ? `Read ${done} of ${times} times.` : "Read.");
    drawGrowing();
  }
  find("draft").value = "";
  return find("note").textContent;
}

/** Continue the text. */
async function generate() {
  const body = { max_tokens: setting("count"), temperature: setting("temperature"), bits: true, stream: true };
  for (const [name, id] of [["top_k", "top-k"], ["top_p", "top-p"], ["seed", "seed"]]) {
    if (find(id).value) body[name] = setting(id);
  }
  note("Writing …");
  let reason = null;
  for await (const piece of stream(`/v1/sessions/${await session(text)}/generate`, body)) {
    const bytes = Uint8Array.from(atob(piece.base64), (character) => character.charCodeAt(0));
    text.transcript.add(bytes, piece.bits, GENERATED);
    reason = piece.finish_reason;
    drawGrowing();
  }
  return reason === "stop" ? "The model ended its text; new text begins another one." : "";
}

async function readAndGenerate() {
  if (find("draft").value) await read();
  return isStopped ? "Stopped." : generate();
}

async function stop() {
  if (!isBusy) return;
  isStopped = true;
  try {
    if (text.id) await call("POST", `/v1/sessions/${text.id}/stop`);
  } catch (error) {
    note(error.message, true);
  }
}

async function mark() {
  const name = `${text.marksMade + 1}`;
  await call("POST", `/v1/sessions/${await session(text)}/marks`, { mark: name });
  text.marksMade++;
  text.marks.push({ name, transcript: text.transcript.copy() });
  return `Marked after ${text.transcript.length.toLocaleString("en")} bytes.`;
}

async function rewind(mark) {
  await call("POST", `/v1/sessions/${text.id}/rewind`, { mark: mark.name });
  text.transcript = mark.transcript.copy();
  return `Back at mark ${mark.name}.`;
}

async function fork() {
  const source = text;
  const { id } = await call("POST", `/v1/sessions/${await session(source)}/fork`);
  addText({ ...source, id, transcript: source.transcript.copy(), marks: source.marks.slice() });
  return `${text.name} is a copy of ${source.name}.`;
}

async function save() {
  const response = await send("GET", `/v1/sessions/${await session(text)}/state`);
  const link = document.createElement("a");
  const data = await response.blob();
  Object.assign(link, { href: URL.createObjectURL(data), download: "state.safetensors" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  return `Saved: ${size(data.size)}.`;
}

async function load() {
  const [file] = find("file").files;
  find("file").value = "";
  const { id } = await call("POST", "/v1/sessions/from_state", file);
  addText({ id, origin: file.name });
  return `${text.name} continues ${file.name}.`;
}

async function setLearns(learns) {
  await call("PATCH", `/v1/sessions/${await session(text)}`, { learns });
  text.learns = learns;
  return learns ? "The model learns from what this text reads." : "";
}

/** The number in a field. */
function setting(id) {
  const field = find(id);
  if (!field.checkValidity()) {
    throw new Error(`${field.parentElement.textContent.trim()}: ${field.validationMessage}`);
  }
  return field.valueAsNumber;
}

const size = (count) => (count < 1024 ? `${count} bytes` : `${(count / 1024).toPrecision(3)} KiB`);

// ---- Beginning and end

function askForKey(message) {
  find("key-note").textContent = find("key").value ? message : "";
  find("key-form").hidden = false;
  find("main").hidden = true;
  find("key").focus();
}

async function open() {
  const { data: [model] } = await call("GET", "/v1/models");
  document.title = `${model.id}: a model that remembers`;
  find("name").textContent = model.id;
  find("state-size").textContent = size(model.state_bytes);
  find("learning").hidden = !model.learns;
  find("key-form").hidden = true;
  find("main").hidden = false;
  return "Press Continue: the model reads the text and continues it.";
}

function connect() {
  const actions = { read, continue: readAndGenerate, mark, fork, save, new: () => void addText() };
  for (const [id, action] of Object.entries(actions)) find(id).addEventListener("click", () => run(action));
  find("stop").addEventListener("click", stop);
  find("load").addEventListener("click", () => find("file").click());
  find("file").addEventListener("change", () => run(load));
  find("learns").addEventListener("change", (event) => {
    const learns = event.target.checked; // before `run` draws the box as it was
    run(() => setLearns(learns));
  });
  find("draft").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run(readAndGenerate);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") stop();
  });
  find("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    setKey(find("key").value.trim());
    run(open);
  });
  // The sessions of this tab end with it; the browser's memory of a closed page would show dead ones.
  addEventListener("pagehide", () => {
    for (const each of texts.filter(({ id }) => id)) {
      send("DELETE", `/v1/sessions/${each.id}`, undefined, { keepalive: true }).catch(() => null);
    }
  });
  addEventListener("pageshow", (event) => {
    if (event.persisted) location.reload();
  });
}

const hint = find("marks").firstElementChild;
drawLegend();
connect();
addText();
run(open);
