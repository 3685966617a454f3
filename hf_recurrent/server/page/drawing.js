// Draws a transcript. Positions and colours that depend on data are set by properties: the page allows no inline styles.

import { GENERATED, LEARNED, LEVELS } from "./transcript.js";

const SHOWN = 4096; // bytes; older ones are only in the state and the curve
const LEAST_TOP = 4; // bits per byte at the top of the curve
const SVG = "http://www.w3.org/2000/svg";

const find = (id) => document.getElementById(id);
const level = (bits) => (bits === null ? "none" : `s${LEVELS.filter((end) => end <= bits).length}`);

/** A span with a class and text. */
function span(name, text) {
  const element = document.createElement("span");
  element.className = name;
  element.textContent = text;
  return element;
}

/** A character, coloured by the bits of its bytes. */
function drawCharacter(transcript, { character, begin, end }) {
  const bits = transcript.bits.slice(begin, end);
  const levels = bits.map(level);
  const isShown = character !== null && (character === "\n" || character === "\t" || !/\p{C}/u.test(character));
  const hex = transcript.bytes.slice(begin, end).map((byte) => byte.toString(16).padStart(2, "0").toUpperCase());
  const element = span(new Set(levels).size === 1 ? levels[0] : "", isShown ? character : hex.join(""));
  if (!element.className) {
    const width = 100 / bits.length;
    const stripes = levels.map((name, place) => {
      const colour = name === "none" ? "transparent" : `var(--${name})`;
      return `${colour} ${place * width}% ${(place + 1) * width}%`;
    });
    element.style.backgroundImage = `linear-gradient(90deg, ${stripes.join(", ")})`;
  }
  element.classList.toggle("newline", character === "\n");
  element.classList.toggle("tab", character === "\t");
  element.classList.toggle("label", !isShown);
  element.classList.toggle("generated", transcript.kinds[begin] === GENERATED);
  const told = bits.map((value) => (value === null ? "not predicted" : value.toFixed(2))).join(", ");
  element.title = bits.at(-1) === null ? told : `${told} bits`;
  return element;
}

function drawCharacters(transcript, origin) {
  const begin = Math.max(0, transcript.length - SHOWN);
  const drawn = [];
  if (origin) drawn.push(span("earlier", `continues ${origin} `));
  if (begin) drawn.push(span("earlier", "…"));
  for (const found of transcript.characters(begin)) drawn.push(drawCharacter(transcript, found));
  find("characters").replaceChildren(...drawn);
}

function drawLine(points, name) {
  const line = document.createElementNS(SVG, "polyline");
  line.setAttribute("points", points.join(" "));
  if (name) line.setAttribute("class", name);
  find("curve").append(line);
}

function drawCurve(transcript) {
  const curve = transcript.curve();
  const top = Math.max(LEAST_TOP, Math.ceil(Math.max(0, ...curve.map((point) => point.mean))));
  const points = curve.map(({ x, mean }) => `${(100 * x).toFixed(2)},${(100 * (1 - mean / top)).toFixed(2)}`);
  for (const line of find("curve").querySelectorAll("polyline")) line.remove();
  drawLine(points);
  for (let begin = 0; begin < curve.length; begin++) {
    if (!curve[begin].learned) continue;
    let end = begin;
    while (end < curve.length && curve[end].learned) end++;
    drawLine(points.slice(Math.max(begin - 1, 0), end), "learned");
    begin = end;
  }
  find("top").textContent = top;
  find("learned-note").hidden = !transcript.kinds.includes(LEARNED);
}

/** Show a transcript; `origin` is the name of the state file that it continues. */
export function draw(transcript, origin) {
  const mean = transcript.bitsPerByte();
  find("bits").textContent = mean === null ? "?" : mean.toFixed(2);
  find("length").textContent = transcript.length.toLocaleString("en");
  drawCharacters(transcript, origin);
  drawCurve(transcript);
}

export function drawLegend() {
  const items = [`< ${LEVELS[0]}`, ...LEVELS].map((text, place) => {
    const item = document.createElement("li");
    item.className = `s${place}`;
    item.textContent = text;
    return item;
  });
  find("legend").append(...items);
}
