// The page: asks the server who it is, puts the parts in their places, and keeps light and dark. Knows all parts and
// none of their details.

import { askIfThere, askJson } from "./api.js";
import { readCapabilities } from "./capabilities.js";
import { forgetFailures } from "./concept_facts.js";
import { html, render, signal, useEffect } from "./html.js";
import { Icon, Logo } from "./icons.js";
import { toFragment } from "./share.js";
import { activeLanes, apiKey, conversation, dialog, runs, server, settings, toast } from "./store.js";
import { Lane } from "./view_canvas.js";
import { Chunks } from "./view_chunks.js";
import { Composer } from "./view_composer.js";
import { ConceptList, LitConcept, shownLane } from "./view_concepts.js";
import { Dialogs, copy } from "./view_dialogs.js";
import { ErrorCard, ServerState } from "./view_error.js";
import { Player, RunFacts } from "./view_player.js";
import { DecodingPanel } from "./view_settings.js";
import { SteerPanel } from "./view_steer.js";
import { TokenPanel } from "./view_token.js";

const ASK_AGAIN_MS = 4000;
const TOAST_MS = 4000;
const theme = signal(document.documentElement.dataset.theme ?? "");

/** Learn what the server is, unless that is known and it is ready still. */
async function meetServer() {
  const key = apiKey.value;
  try {
    await askJson("ready", { key });
    if (server.value.state === "ready") return;
    const model = (await askJson("v1/models", { key })).data?.[0];
    const capabilities = await askIfThere("v1/capabilities", { key });
    forgetFailures();
    server.value = {
      state: "ready",
      model: model?.id ?? null,
      contextLength: model?.max_model_len ?? null,
      capabilities: readCapabilities(capabilities),
    };
  } catch (error) {
    const state = { 401: "locked", 503: "starting" }[error.status] ?? "away";
    server.value = { ...server.value, state };
  }
}

/** Meet the server again and again; often while it is not ready. */
async function keepMeeting() {
  await meetServer();
  const isAway = server.value.state !== "ready";
  const hasFailed = activeLanes.value.some((lane) => runs.value[lane].error?.code === "server_away");
  setTimeout(keepMeeting, isAway || hasFailed ? ASK_AGAIN_MS : ASK_AGAIN_MS * 5);
}

function Header() {
  const isDark = theme.value === "dark" || (theme.value === "" && matchMedia("(prefers-color-scheme: dark)").matches);
  const turn = () => {
    theme.value = isDark ? "light" : "dark";
    document.documentElement.dataset.theme = theme.value;
    localStorage.setItem("theme", theme.value);
  };
  const share = () => {
    history.replaceState(null, "", toFragment(settings.value));
    copy(location.href, "Link");
  };
  return html`<header class="top">
    <h1><${Logo} />Glassblock</h1>
    <p class="model"><bdi>${server.value.model ?? ""}</bdi> <${ServerState} /></p>
    <nav aria-label="Page">
      <button type="button" class="button is-plain" onClick=${share}><${Icon} name="share" /><span>Share</span></button>
      <button type="button" class="button is-plain" onClick=${() => (dialog.value = "code")}>
        <${Icon} name="code" /><span>Code</span>
      </button>
      <button type="button" class="button is-plain" onClick=${() => (dialog.value = "raw")}>
        <${Icon} name="raw" /><span>Raw</span>
      </button>
      <button type="button" class="icon-button" aria-label=${isDark ? "Light colours" : "Dark colours"} onClick=${turn}>
        <${Icon} name=${isDark ? "sun" : "moon"} />
      </button>
    </nav>
  </header>`;
}

function Output() {
  const lanes = activeLanes.value;
  if (lanes.length === 0) return html`<${Welcome} />`;
  const titles = { main: "Steered", baseline: "Unsteered, same seed" };
  return html`<section class="card output" aria-label="Text">
    <${Player} />
    <${Turns} />
    <div class=${`lanes${lanes.length > 1 ? " is-pair" : ""}`}>
      ${lanes.map(
        (lane) =>
          html`<div key=${lane}>
            <${Lane} lane=${lane} title=${lanes.length > 1 ? titles[lane] : ""} />
            ${runs.value[lane].error && html`<${ErrorCard} run=${runs.value[lane]} />`}
            ${runs.value[lane].status === "stopped" && html`<p class="quiet" data-testid="stopped">Stopped.</p>`}
            <${RunFacts} run=${runs.value[lane]} />
          </div>`,
      )}
    </div>
  </section>`;
}

function Welcome() {
  return html`<section class="card output is-welcome" aria-label="Text">
    <p class="lead">
      This model writes in blocks that come into focus: every pass fills the places it is surest of, in any order. And
      every word passes through concepts that you can read, and steer by.
    </p>
    <p class="quiet">Press Generate, or try an example.</p>
    <div class="canvas is-empty" aria-hidden="true">
      ${Array.from({ length: 64 }, (_, i) => html`<span key=${i} class="cell is-mask"></span>`)}
    </div>
  </section>`;
}

/** The chat before the current answer; nothing outside a chat. */
function Turns() {
  const messages = runs.value.main?.body.messages;
  if (!messages) return null;
  return html`<ol class="turns" aria-label="Conversation">
    ${[...conversation.value, messages.at(-1)].map(
      (turn, i) => html`<li key=${i} class=${`turn turn-${turn.role}`}>
        <span class="turn-role">${turn.role === "user" ? "you" : "model"}</span>
        <p dir="auto">${turn.content}</p>
      </li>`,
    )}
  </ol>`;
}

/** Links where they lead somewhere. On a server that asks for a key they do not: a browser that follows one sends none. */
function Footer() {
  const links = html`<a href="docs">HTTP reference</a><a href="v1/models">v1/models</a>`;
  const models = html`<button type="button" class="link-button" onClick=${() => (dialog.value = "models")}>v1/models</button>
    <span>The HTTP reference, at docs, asks for the API key; a link sends none.</span>`;
  const none = html`<span>The HTTP reference, at docs, and v1/models ask for the API key.</span>`;
  return html`<footer class="quiet">
    <span>Glassblock</span>
    ${server.value.state === "locked" ? none : apiKey.value === "" ? links : models}
  </footer>`;
}

function Toast() {
  useEffect(() => {
    if (toast.value === "") return undefined;
    const timer = setTimeout(() => (toast.value = ""), TOAST_MS);
    return () => clearTimeout(timer);
  }, [toast.value]);
  return html`<p class=${`toast${toast.value === "" ? " is-away" : ""}`} role="status">${toast.value}</p>`;
}

function Page() {
  const lane = shownLane();
  return html`
    <a class="skip" href="#text">Skip to the text</a>
    <${Header} />
    <main>
      <div class="column-text" id="text" tabindex="-1"><${Composer} /><${Output} /><${Chunks} lane=${lane} /></div>
      <div class="column-why"><${TokenPanel} /><${LitConcept} lane=${lane} /><${ConceptList} lane=${lane} /></div>
      <div class="column-controls"><${SteerPanel} /><${DecodingPanel} /></div>
    </main>
    <${Footer} />
    <${Toast} />
    <${Dialogs} />
  `;
}

render(html`<${Page} />`, document.getElementById("page"));
keepMeeting();
// With another key the server may be another one.
apiKey.subscribe((key) => {
  if (key === "") return;
  server.value = { ...server.value, state: "connecting" };
  meetServer();
});
