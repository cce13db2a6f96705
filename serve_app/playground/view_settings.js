// How text is drawn: policy, length, seed, sampling. Knows the controls of the remaining settings.

import { html } from "./html.js";
import { POLICIES, canGuide } from "./request.js";
import { apiKey, server, set, settings } from "./store.js";

/** The card of decoding settings. */
export function DecodingPanel() {
  return html`<section class="card" aria-label="Decoding">
    <h2>Decode</h2>
    <${Policy} />
    <details class="more">
      <summary>Sampling</summary>
      <div class="fields">
        <${OptionalNumber} label="Temperature" name="temperature" max="100" step="0.1" placeholder="adaptive" />
        <${OptionalNumber} label="Top p" name="topP" max="1" step="0.05" placeholder="adaptive" />
        ${settings.value.policy !== "lossless" &&
        html`<${OptionalNumber}
          label="Tokens a step, at most"
          name="tokensPerStep"
          min="1"
          max="1024"
          step="1"
          placeholder=${settings.value.policy === "confidence" ? "1" : "no limit"}
        />`}
        ${server.value.capabilities.hasGuidance && html`<${Guidance} />`}
        <${KeyField} id="key" />
      </div>
      <p class="quiet">With neither temperature nor top p the temperature follows the entropy.</p>
    </details>
  </section>`;
}

/** How far words are pushed toward the prompt. A policy without it leaves the number for when another is chosen. */
function Guidance() {
  if (!canGuide(settings.value.policy)) {
    return html`<label>Guidance <input type="number" disabled placeholder="off" /></label>
      ${settings.value.guidance > 0 && html`<p class="quiet">The lossless policy takes no guidance.</p>`}`;
  }
  return html`<${OptionalNumber} label="Guidance" name="guidance" max="100" step="0.5" placeholder="0, off" />
    ${settings.value.guidance > 0 &&
    html`<p class="quiet">Guidance pushes each word closer to the prompt, for about twice the work.</p>`}`;
}

function Policy() {
  const allowed = POLICIES.filter((policy) => server.value.capabilities.policies.includes(policy.id));
  const policy = POLICIES.find((item) => item.id === settings.value.policy);
  const { parameter } = policy;
  return html`<div class="fields">
    <label class=${parameter ? "" : "is-wide"}>
      Policy
      <select
        data-testid="policy"
        value=${policy.id}
        onChange=${(event) => set({ policy: event.target.value, policyValue: null, tokensPerStep: null })}
      >
        ${allowed.map((item) => html`<option key=${item.id} value=${item.id}>${item.label}</option>`)}
      </select>
    </label>
    ${parameter &&
    html`<label>
      ${policy.label}
      <input
        type="number"
        min=${parameter.min}
        max=${parameter.max}
        step=${parameter.step}
        value=${settings.value.policyValue ?? parameter.fallback}
        onChange=${(event) => set({ policyValue: within(event.target.value, parameter) })}
      />
    </label>`}
    <p class="quiet">${policy.hint}</p>
  </div>`;
}

function within(text, { min, max, fallback }) {
  const value = Number(text);
  return text === "" || !Number.isFinite(value) ? fallback : Math.max(min, Math.min(max, value));
}

function OptionalNumber({ label, name, min = "0", max, step, placeholder }) {
  return html`<label>
    ${label}
    <input
      type="number"
      min=${min}
      max=${max}
      step=${step}
      placeholder=${placeholder}
      value=${settings.value[name] ?? ""}
      onChange=${(event) => {
        const value = event.target.value === "" ? null : Number(event.target.value);
        set({ [name]: value === null ? null : Math.max(Number(min), Math.min(Number(max), value)) });
      }}
    />
  </label>`;
}

/** Where a key is given to a server that asks for one. It is kept in this page and goes nowhere else. */
export function KeyField({ id }) {
  return html`<form
    class="key-field"
    onSubmit=${(event) => {
      event.preventDefault();
      apiKey.value = event.target.elements[id].value;
    }}
  >
    <label for=${id}>API key</label>
    <span class="row">
      <input id=${id} class="grow" type="password" autocomplete="off" placeholder="if the server asks" value=${apiKey.value} />
      <button type="submit" class="button">Use</button>
    </span>
  </form>`;
}
