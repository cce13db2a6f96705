// Texts of tokens, arithmetic of explanations, and the display's clock.

import assert from "node:assert/strict";
import { test } from "node:test";

import * as attribution from "../../serve_app/playground/attribution.js";
import * as player from "../../serve_app/playground/player.js";
import { createParser } from "../../serve_app/playground/sse.js";
import * as text from "../../serve_app/playground/text.js";

const bytes = (string) => [...new TextEncoder().encode(string)];
const token = (position, string) => ({ position, token: string, bytes: bytes(string) });
const close = (actual, expected) => assert.ok(Math.abs(actual - expected) < 1e-9, `${actual} is not ${expected}`);

test("a character of two tokens belongs to the one that completes it", () => {
  const [first, ...rest] = bytes("\u00e9");
  const texts = text.tokenTexts([
    { position: 1, bytes: rest },
    { position: 0, bytes: [first] },
    token(2, "!"),
  ]);
  assert.deepEqual([...texts.entries()].sort(), [[0, ""], [1, "\u00e9"], [2, "!"]]);
});

test("half a character before a gap does not spoil what follows the gap", () => {
  const texts = text.tokenTexts([{ position: 0, bytes: [0xc3] }, token(5, "a")]);
  assert.equal(texts.get(5), "a");
});

test("white space has marks, special tokens have names", () => {
  assert.equal(text.cellText(token(0, " sea")), "sea");
  assert.equal(text.cellText(token(0, "\n")), "\u21b5");
  assert.equal(text.exactText(token(0, " a\n")), "\u2423a\u21b5");
  assert.equal(text.cellText({ token: "<|endofchunk|>", bytes: [] }), "\u2039chunk\u203a");
  assert.equal(text.spokenText({ token: "<|endoftext|>", bytes: [] }), "special token \u2039end\u203a");
  assert.equal(text.spokenText(token(0, "\n")), "line break");
  assert.equal(text.cellText({ token: "x", bytes: [0xc3] }), "\\xc3");
});

test("a token that goes on with a word is told from one that begins one", () => {
  const before = token(0, " Lep");
  assert.ok(text.isContinuation(token(1, "idae"), before));
  assert.ok(!text.isContinuation(token(1, " sea"), before));
  assert.ok(!text.isContinuation(token(1, ";"), before));
  assert.ok(!text.isContinuation(token(1, "idae"), token(0, "\n")));
  assert.ok(!text.isContinuation(token(1, "idae"), null));
});

test("numbers are written with their sign and a true minus, and zero without", () => {
  assert.equal(text.signed(1.234), "+1.23");
  assert.equal(text.signed(-1.5, 1), "\u22121.5");
  assert.equal(text.signed(-0.0001), "0.00");
  assert.equal(text.signed(null), "n/a");
});

const EXPLAINED = {
  position: 3,
  known: [{ id: 1, name: "animal", contribution: 2 }, { id: 2, name: "plant", contribution: -1 }],
  discovered: [{ id: 9, name: null, contribution: 4 }],
  known_total: 1,
  discovered_total: 4,
  epsilon: -0.5,
  logit: 4.5,
};

test("bars of a sum begin where the one before ended and reach the logit", () => {
  const { zero, end, bars } = attribution.waterfall(EXPLAINED);
  close(zero, 0);
  close(bars[1].left, bars[0].left + bars[0].width);
  close(bars[1].left + bars[1].width, bars[2].left + bars[2].width);
  close(bars[2].left, end);
  close(attribution.sumError(EXPLAINED), 0);
  close(attribution.sumError({ ...EXPLAINED, epsilon: 0 }), 0.5);
});

test("a negative part moves zero to the right", () => {
  const { zero, bars } = attribution.waterfall({ ...EXPLAINED, known_total: -2, discovered_total: 4, logit: 1.5 });
  close(zero, 0.5);
  close(bars[0].left, 0);
  close(bars[0].width, 0.5);
});

test("bars around zero share one scale", () => {
  const [up, down] = attribution.diverging([3, -1]);
  close(up.zero, 0.25);
  close(up.width, 0.75);
  close(down.left, 0);
  close(down.width, 0.25);
});

test("concepts are added up over tokens, with the full explanation in place of a step's", () => {
  const tokens = [
    { position: 2, concepts: [{ id: 1, name: "animal", head: "known", contribution: 1 }] },
    { position: 3, concepts: [{ id: 1, name: "animal", head: "known", contribution: 99 }] },
  ];
  const [first, second] = attribution.tally(tokens, [EXPLAINED]);
  assert.deepEqual([first.id, first.total, first.head, first.positions], [9, 4, "discovered", [3]]);
  assert.deepEqual([second.id, second.total, second.positions], [1, 3, [2, 3]]);
  assert.deepEqual([...attribution.drivenBy(1, tokens, [EXPLAINED])], [[2, 1], [3, 2]]);
});

test("the strongest few keep room for known concepts", () => {
  const concepts = attribution.conceptsOf(EXPLAINED);
  assert.deepEqual(attribution.strongest(concepts, 2, 0).map((concept) => concept.id), [9, 1]);
  assert.deepEqual(attribution.strongest(concepts, 2, 2).map((concept) => concept.id), [1, 2]);
});

test("what is saved is counted against one pass a token", () => {
  const summary = { steps: 61, forward_passes: 40 };
  assert.deepEqual(attribution.savings(summary)(64), { tokens: 64, steps: 61, passes: 40, saved: 24 });
  assert.equal(attribution.savings({ steps: 70, forward_passes: 70 })(64).saved, 0);
});

test("events are read whole however the text is cut", () => {
  const stream = 'data: {"a": 1}\n\ndata: {"b": "x\\n"}\r\n\r\n: a comment\n\ndata: [DONE]\n\n';
  for (let size = 1; size < stream.length; size += 1) {
    const parse = createParser();
    const found = [];
    for (let at = 0; at < stream.length; at += size) found.push(...parse(stream.slice(at, at + size)));
    assert.deepEqual(found, ['{"a": 1}', '{"b": "x\\n"}', "[DONE]"], `pieces of ${size}`);
  }
});

test("the display follows the recorded events at its speed and never overtakes them", () => {
  let state = { ...player.START, speed: "1" };
  state = player.tick(state, 0.5, 100);
  assert.equal(state.cursor, 12);
  assert.equal(player.tick(state, 0.5, 13).cursor, 13);
  assert.equal(player.tick({ ...state, speed: "live" }, 0.001, 100).cursor, 100);
  assert.equal(player.tick({ ...state, isPlaying: false }, 9, 100).cursor, 12);
});

test("small times add up to a step", () => {
  let state = { ...player.START, speed: "0.25" };
  for (let i = 0; i < 64; i += 1) state = player.tick(state, 1 / 64, 100);
  assert.equal(state.cursor, 6);
});

test("play at the end begins again, and pauses while more may come", () => {
  const atEnd = { ...player.START, cursor: 10 };
  assert.equal(player.toggle(atEnd, 10, true).cursor, 0);
  assert.equal(player.toggle(atEnd, 10, false).isPlaying, false);
  assert.equal(player.seek(atEnd, 99, 10).cursor, 10);
  assert.equal(player.seek(atEnd, -1, 10).cursor, 0);
});

test("a step by hand goes over what is no step", () => {
  const events = ["generation.started", "block.started", "step", "step", "block.sealed", "step"].map((type) => ({ type }));
  assert.equal(player.stepFrom(events, 0, 1), 3);
  assert.equal(player.stepFrom(events, 4, 1), 6);
  assert.equal(player.stepFrom(events, 6, -1), 4);
  assert.equal(player.stepFrom(events, 3, -1), 0);
});
