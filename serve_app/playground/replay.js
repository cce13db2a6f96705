// From recorded diffusion events to what a canvas shows after some of them. Knows the events' shapes and nothing of
// pages, time or servers. `replay` is a pure fold: the same events and the same `upTo` always give the same state, so
// pausing, scrubbing and replaying are all one question, asked with different numbers.

/**
 * What the first `upTo` events tell of one choice.
 *
 * tokens: position -> {position, token, bytes, token_id, confidence, concepts, block, step, order}
 * landed: positions that the latest step filled, empty once a later event says something else
 * lost: events that the sequence numbers show to be missing
 */
export function replay(events, upTo = events.length, index = 0) {
  const state = {
    phase: "empty",
    blockLength: 0,
    promptTail: 0,
    blocks: [],
    tokens: new Map(),
    landed: new Set(),
    steps: 0,
    lost: 0,
    summary: null,
  };
  let following = null;
  for (const event of events.slice(0, Math.max(0, upTo))) {
    if (following !== null && event.seq > following) state.lost += event.seq - following;
    following = event.seq + 1;
    if (event.type === "generation.done") {
      state.phase = "done";
      state.summary = event;
      state.landed = new Set();
    } else if ((event.index ?? 0) === index) {
      apply(state, event);
    }
  }
  return state;
}

function apply(state, event) {
  if (event.type === "generation.started") {
    state.phase = "running";
    state.blockLength = event.block_length;
    state.promptTail = event.prompt_tail ?? 0;
  } else if (event.type === "block.started") {
    state.blocks.push({ block: event.block, start: event.start, end: event.end, isSealed: false, text: "" });
    state.landed = new Set();
  } else if (event.type === "step") {
    state.landed = new Set();
    for (const commit of event.commits) {
      // The first word counts: a position is committed once, and a repeated event must not change it.
      if (state.tokens.has(commit.position)) continue;
      const order = state.tokens.size;
      state.tokens.set(commit.position, { ...commit, block: event.block, step: event.step, order });
      state.landed.add(commit.position);
    }
    state.steps += 1;
  } else if (event.type === "block.sealed") {
    const sealed = state.blocks.find((block) => block.block === event.block);
    if (sealed) Object.assign(sealed, { isSealed: true, text: event.text });
    state.landed = new Set();
  }
}

/** The block being filled, or the last one there was; null before the first. */
export function currentBlock(state) {
  return state.blocks.find((block) => !block.isSealed) ?? state.blocks.at(-1) ?? null;
}

/**
 * The canvas of a block: `blockLength` cells in order.
 *
 * kind: `prompt` (the prompt's tail, fixed), `mask`, `token`, or `outside` (behind the last position asked for).
 */
export function cellsOf(state, block = currentBlock(state)) {
  if (block === null) return [];
  const isFirst = block.start === state.blocks[0].start;
  const offset = isFirst ? state.promptTail : 0;
  return Array.from({ length: state.blockLength }, (_, i) => {
    const position = block.start - offset + i;
    if (position < block.start) return { kind: "prompt", position, token: null, isLanded: false };
    if (position >= block.end) return { kind: "outside", position, token: null, isLanded: false };
    const token = state.tokens.get(position) ?? null;
    return { kind: token ? "token" : "mask", position, token, isLanded: state.landed.has(position) };
  });
}

/** Tokens of sealed blocks, in order: what has become prose. `limit` cuts what lies behind the text's end. */
export function proseTokens(state, limit = Infinity) {
  const tokens = [];
  for (const block of state.blocks) {
    if (!block.isSealed) break;
    for (let position = block.start; position < Math.min(block.end, limit); position += 1) {
      if (state.tokens.has(position)) tokens.push(state.tokens.get(position));
    }
  }
  return tokens;
}

/** Positions filled and all positions of the current block. */
export function progress(state) {
  const block = currentBlock(state);
  if (block === null) return { filled: 0, total: 0, block: 0 };
  let filled = 0;
  for (let position = block.start; position < block.end; position += 1) filled += state.tokens.has(position) ? 1 : 0;
  return { filled, total: block.end - block.start, block: block.block };
}
