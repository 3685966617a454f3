// Bytes as characters: what a reader sees as one character is one, and bytes that are not UTF-8 stand alone.

const segmenter = globalThis.Intl?.Segmenter ? new Intl.Segmenter(undefined, { granularity: "grapheme" }) : null;

/** Length of the UTF-8 sequence that begins at `at`, or 0 where the bytes are not UTF-8 or end too early. */
function sequenceLength(bytes, at, end) {
  const first = bytes[at];
  if (first < 0x80) return 1;
  const length =
    first >= 0xc2 && first < 0xe0 ? 2 : first >= 0xe0 && first < 0xf0 ? 3 : first >= 0xf0 && first < 0xf5 ? 4 : 0;
  if (length === 0 || at + length > end) return 0;
  for (let place = 1; place < length; place++) if ((bytes[at + place] & 0xc0) !== 0x80) return 0;
  // Overlong forms, surrogates and numbers above U+10FFFF.
  const second = bytes[at + 1];
  if ((first === 0xe0 && second < 0xa0) || (first === 0xed && second > 0x9f)) return 0;
  if ((first === 0xf0 && second < 0x90) || (first === 0xf4 && second > 0x8f)) return 0;
  return length;
}

/** True where the bytes from `at` to `end` may be the beginning of a longer UTF-8 sequence. */
export function isIncomplete(bytes, at, end) {
  const first = bytes[at];
  const length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : first >= 0xc2 ? 2 : 1;
  if (first >= 0xf5 || end - at >= length) return false;
  for (let place = at + 1; place < end; place++) if ((bytes[place] & 0xc0) !== 0x80) return false;
  return true;
}

/**
 * The characters of bytes[begin, end): {start, end, text}, `text` being null for a byte that is not UTF-8. Code points
 * that are shown as one, such as a letter with its accents or a composed emoji, are one character.
 */
export function splitCharacters(bytes, begin, end) {
  const characters = [];
  const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  let at = begin;
  while (at < end) {
    let stop = at;
    for (let length; stop < end && (length = sequenceLength(bytes, stop, end)) > 0;) stop += length;
    if (stop === at) {
      characters.push({ start: at, end: ++at, text: null });
      continue;
    }
    const text = decoder.decode(bytes.slice(at, stop));
    const parts = segmenter ? Array.from(segmenter.segment(text), ({ segment }) => segment) : Array.from(text);
    for (const part of parts) {
      const length = utf8Length(part);
      characters.push({ start: at, end: at + length, text: part });
      at += length;
    }
  }
  return characters;
}

function utf8Length(text) {
  let length = 0;
  for (const character of text) {
    const point = character.codePointAt(0);
    length += point < 0x80 ? 1 : point < 0x800 ? 2 : point < 0x10000 ? 3 : 4;
  }
  return length;
}

/** Two hexadecimal digits. */
export const hex = (byte) => byte.toString(16).toUpperCase().padStart(2, "0");

const UNSEEN = /^[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Co}\p{Cn}]+$/u;

/** A label for a character that has no shape of its own, or would change the direction of the text; null for others. */
export function labelOf(character, bytes) {
  if (character.text === null) return hex(bytes[character.start]);
  if (!UNSEEN.test(character.text) || character.text === "\n" || character.text === "\t") return null;
  if (character.text === "\r\n") return null;
  return Array.from(character.text, (part) => {
    const point = part.codePointAt(0);
    return point < 0x80 ? hex(point) : `U+${point.toString(16).toUpperCase().padStart(4, "0")}`;
  }).join(" ");
}
