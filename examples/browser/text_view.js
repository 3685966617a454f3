// The coloured text: one span for a character, and blocks of plain text where they are out of sight.

import { hex, isIncomplete, labelOf, splitCharacters } from "./characters.js";

/** Upper ends of the classes of surprise, in bits; the last class has none. */
export const LEVELS = [0.5, 1, 2, 3, 4, 6, 8, 12];
const BLOCK = 1024; // bytes after which a block ends at the next line end,
const LONGEST_BLOCK = 4096; // or bytes after which it ends at the next character

/** Number of the class of a surprise. */
export function level(bits) {
  const place = LEVELS.findIndex((end) => bits < end);
  return place < 0 ? LEVELS.length : place;
}

export class TextView {
  #element;
  #record;
  #blocks = []; // [{start, end, element, coloured}], ascending, without gaps
  #observer;
  #cursor = -1; // first byte of the character that the keyboard points at

  constructor(element, record, onPoint) {
    this.#element = element;
    this.#record = record;
    this.#observer = new IntersectionObserver((entries) => this.#see(entries), { root: element, rootMargin: "600px" });
    this.#listen(onPoint);
  }

  /** Show the record, which changed from byte `start` on. */
  update(start) {
    const bottom = this.#element.scrollHeight - this.#element.scrollTop - this.#element.clientHeight < 40;
    let begin = start;
    while (this.#blocks.length && (this.#blocks.at(-1).end >= start || this.#isOpen(this.#blocks.at(-1)))) {
      const block = this.#blocks.pop();
      this.#observer.unobserve(block.element);
      block.element.remove();
      begin = block.start;
      if (block.end < start) break;
    }
    const { length } = this.#record;
    while (begin < length) {
      const end = this.#endOfBlock(begin);
      this.#add({ start: begin, end, element: document.createElement("div"), coloured: false });
      begin = end;
    }
    this.#cursor = Math.min(this.#cursor, length - 1);
    if (bottom) this.#element.scrollTop = this.#element.scrollHeight;
  }

  #isOpen({ start, end }) {
    const { bytes } = this.#record;
    return end - start < LONGEST_BLOCK && !(end - start >= BLOCK && bytes[end - 1] === 10);
  }

  #endOfBlock(begin) {
    const { bytes, length } = this.#record;
    const newline = bytes.subarray(begin + BLOCK - 1, Math.min(begin + LONGEST_BLOCK, length)).indexOf(10);
    if (newline >= 0) return begin + BLOCK + newline;
    let end = Math.min(begin + LONGEST_BLOCK, length);
    // Not within a character of several bytes.
    while (end < length && end > begin + LONGEST_BLOCK - 4 && (bytes[end] & 0xc0) === 0x80) end--;
    return end;
  }

  #add(block) {
    block.element.className = "block";
    block.element.block = block;
    this.#blocks.push(block);
    this.#element.append(block.element);
    if (block.end === this.#record.length) this.#colour(block);
    else this.#fade(block);
    this.#observer.observe(block.element);
  }

  #see(entries) {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting && !target.block.coloured) this.#colour(target.block);
      else if (!isIntersecting && target.block.coloured) this.#fade(target.block);
    }
  }

  /** Plain text in place of spans. */
  #fade(block) {
    const { bytes } = this.#record;
    block.element.textContent = new TextDecoder().decode(bytes.slice(block.start, block.end));
    block.coloured = false;
  }

  #colour(block) {
    const { bytes, length } = this.#record;
    const characters = splitCharacters(bytes, block.start, block.end);
    const spans = characters.map((character) => this.#span(character));
    if (block.end === length) {
      // The first bytes of a character whose other bytes are not there yet.
      const last = spans.slice(-3);
      const open = characters
        .slice(-3)
        .findIndex(({ start, text }) => text === null && isIncomplete(bytes, start, length));
      if (open >= 0) last.slice(open).forEach((span) => span.classList.add("open"));
    }
    block.element.replaceChildren(...spans);
    block.coloured = true;
    this.#markCursor();
  }

  #span(character) {
    const { bits, bytes, generated } = this.#record;
    const { start, end, text } = character;
    const span = document.createElement("span");
    const classes = Array.from(bits.subarray(start, end), (value) =>
      Number.isNaN(value) ? "none" : `s${level(value)}`,
    );
    span.dataset.start = start;
    span.dataset.end = end;
    if (new Set(classes).size === 1) span.className = classes[0];
    else span.style.backgroundImage = stripes(classes); // one for every byte
    const label = labelOf(character, bytes);
    if (label !== null) span.classList.add("label");
    if (text?.endsWith("\n")) span.classList.add("newline");
    if (text === "\t") span.classList.add("tab");
    if (generated[start]) span.classList.add("generated");
    span.textContent = label ?? text;
    return span;
  }

  #listen(onPoint) {
    const element = this.#element;
    const pointed = (event) => event.target.closest?.("span[data-start]") ?? null;
    element.addEventListener("pointerover", (event) => onPoint(pointed(event), false));
    element.addEventListener("pointerleave", () => onPoint(null, false));
    element.addEventListener("click", (event) => {
      const span = pointed(event);
      if (span) this.#moveTo(Number(span.dataset.start), onPoint);
    });
    element.addEventListener("blur", () => onPoint(null, true));
    element.addEventListener("keydown", (event) => {
      const shown = this.#blocks.at(-1)?.end ?? 0; // the record may be ahead of it by a frame
      if (event.ctrlKey || event.altKey || event.metaKey || !shown) return;
      const last = shown - 1;
      const here = this.#spanAt(this.#cursor);
      const target = {
        ArrowRight: here ? Number(here.dataset.end) : 0,
        ArrowLeft: here ? Number(here.dataset.start) - 1 : last,
        Home: 0,
        End: last,
      }[event.key];
      if (target === undefined) return;
      event.preventDefault();
      this.#moveTo(Math.max(0, Math.min(target, last)), onPoint);
    });
  }

  #moveTo(byte, onPoint) {
    this.#cursor = byte;
    const span = this.#spanAt(byte);
    this.#cursor = Number(span.dataset.start);
    this.#markCursor();
    span.scrollIntoView({ block: "nearest" });
    onPoint(span, true);
  }

  #spanAt(byte) {
    const block = this.#blocks.find(({ start, end }) => start <= byte && byte < end);
    if (!block) return null;
    if (!block.coloured) this.#colour(block);
    return Array.from(block.element.children).find(({ dataset }) => byte < Number(dataset.end));
  }

  #markCursor() {
    this.#element.querySelector(".cursor")?.classList.remove("cursor");
    const block = this.#blocks.find(({ start, end }) => start <= this.#cursor && this.#cursor < end);
    if (!block?.coloured) return;
    this.#spanAt(this.#cursor)?.classList.add("cursor");
  }
}

function stripes(classes) {
  const width = 100 / classes.length;
  const stops = classes.map((name, place) => {
    const colour = name === "none" ? "transparent" : `var(--${name})`;
    return `${colour} ${width * place}% ${width * (place + 1)}%`;
  });
  return `linear-gradient(to right, ${stops.join(", ")})`;
}

/** Sentences about the bytes of a character: [{byte, bits, text}]. */
export function describeBytes(record, start, end) {
  return Array.from(record.bytes.subarray(start, end), (byte, place) => {
    const bits = record.bits[start + place];
    const surprise = Number.isNaN(bits)
      ? "not predicted"
      : `${bits.toFixed(2)} bits (probability ${percent(2 ** -bits)})`;
    return `byte ${(start + place + 1).toLocaleString("en")}: 0x${hex(byte)}, ${surprise}`;
  });
}

function percent(probability) {
  const value = 100 * probability;
  return `${value >= 10 ? value.toFixed(0) : value >= 0.01 ? value.toPrecision(2) : "< 0.01"} %`;
}
