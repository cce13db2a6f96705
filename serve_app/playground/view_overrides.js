// Concept weights that are set in place of the model's own. Knows the controls of the settings' `overrides`; shown only
// where the server has overrides.

import { html, useEffect, useRef, useState } from "./html.js";
import { headOf } from "./capabilities.js";
import { findConcepts } from "./concept_facts.js";
import { CloseButton } from "./icons.js";
import { OVERRIDE_MODES } from "./request.js";
import { server, set, settings } from "./store.js";
import { conceptName } from "./text.js";
import { Mark, addOverride } from "./view_concepts.js";
import { ConceptSearch, focusSearch } from "./view_search.js";

const LIMIT = 1000;

/** Folded away until somebody opens it or sets a weight elsewhere. */
export function Overrides() {
  const { overrides } = settings.value;
  const [isOpen, setOpen] = useState(false);
  const before = useRef(overrides.length);
  useEffect(() => {
    if (overrides.length > before.current) setOpen(true);
    before.current = overrides.length;
  }, [overrides.length]);
  return html`<details
    class="more overrides has-search"
    data-testid="overrides"
    open=${isOpen}
    onToggle=${(event) => setOpen(event.target.open)}
  >
    <summary>Concept weights${overrides.length > 0 && ` (${overrides.length} set)`}</summary>
    ${isOpen && html`<${Content} />`}
  </details>`;
}

function Content() {
  const { overrides, overrideMode } = settings.value;
  return html`<div class="override-list">
    <p class="quiet">Set how present a concept is, in place of what the model finds: 0 is not at all, 1 fully.</p>
    <${ConceptSearch}
      label="Find a concept whose weight to set"
      placeholder="Name or number, both heads"
      find=${findConcepts}
      onChoose=${addOverride}
      hasHeads=${true}
    />
    ${overrides.map((item) => html`<${Weight} key=${item.id} item=${item} />`)}
    ${overrides.length > 0 && html`<${Mode} chosen=${OVERRIDE_MODES.find((mode) => mode.id === overrideMode)} />`}
  </div>`;
}

function Weight({ item }) {
  const head = headOf(item.id, server.value.capabilities);
  const name = conceptName({ ...item, head });
  const change = (text) => {
    const weight = Math.max(-LIMIT, Math.min(LIMIT, Number(text)));
    if (text === "" || !Number.isFinite(weight)) return;
    set({ overrides: settings.value.overrides.map((other) => (other.id === item.id ? { ...other, weight } : other)) });
  };
  return html`<div class="slider" role="group" aria-label=${`Set the weight of the ${head} concept ${name}`} data-testid="override">
    <div class="slider-head">
      <${Mark} of=${head} />
      <bdi class="slider-name">${name}</bdi>
      <input
        type="number"
        class="slider-number"
        aria-label=${`Weight of ${name}`}
        title="The model's own lie between 0 and 1; more and less are allowed"
        min=${-LIMIT}
        max=${LIMIT}
        step="0.05"
        value=${item.weight}
        onChange=${(event) => change(event.target.value)}
      />
      <${CloseButton}
        label=${`Leave the weight of ${name}`}
        onClick=${(event) => {
          focusSearch(event);
          set({ overrides: settings.value.overrides.filter((other) => other.id !== item.id) });
        }}
      />
    </div>
    <input
      type="range"
      aria-label=${`Weight of ${name}, by slider`}
      min="0"
      max="1"
      step="0.05"
      value=${item.weight}
      style=${{ "--fill": Math.max(0, Math.min(1, item.weight)) }}
      onInput=${(event) => change(event.target.value)}
    />
  </div>`;
}

function Mode({ chosen }) {
  return html`<div class="fields">
    <label class="is-wide">
      Mode of all weights
      <select
        data-testid="override-mode"
        value=${chosen.id}
        onChange=${(event) => set({ overrideMode: event.target.value })}
      >
        ${OVERRIDE_MODES.map((mode) => html`<option key=${mode.id} value=${mode.id}>${mode.id}</option>`)}
      </select>
    </label>
    <p class="quiet">${chosen.hint}</p>
  </div>`;
}
