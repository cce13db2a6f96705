// What a raw answer shows of a long stream, and what is copied of it.

import assert from "node:assert/strict";
import { test } from "node:test";

import { SHOWN_AT_EACH_END, rawExcerpt, rawText } from "../../serve_app/playground/raw.js";

const chunks = (number) => Array.from({ length: number }, (_, i) => ({ n: i }));
const lines = (text) => text.split("\n\n");

test("a short stream is shown whole, with the end mark that came", () => {
  const most = chunks(2 * SHOWN_AT_EACH_END);
  assert.deepEqual(lines(rawExcerpt(most, true)), [...most.map((chunk) => JSON.stringify(chunk)), "[DONE]"]);
  assert.equal(rawExcerpt(most, true), rawText(most, true));
  assert.equal(rawExcerpt([], false), "");
});

test("of a long stream head and tail are shown, and how many lie between", () => {
  const all = chunks(2 * SHOWN_AT_EACH_END + 7);
  const shown = lines(rawExcerpt(all, true));
  assert.equal(shown.length, 2 * SHOWN_AT_EACH_END + 2);
  const at = shown.findIndex((line) => !line.startsWith("{"));
  assert.equal(at, SHOWN_AT_EACH_END);
  assert.match(shown[at], /\b7 chunks\b/);
  assert.deepEqual(JSON.parse(shown[at - 1]), { n: SHOWN_AT_EACH_END - 1 });
  assert.deepEqual(JSON.parse(shown[at + 1]), { n: SHOWN_AT_EACH_END + 7 });
  assert.deepEqual(shown.slice(-2), [JSON.stringify(all.at(-1)), "[DONE]"]);
  assert.match(rawExcerpt(all.slice(0, -6), true), /\b1 chunk\b/);
});

test("what is copied is every chunk, and no end mark where the stream broke off", () => {
  const all = chunks(5 * SHOWN_AT_EACH_END);
  assert.deepEqual(lines(rawText(all, false)).map((line) => JSON.parse(line)), all);
  assert.deepEqual(lines(rawText(all, true)).at(-1), "[DONE]");
});
