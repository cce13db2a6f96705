// From tokens' bytes to text that can be shown. Knows UTF-8 and names for what has no glyph; a token may hold part of
// a character, so texts are made of runs of neighbours and not one by one.

const MARKS = { "\n": "\u21b5", "\t": "\u21e5", " ": "\u2423", "\r": "\u240d" };
const WORDS = { "\n": "line break", "\t": "tab", " ": "space", "\r": "carriage return" };

/** Position -> the text that a token adds. A character of several tokens belongs to the one that completes it. */
export function tokenTexts(tokens) {
  const texts = new Map();
  let decoder = new TextDecoder("utf-8");
  let previous = null;
  for (const token of [...tokens].sort((a, b) => a.position - b.position)) {
    if (previous !== null && token.position !== previous + 1) decoder = new TextDecoder("utf-8");
    texts.set(token.position, decoder.decode(Uint8Array.from(token.bytes), { stream: true }));
    previous = token.position;
  }
  return texts;
}

const SPECIAL = { endofchunk: "chunk", endoftext: "end", eot_id: "end" };

function specialName(token) {
  return token.token.replace(/^<\|/, "").replace(/\|>$/, "");
}

/** A special token, such as an end-of-chunk mark: it has a name and no bytes. */
export function isSpecial(token) {
  return token.bytes.length === 0;
}

/** What a cell shows: no space around a word, and a visible mark for what is only white. */
export function cellText(token) {
  if (isSpecial(token)) return `\u2039${SPECIAL[specialName(token)] ?? specialName(token)}\u203a`;
  const text = decodeAlone(token);
  const trimmed = text.trim();
  if (trimmed !== "") return trimmed;
  return [...text].map((char) => MARKS[char] ?? char).join("") || "\u2423";
}

/** What a screen reader says of a token. */
export function spokenText(token) {
  if (isSpecial(token)) return `special token ${cellText(token)}`;
  const text = decodeAlone(token);
  if (text.trim() !== "") return text.trim();
  return [...text].map((char) => WORDS[char] ?? "white space").join(", ");
}

/** A token written so that every space shows. */
export function exactText(token) {
  if (isSpecial(token)) return token.token;
  return decodeAlone(token).replace(/[\n\t\r ]/g, (char) => MARKS[char]);
}

/** True for a token that goes on with the word of the one before it, if that is there. */
export function isContinuation(token, before) {
  if (!before || isSpecial(token) || isSpecial(before)) return false;
  return /^[\p{L}\p{N}]/u.test(decodeAlone(token)) && /[\p{L}\p{N}]$/u.test(decodeAlone(before));
}

function decodeAlone(token) {
  const text = new TextDecoder("utf-8").decode(Uint8Array.from(token.bytes));
  // Part of a character shows as its bytes.
  if (!text.includes("\ufffd")) return text;
  return token.bytes.map((byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("");
}

/** A signed number with a true minus, for labels that are read. */
export function signed(value, digits = 2) {
  if (value === null || value === undefined) return "n/a";
  const text = Math.abs(value).toFixed(digits);
  if (Number(text) === 0) return (0).toFixed(digits);
  return `${value < 0 ? "\u2212" : "+"}${text}`;
}

/** 0.876 -> "88 %". */
export function percent(share) {
  return share === null || share === undefined ? "n/a" : `${Math.round(share * 100)}\u202f%`;
}

/** How a concept is called: its name, or its head and number. */
export function conceptName(concept) {
  return concept.name ?? `${concept.head === "known" ? "Concept" : "Discovered"} ${concept.id}`;
}

/** "1 token", "2 tokens". */
export function count(number, noun, plural = `${noun}s`) {
  return `${number} ${number === 1 ? noun : plural}`;
}
