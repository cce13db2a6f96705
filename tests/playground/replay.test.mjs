// The fold from events to a canvas.

import assert from "node:assert/strict";
import { test } from "node:test";

import { cellsOf, currentBlock, proseTokens, progress, replay } from "../../serve_app/playground/replay.js";

const commit = (position, token = `t${position}`) => ({
  position,
  token,
  bytes: [...new TextEncoder().encode(token)],
  token_id: position,
  confidence: 0.5,
  concepts: [],
});

/** Two blocks of four cells; the prompt's tail takes the first cell, the last block has two positions. */
const EVENTS = [
  { seq: 0, type: "generation.started", index: 0, block_length: 4, prompt_tail: 1 },
  { seq: 1, type: "block.started", index: 0, block: 0, start: 0, end: 3 },
  { seq: 2, type: "step", index: 0, block: 0, step: 0, commits: [commit(2)] },
  { seq: 3, type: "step", index: 0, block: 0, step: 1, commits: [commit(0), commit(1)] },
  { seq: 4, type: "block.sealed", index: 0, block: 0, start: 0, end: 3, text: "t0t1t2" },
  { seq: 5, type: "block.started", index: 0, block: 1, start: 3, end: 5 },
  { seq: 6, type: "step", index: 0, block: 1, step: 0, commits: [commit(4)] },
  { seq: 7, type: "step", index: 0, block: 1, step: 1, commits: [commit(3)] },
  { seq: 8, type: "block.sealed", index: 0, block: 1, start: 3, end: 5, text: "t3t4" },
  { seq: 9, type: "generation.done", steps: 4, blocks: 2, forward_passes: 4 },
];

const kinds = (state) => cellsOf(state).map((cell) => cell.kind);

test("nothing has happened before the first event", () => {
  const state = replay(EVENTS, 0);
  assert.equal(state.phase, "empty");
  assert.deepEqual(cellsOf(state), []);
  assert.deepEqual(progress(state), { filled: 0, total: 0, block: 0 });
});

test("the prompt's tail stands before the first block's masks", () => {
  assert.deepEqual(kinds(replay(EVENTS, 2)), ["prompt", "mask", "mask", "mask"]);
});

test("positions fill in the order of their commits and only the last step's are new", () => {
  const once = replay(EVENTS, 3);
  assert.deepEqual(kinds(once), ["prompt", "mask", "mask", "token"]);
  assert.deepEqual([...once.landed], [2]);
  const twice = replay(EVENTS, 4);
  assert.deepEqual(kinds(twice), ["prompt", "token", "token", "token"]);
  assert.deepEqual([...twice.landed], [0, 1]);
  assert.deepEqual([0, 1, 2].map((position) => twice.tokens.get(position).order), [1, 2, 0]);
});

test("a sealed block becomes prose in the order of positions", () => {
  assert.deepEqual(proseTokens(replay(EVENTS, 4)), []);
  const sealed = replay(EVENTS, 5);
  assert.deepEqual(proseTokens(sealed).map((token) => token.token), ["t0", "t1", "t2"]);
  assert.deepEqual(proseTokens(sealed, 2).map((token) => token.token), ["t0", "t1"]);
});

test("a later block has no prompt, and cells behind its end are outside", () => {
  const state = replay(EVENTS, 7);
  assert.equal(currentBlock(state).block, 1);
  assert.deepEqual(kinds(state), ["mask", "token", "outside", "outside"]);
  assert.deepEqual(progress(state), { filled: 1, total: 2, block: 1 });
});

test("the end brings the summary and leaves nothing new", () => {
  const state = replay(EVENTS);
  assert.equal(state.phase, "done");
  assert.equal(state.summary.forward_passes, 4);
  assert.equal(state.landed.size, 0);
  assert.equal(proseTokens(state).length, 5);
});

test("every prefix gives the same state however often and in whatever order it is asked for", () => {
  const forward = EVENTS.map((_, i) => replay(EVENTS, i));
  const backward = EVENTS.map((_, i) => replay(EVENTS, EVENTS.length - 1 - i)).reverse();
  assert.deepEqual(forward, backward);
});

test("the first word at a position stays when an event comes twice", () => {
  const again = { seq: 3, type: "step", index: 0, block: 0, step: 1, commits: [commit(2, "other")] };
  const state = replay([...EVENTS.slice(0, 3), again]);
  assert.equal(state.tokens.get(2).token, "t2");
  assert.equal(state.landed.size, 0);
});

test("gaps in the sequence numbers are counted as lost events", () => {
  assert.equal(replay(EVENTS).lost, 0);
  assert.equal(replay(EVENTS.filter((event) => event.seq !== 3 && event.seq !== 4)).lost, 2);
});

test("events of another choice are left out, and the end counts for all", () => {
  const other = { seq: 4, type: "step", index: 1, block: 0, step: 0, commits: [commit(0, "other")] };
  const state = replay([...EVENTS.slice(0, 3), { ...other, seq: 3 }]);
  assert.equal(state.tokens.has(0), false);
  assert.equal(replay([...EVENTS.slice(0, 3), { ...other, seq: 3 }], 4, 1).tokens.get(0).token, "other");
});
