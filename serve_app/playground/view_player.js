// The controls of the display: play, pause, steps, place, speed, and how far it has come. Knows the player and the
// events; what they show is drawn elsewhere.

import { html, useEffect, useRef, useState } from "./html.js";
import { savings } from "./attribution.js";
import { startClock } from "./generate.js";
import { Icon } from "./icons.js";
import { SPEEDS, seek, stepFrom, toggle } from "./player.js";
import { progress } from "./replay.js";
import { available, isAtEnd, isBusy, isRevealed, player, runs, shown } from "./store.js";
import { count, percent } from "./text.js";

const SPOKEN_EVERY_MS = 2500;

/** Play, scrub and speed, with a line that says where the display is. */
export function Player() {
  const isPlaying = player.value.isPlaying && !isAtEnd.value;
  const label = isPlaying ? "Pause" : isAtEnd.value ? "Replay" : "Play";
  const icon = isPlaying ? "pause" : isAtEnd.value ? "replay" : "play";
  const go = (direction) => {
    const { events } = runs.value.main;
    player.value = seek(player.value, stepFrom(events, player.value.cursor, direction), available.value);
  };
  return html`<div class="player" role="group" aria-label="Replay">
    <button type="button" class="icon-button" aria-label="Previous step" title="Previous step" onClick=${() => go(-1)}>
      <${Icon} name="back" />
    </button>
    <button
      type="button"
      class="icon-button is-strong"
      aria-label=${label}
      title=${label}
      data-testid="play"
      onClick=${() => {
        player.value = toggle(player.value, available.value, !isBusy.value);
        startClock();
      }}
    >
      <${Icon} name=${icon} />
    </button>
    <button type="button" class="icon-button" aria-label="Next step" title="Next step" onClick=${() => go(1)}>
      <${Icon} name="forward" />
    </button>
    <input
      type="range"
      class="scrub"
      aria-label="Place in the recorded steps"
      aria-valuetext=${stepLine()}
      min="0"
      max=${available.value}
      value=${player.value.cursor}
      style=${{ "--fill": available.value ? player.value.cursor / available.value : 0 }}
      onInput=${(event) => {
        player.value = seek(player.value, Number(event.target.value), available.value);
      }}
    />
    <label class="speed">
      <span class="sr-only">Speed</span>
      <select
        value=${player.value.speed}
        onChange=${(event) => {
          player.value = { ...player.value, speed: event.target.value };
          startClock();
        }}
      >
        ${SPEEDS.map((speed) => html`<option key=${speed.id} value=${speed.id}>${speed.label}</option>`)}
      </select>
    </label>
    <p class="step-line" data-testid="steps">${stepLine()}</p>
    <${Announcer} />
  </div>`;
}

function stepLine() {
  const state = shown.value.main;
  if (!state || state.phase === "empty") return runs.value.main?.status === "waiting" ? "Waiting for its turn" : "";
  const { filled, total, block } = progress(state);
  const blocks = state.blocks.length ? `block ${block + 1}: ${filled} of ${total} filled` : "";
  return `step ${state.steps} \u00b7 ${blocks}`;
}

/** Says the step line to screen readers, seldom enough to be listened to. */
function Announcer() {
  const [spoken, setSpoken] = useState("");
  const latest = useRef("");
  latest.current = isAtEnd.value ? endLine() : stepLine();
  useEffect(() => {
    const timer = setInterval(() => setSpoken(latest.current), SPOKEN_EVERY_MS);
    return () => clearInterval(timer);
  }, []);
  return html`<p class="sr-only" role="status" aria-live="polite">${spoken}</p>`;
}

function endLine() {
  const run = runs.value.main;
  if (!run) return "";
  if (run.status === "stopped") return "Stopped";
  if (run.status === "failed") return "Failed";
  return `Done: ${count(run.usage?.completion_tokens ?? 0, "token")}. ${run.text}`;
}

/** What a finished run took: tokens, steps, passes and what was saved. */
export function RunFacts({ run }) {
  const summary = run.events.find((event) => event.type === "generation.done");
  if (!summary || !run.usage || !isRevealed.value) return null;
  const { tokens, steps, passes, saved } = savings(summary)(run.usage.completion_tokens);
  const parts = [count(tokens, "token"), count(steps, "denoising step"), count(passes, "forward pass", "forward passes")];
  return html`<p class="run-facts" data-testid="facts">
    ${parts.join(" \u00b7 ")}
    ${saved > 0 &&
    html`<strong class="saved">${` \u00b7 ${saved} saved (${percent(saved / tokens)})`}</strong>`}
    <span class="quiet">${` \u00b7 seed ${summary.seed} \u00b7 sampler ${summary.sampler}`}</span>
  </p>`;
}
