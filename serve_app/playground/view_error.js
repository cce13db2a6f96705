// What went wrong, and what to do about it. Knows error codes that deserve words of their own.

import { html, useEffect, useState } from "./html.js";
import { generate } from "./generate.js";
import { server } from "./store.js";
import { KeyField } from "./view_settings.js";

const TITLES = {
  server_away: "The server is away",
  stream_cut: "The answer broke off",
  queue_full: "The queue is full",
  engine_unavailable: "The engine is not there yet",
  invalid_api_key: "An API key is needed",
  concept_not_found: "A concept is not there",
  concept_not_steerable: "A concept cannot be steered",
  context_length_exceeded: "Too long for the model",
};

/** The error of a run: in words, with code and request id, and a way to go on. */
export function ErrorCard({ run }) {
  const { error } = run;
  const title = TITLES[error.code] ?? (error.status >= 500 ? "The server failed" : "The request was refused");
  return html`<div class="card error-card" role="alert" data-testid="error">
    <h2>${title}</h2>
    <p><bdi>${error.message}</bdi></p>
    <dl class="error-facts">
      <div><dt>code</dt><dd><code data-testid="error-code">${error.code}</code></dd></div>
      ${error.status > 0 && html`<div><dt>status</dt><dd><code>${error.status}</code></dd></div>`}
      ${error.param && html`<div><dt>field</dt><dd><code>${error.param}</code></dd></div>`}
      ${error.requestId &&
      html`<div><dt>request id</dt><dd><code data-testid="request-id">${error.requestId}</code></dd></div>`}
    </dl>
    ${error.code === "invalid_api_key" && html`<${KeyField} id="key-after-error" />`}
    <${Retry} key=${error.requestId} seconds=${error.retryAfter} />
  </div>`;
}

/** A button to try again, which waits as long as the server asked. */
function Retry({ seconds }) {
  const [left, setLeft] = useState(seconds ?? 0);
  useEffect(() => {
    if (left <= 0) return undefined;
    const timer = setTimeout(() => setLeft(left - 1), 1000);
    return () => clearTimeout(timer);
  }, [left]);
  const isWaiting = left > 0;
  return html`<button type="button" class="button" aria-disabled=${isWaiting} onClick=${() => !isWaiting && generate()}>
    ${isWaiting ? `Try again in ${left} s` : "Try again"}
  </button>`;
}

const STATES = {
  connecting: { text: "connecting", about: "Asking the server who it is" },
  ready: { text: "ready", about: "The engine answers" },
  locked: { text: "needs a key", about: "The server answers only with an API key" },
  starting: { text: "starting", about: "The server is there, its engine is not ready" },
  away: { text: "away", about: "The server does not answer; asking again every few seconds" },
};

/** The server's state in a word, with a mark. */
export function ServerState() {
  const { state } = server.value;
  return html`<span class=${`state state-${state}`} role="status" title=${STATES[state].about} data-testid="state">
    <span class="state-mark" aria-hidden="true"></span>${STATES[state].text}
  </span>`;
}
