// Starting, recording and stopping generations. Knows what a stream's chunks mean; everything that comes is kept, and
// the display follows at its own pace.

import { ApiError, askIfThere, askStream } from "./api.js";
import { batch } from "./html.js";
import { START, tick } from "./player.js";
import { buildRequest, isSteered, randomSeed } from "./request.js";
import {
  apiKey,
  asked,
  available,
  conversation,
  isBusy,
  lit,
  newRun,
  player,
  runs,
  selection,
  server,
  set,
  settings,
} from "./store.js";

let controller = null;

/** Begin anew with the settings as they are; what still runs is stopped. Resolves when all of it has ended. */
export async function generate() {
  stop();
  if (!settings.value.isSeedLocked) set({ seed: randomSeed() });
  const { model, capabilities } = server.value;
  const isChat = settings.value.isChat && capabilities.isChat;
  const messages = isChat ? [...pastTurns(), { role: "user", content: settings.value.prompt }] : null;
  const ask = (lane) => {
    const { path, body } = buildRequest(asked.value, { model, messages, isBaseline: lane === "baseline" });
    return newRun(lane, path, body);
  };
  const isComparing = settings.value.isComparing && isSteered(asked.value);
  controller = new AbortController();
  const started = { main: ask("main"), baseline: isComparing ? ask("baseline") : null };
  batch(() => {
    if (isChat) conversation.value = messages.slice(0, -1);
    runs.value = started;
    player.value = { ...START, speed: player.value.speed };
    selection.value = null;
    lit.value = null;
  });
  if (isChat) set({ prompt: "" });
  startClock();
  const { signal } = controller;
  const present = Object.values(started).filter((run) => run !== null);
  await Promise.all([...present.map((run) => record(run, signal)), capabilities.hasTokenize && namePrompt(present, signal)]);
  // What was said and not answered can be said again.
  if (isChat && started.main.status !== "done" && settings.value.prompt === "") set({ prompt: messages.at(-1).content });
}

/** Learn how the prompt falls into tokens, so that its tail can be shown on the canvas. */
async function namePrompt(present, signal) {
  const { prompt, messages } = present[0].body;
  const body = { ...(messages ? { messages } : { prompt }), return_token_strs: true };
  const answer = await askIfThere("tokenize", { body, key: apiKey.value, signal }).catch(() => null);
  if (answer?.token_strs) for (const run of present) publish(run, { promptTokens: answer.token_strs });
}

/** End what runs. The server cancels it when the connection closes. */
export function stop() {
  controller?.abort();
  controller = null;
}

/** Turns of the chat up to now, the last answer included. */
function pastTurns() {
  const last = runs.value.main;
  if (!last?.body.messages) return conversation.value;
  const hasAnswer = last.status === "done" && last.text !== "";
  return hasAnswer ? [...last.body.messages, { role: "assistant", content: last.text }] : conversation.value;
}

/** Forget the chat and what is shown. */
export function startOver() {
  stop();
  batch(() => {
    conversation.value = [];
    runs.value = { main: null, baseline: null };
    selection.value = null;
    lit.value = null;
  });
}

async function record(run, signal) {
  try {
    await askStream(run.path, {
      body: run.body,
      key: apiKey.value,
      signal,
      onOpen: (requestId) => publish(run, { status: "streaming", requestId }),
      onChunk: (chunk) => take(run, chunk),
    });
    publish(run, { status: "done" });
  } catch (error) {
    if (signal.aborted) publish(run, { status: "stopped" });
    else if (error instanceof ApiError) publish(run, { status: "failed", error, requestId: error.requestId });
    else throw error;
  }
}

function take(run, chunk) {
  run.raw.push(chunk);
  const changes = {};
  const choice = chunk.choices?.[0];
  if (choice) {
    changes.text = run.text + (choice.text ?? choice.delta?.content ?? "");
    changes.finishReason = choice.finish_reason ?? run.finishReason;
  }
  if (chunk.diffusion?.type) run.events.push(chunk.diffusion);
  if (chunk.attribution) changes.attribution = chunk.attribution[0] ?? null;
  if (chunk.steering) changes.steering = chunk.steering;
  if (chunk.usage) changes.usage = chunk.usage;
  publish(run, changes);
}

/** Put changes on the run, and the run on show if it has not been replaced by a later one. */
function publish(run, changes) {
  Object.assign(run, changes);
  if (runs.value[run.lane] === run) scheduleRuns();
}

let isScheduled = false;

/** Tell of new chunks once a frame, however many there were. */
function scheduleRuns() {
  if (isScheduled) return;
  isScheduled = true;
  // A timer and not a frame: a hidden tab has no frames, and its answer ends all the same.
  setTimeout(() => {
    isScheduled = false;
    runs.value = { ...runs.value };
  }, 16);
}

let clock = null;

/** Let the display follow until it has shown everything or is paused. */
export function startClock() {
  if (clock !== null) return;
  let before = performance.now();
  const frame = (now) => {
    player.value = tick(player.value, (now - before) / 1000, available.value);
    before = now;
    const isFollowing = player.value.isPlaying && (isBusy.value || player.value.cursor < available.value);
    clock = isFollowing ? requestAnimationFrame(frame) : null;
  };
  clock = requestAnimationFrame(frame);
}
