// What the page knows, as signals. Holds settings, runs, the display's place in them and what is selected, with what
// follows from these; acts on nothing.

import { computed, signal } from "./html.js";
import { LEAST, servable } from "./capabilities.js";
import { FIRST } from "./examples.js";
import { START } from "./player.js";
import { proseTokens, replay } from "./replay.js";
import { DEFAULTS } from "./request.js";
import { fromFragment } from "./share.js";

/** The two texts that may stand side by side. */
export const LANES = ["main", "baseline"];

/** state: `connecting`, `ready`, `starting` (its engine is not up), `away` */
export const server = signal({ state: "connecting", model: null, contextLength: null, capabilities: LEAST });
export const settings = signal(fromFragment(location.hash) ?? { ...DEFAULTS, ...FIRST });
/** Lane -> run or null; see `newRun`. */
export const runs = signal({ main: null, baseline: null });
export const player = signal(START);
/** {lane, position} of the opened token, or null. */
export const selection = signal(null);
/** The concept whose tokens are lit: {id, name, head}, or null. */
export const lit = signal(null);
/** Which dialog is open: `code`, `raw`, `models`, or null. */
export const dialog = signal(null);
/** Turns of the chat before the current one: {role, content}. */
export const conversation = signal([]);
/** A short message that goes away by itself. */
export const toast = signal("");
/** For a gateway that asks for one; kept in this page only. */
export const apiKey = signal("");

/** One generation: what was asked and all that came. `events` and `raw` only ever grow. */
export function newRun(lane, path, body) {
  return {
    lane,
    path,
    body,
    status: "waiting",
    events: [],
    raw: [],
    text: "",
    error: null,
    requestId: null,
    usage: null,
    attribution: null,
    steering: null,
    finishReason: null,
    promptTokens: null,
  };
}

/** Change some of the settings. */
export function set(changes) {
  settings.value = { ...settings.value, ...changes };
}

/** The settings as far as the server can serve them: what requests are made of. */
export const asked = computed(() => servable(settings.value, server.value.capabilities));

export const isBusy = computed(() =>
  LANES.some((lane) => ["waiting", "streaming"].includes(runs.value[lane]?.status)),
);

/** Lanes that hold a run. */
export const activeLanes = computed(() => LANES.filter((lane) => runs.value[lane] !== null));

/** Events recorded, of the lane that has most. */
export const available = computed(() => Math.max(0, ...activeLanes.value.map((lane) => runs.value[lane].events.length)));

/** Lane -> what its canvas shows now. */
export const shown = computed(() =>
  Object.fromEntries(activeLanes.value.map((lane) => [lane, replay(runs.value[lane].events, player.value.cursor)])),
);

/** True once the display has reached the end of all that will come. */
export const isAtEnd = computed(() => !isBusy.value && player.value.cursor >= available.value);

/** True while the display does not run behind a finished answer: its end gives nothing away. */
export const isRevealed = computed(() => !isBusy.value && (isAtEnd.value || !player.value.isPlaying));

/** How many tokens a run's text has, Infinity while nobody knows. */
export function textLength(run) {
  return run.usage?.completion_tokens ?? Infinity;
}

/** Tokens of a lane that count as text so far: sealed ones and those on the canvas. */
export function landedTokens(lane) {
  const state = shown.value[lane];
  if (!state) return [];
  const limit = textLength(runs.value[lane]);
  return [...state.tokens.values()].filter((token) => token.position < limit);
}

/** Sealed tokens of a lane. */
export function sealedTokens(lane) {
  const state = shown.value[lane];
  return state ? proseTokens(state, textLength(runs.value[lane])) : [];
}

/** The full explanation of one token, null until the answer is complete. */
export function explanationOf(lane, position) {
  return runs.value[lane]?.attribution?.tokens?.[position] ?? null;
}
