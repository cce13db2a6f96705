// Steering: find a concept, set how strongly, suppress. Knows the controls of the settings' `steers` and `suppress`.

import { html } from "./html.js";
import { searchConcepts } from "./concept_facts.js";
import { CloseButton } from "./icons.js";
import { asked, server, set, settings } from "./store.js";
import { conceptName } from "./text.js";
import { Mark, SuppressToggle, addOverride, addSteer, suppressionOf } from "./view_concepts.js";
import { Overrides } from "./view_overrides.js";
import { Presets } from "./view_presets.js";
import { ConceptSearch, focusSearch } from "./view_search.js";

const RANGE = { logits: { limit: 12, step: 0.5 }, raw: { limit: 40, step: 1 } };

/** The steering card. */
export function SteerPanel() {
  const { steers, suppress, preset } = settings.value;
  const { hasOverrides, hasPresets } = server.value.capabilities;
  // A concept with a slider has its suppression beside that.
  const others = suppress.filter((item) => !steers.some((steer) => steer.id === item.id));
  const isEmpty = steers.length === 0 && suppress.length === 0 && preset === null && asked.value.overrides.length === 0;
  return html`<section class="card has-search" aria-label="Steering">
    <h2>Steer</h2>
    <${ConceptSearch}
      label="Find a concept to steer by"
      placeholder="Find animal, music, law"
      find=${searchConcepts}
      onChoose=${addSteer}
    />
    ${isEmpty && html`<p class="quiet">Find a concept and set how strongly the text should lean to it, or away.</p>`}
    ${steers.map((steer) => html`<${Slider} key=${steer.id} steer=${steer} />`)}
    ${others.map((item) => html`<${Suppression} key=${item.id} item=${item} />`)}
    ${hasOverrides && html`<${Overrides} />`}
    <label class=${`check${isEmpty ? " is-off" : ""}`}>
      <input
        type="checkbox"
        checked=${settings.value.isComparing}
        onChange=${(event) => set({ isComparing: event.target.checked })}
      />
      Show the unsteered text beside it
    </label>
    ${hasPresets && html`<${Presets} />`}
  </section>`;
}

function change(id, changes) {
  set({ steers: settings.value.steers.map((steer) => (steer.id === id ? { ...steer, ...changes } : steer)) });
}

function Slider({ steer }) {
  const suppression = suppressionOf(steer.id);
  const name = conceptName({ ...steer, head: "known" });
  const { limit, step } = RANGE[steer.unit];
  const strength = (value) => {
    const number = Number(value);
    if (value !== "" && Number.isFinite(number)) change(steer.id, { strength: Math.max(-1000, Math.min(1000, number)) });
  };
  return html`<div class="slider" role="group" aria-label=${`Steer by the known concept ${name}`} data-testid="slider">
    <div class="slider-head">
      <${Mark} of="known" />
      <bdi class="slider-name">${name}</bdi>
      <input
        type="number"
        class="slider-number"
        aria-label=${`Strength of ${name}`}
        step=${step}
        min="-1000"
        max="1000"
        value=${steer.strength}
        onChange=${(event) => strength(event.target.value)}
      />
      <select
        class="slider-unit"
        aria-label=${`Unit of ${name}`}
        value=${steer.unit}
        onChange=${(event) => change(steer.id, { unit: event.target.value })}
      >
        <option value="logits">logits</option>
        <option value="raw">raw</option>
      </select>
    </div>
    <div class="range-with-zero">
      <input
        type="range"
        aria-label=${`Strength of ${name}, by slider`}
        min=${-limit}
        max=${limit}
        step=${step}
        value=${steer.strength}
        style=${fill(steer.strength / limit)}
        onInput=${(event) => strength(event.target.value)}
      />
      <span class="scale" aria-hidden="true"><span>away</span><span>0</span><span>toward</span></span>
    </div>
    <div class="slider-foot">
      <details class="more">
        <summary>More</summary>
        <${SliderMore} steer=${steer} name=${name} />
      </details>
      <${SliderActions} steer=${steer} name=${name} suppression=${suppression} />
    </div>
    ${suppression &&
    steer.strength > 0 &&
    html`<p class="quiet">The slider leans toward it all the same; put it to 0 to suppress alone.</p>`}
  </div>`;
}

function SliderActions({ steer, name, suppression }) {
  const remove = (event) => {
    focusSearch(event);
    set({ steers: settings.value.steers.filter((other) => other.id !== steer.id) });
  };
  return html`<div class="slider-actions">
    <${SuppressToggle} concept=${{ ...steer, head: "known" }} text="Suppress" label=${`Suppress ${name}`} />
    ${suppression && html`<${SuppressionStrength} item=${suppression} name=${name} />`}
    <${CloseButton} label=${`Remove ${name}`} onClick=${remove} />
  </div>`;
}

/** The coloured part of a slider's track: from zero to the thumb. */
function fill(share) {
  const at = 0.5 + Math.max(-1, Math.min(1, share)) / 2;
  return { "--from": Math.min(at, 0.5), "--fill": Math.max(at, 0.5) };
}

function SliderMore({ steer, name }) {
  const { numLayers, hasOverrides } = server.value.capabilities;
  return html`<div class="fields">
    <label>
      From layer
      <input
        type="number"
        min="0"
        max=${numLayers ?? undefined}
        placeholder=${numLayers ? `default, of ${numLayers}` : "default"}
        value=${steer.layer ?? ""}
        onChange=${(event) => change(steer.id, { layer: wholeOrNull(event.target.value) })}
      />
    </label>
    <label>
      Schedule
      <select value=${steer.schedule} onChange=${(event) => change(steer.id, { schedule: event.target.value })}>
        <option value="fixed">whole text</option>
        <option value="hard_cutoff">first tokens</option>
      </select>
    </label>
    ${steer.schedule === "hard_cutoff" &&
    html`<label>
      Tokens
      <input
        type="number"
        min="1"
        value=${steer.cutoffTokens}
        onChange=${(event) => change(steer.id, { cutoffTokens: wholeOrNull(event.target.value) || 32 })}
      />
    </label>`}
    <label class="check">
      <input
        type="checkbox"
        checked=${steer.isGroup}
        onChange=${(event) => change(steer.id, { isGroup: event.target.checked })}
      />
      ${`with the whole group of ${name}`}
    </label>
    ${hasOverrides &&
    html`<button type="button" class="button" onClick=${() => addOverride(steer)}>Set its weight</button>`}
  </div>`;
}

function wholeOrNull(text) {
  const value = Number(text);
  return text !== "" && Number.isInteger(value) && value >= 0 ? value : null;
}

/** A suppressed concept without a slider; letting go of it takes it off the list. */
function Suppression({ item }) {
  const concept = { ...item, head: "known" };
  const name = conceptName(concept);
  return html`<div class="slider" role="group" aria-label=${`Suppressed: the known concept ${name}`} data-testid="suppression">
    <div class="slider-head">
      <${Mark} of="known" />
      <bdi class="slider-name">${name}</bdi>
      <${SuppressToggle}
        concept=${concept}
        text="Suppress"
        label=${`Suppress ${name}`}
        onRelease=${focusSearch}
      />
      <${SuppressionStrength} item=${item} name=${name} />
    </div>
  </div>`;
}

function SuppressionStrength({ item, name }) {
  const change = (text) => {
    const strength = Math.max(0, Math.min(1000, Number(text)));
    if (text === "" || !Number.isFinite(strength)) return;
    set({ suppress: settings.value.suppress.map((other) => (other.id === item.id ? { ...other, strength } : other)) });
  };
  return html`<input
    type="number"
    class="slider-number"
    aria-label=${`Strength of suppressing ${name}`}
    title="How strongly, for each unit of alignment"
    min="0"
    max="1000"
    step="1"
    value=${item.strength}
    onChange=${(event) => change(event.target.value)}
  />`;
}
