// What is asked: the prompt, the examples, length and seed, and the button. Knows how an example becomes settings.

import { html } from "./html.js";
import { findByName } from "./concept_facts.js";
import { EXAMPLES } from "./examples.js";
import { generate, startOver, stop } from "./generate.js";
import { Icon } from "./icons.js";
import { DEFAULTS, newSteer, randomSeed } from "./request.js";
import { conversation, isBusy, runs, server, set, settings, toast } from "./store.js";
import { KeyField } from "./view_settings.js";

/** The composer card. */
export function Composer() {
  const isChat = settings.value.isChat && server.value.capabilities.isChat;
  const isLocked = server.value.state === "locked";
  const onKeyDown = (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    generate();
  };
  return html`${isLocked && html`<div class="card"><${KeyField} id="first-key" /></div>`}<form
    class="card composer"
    aria-label="Prompt"
    onSubmit=${(event) => {
      event.preventDefault();
      if (isBusy.value) stop();
      else generate();
    }}
  >
    ${server.value.capabilities.isChat && html`<${Mode} isChat=${isChat} />`}
    <label class="sr-only" for="prompt">${isChat ? "Your message" : "Prompt to continue; it may be empty"}</label>
    <textarea
      id="prompt"
      rows="2"
      dir="auto"
      spellcheck=${false}
      placeholder=${isChat ? "Say something" : "Begin a text here, or leave it empty"}
      value=${settings.value.prompt}
      onInput=${(event) => set({ prompt: event.target.value })}
      onKeyDown=${onKeyDown}
    ></textarea>
    <div class="composer-row">
      <${Length} />
      <${Seed} />
      <button type="submit" class=${`button is-primary${isBusy.value ? " is-stop" : ""}`} data-testid="generate">
        <${Icon} name=${isBusy.value ? "stop" : "play"} />${isBusy.value ? "Stop" : "Generate"}
      </button>
    </div>
    <${Examples} />
  </form>`;
}

function Mode({ isChat }) {
  const choose = (value) => {
    startOver();
    set({ isChat: value });
  };
  return html`<div class="row" role="group" aria-label="Mode">
    <button type="button" class="button is-toggle" aria-pressed=${!isChat} onClick=${() => choose(false)}>Continue</button>
    <button type="button" class="button is-toggle" aria-pressed=${isChat} onClick=${() => choose(true)}>Chat</button>
    ${isChat &&
    (conversation.value.length > 0 || runs.value.main !== null) &&
    html`<button type="button" class="button" onClick=${startOver}>New chat</button>`}
  </div>`;
}

function Length() {
  const limit = server.value.capabilities.maxTokens ?? server.value.contextLength ?? 1024;
  return html`<label class="inline-field">
    Tokens
    <input
      type="number"
      id="max-tokens"
      min="1"
      max=${limit}
      value=${settings.value.maxTokens}
      onChange=${(event) => {
        const value = Math.round(Number(event.target.value));
        set({ maxTokens: value >= 1 ? Math.min(value, limit) : DEFAULTS.maxTokens });
      }}
    />
  </label>`;
}

function Seed() {
  const { seed, isSeedLocked } = settings.value;
  return html`<span class="inline-field">
    <label for="seed">Seed</label>
    <input
      type="number"
      id="seed"
      min="0"
      value=${seed}
      onChange=${(event) => {
        const value = Math.round(Number(event.target.value));
        if (event.target.value !== "" && value >= 0 && Number.isSafeInteger(value)) set({ seed: value });
      }}
    />
    <button
      type="button"
      class="icon-button"
      aria-label="Lock the seed"
      aria-pressed=${isSeedLocked}
      title=${isSeedLocked ? "Locked: the same seed every time" : "A new seed every time"}
      onClick=${() => set({ isSeedLocked: !isSeedLocked })}
    >
      <${Icon} name=${isSeedLocked ? "lock" : "unlock"} />
    </button>
    <button
      type="button"
      class="icon-button"
      aria-label="Roll a new seed"
      title="Roll a new seed"
      onClick=${() => set({ seed: randomSeed() % 100_000 })}
    >
      <${Icon} name="dice" />
    </button>
  </span>`;
}

function Examples() {
  return html`<div class="examples" role="group" aria-label="Examples">
    <span class="quiet">Try</span>
    ${EXAMPLES.map(
      (example) =>
        html`<button
          key=${example.id}
          type="button"
          class="chip-button"
          title=${example.about}
          data-testid=${`example-${example.id}`}
          onClick=${() => tryExample(example)}
        >
          ${example.title}
        </button>`,
    )}
  </div>`;
}

/** Take over an example's settings and generate at once. */
async function tryExample(example) {
  const found = await Promise.all(example.concepts.map(({ name }) => findByName(name)));
  if (found.includes(null)) {
    toast.value = `This model has no concept called ${example.concepts[found.indexOf(null)].name}.`;
    return;
  }
  const steers = found.map((concept, i) => newSteer(concept, example.concepts[i].strength));
  set({ ...DEFAULTS, ...example.settings, steers });
  await generate();
}
