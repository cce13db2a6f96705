// Steering: find a concept, set how strongly, suppress. Knows the controls of the settings' `steers` and `suppress`.

import { html, useEffect, useId, useRef, useState } from "./html.js";
import { searchConcepts } from "./concept_facts.js";
import { Icon } from "./icons.js";
import { server, set, settings } from "./store.js";
import { conceptName } from "./text.js";
import { addSteer, addSuppression } from "./view_concepts.js";
import { Presets } from "./view_presets.js";

const RANGE = { logits: { limit: 12, step: 0.5 }, raw: { limit: 40, step: 1 } };
const WAIT_MS = 150;

/** The steering card. */
export function SteerPanel() {
  const { steers, suppress, preset } = settings.value;
  const isEmpty = steers.length === 0 && suppress.length === 0 && preset === null;
  return html`<section class="card" aria-label="Steering">
    <h2>Steer</h2>
    <${ConceptSearch} />
    ${isEmpty && html`<p class="quiet">Find a concept and set how strongly the text should lean to it, or away.</p>`}
    ${steers.map((steer) => html`<${Slider} key=${steer.id} steer=${steer} />`)}
    ${suppress.map((item) => html`<${Suppression} key=${item.id} item=${item} />`)}
    <label class=${`check${isEmpty ? " is-off" : ""}`}>
      <input
        type="checkbox"
        checked=${settings.value.isComparing}
        onChange=${(event) => set({ isComparing: event.target.checked })}
      />
      Show the unsteered text beside it
    </label>
    ${server.value.capabilities.hasPresets && html`<${Presets} />`}
  </section>`;
}

/** A combobox over the server's concept search. */
function ConceptSearch() {
  const [query, setQuery] = useState("");
  const [found, setFound] = useState(null);
  const [at, setAt] = useState(0);
  const input = useRef(null);
  const id = useId();
  useEffect(() => {
    if (query.trim() === "") {
      setFound(null);
      return undefined;
    }
    const controller = new AbortController();
    const timer = setTimeout(async () => {
      try {
        setFound(await searchConcepts(query, controller.signal));
        setAt(0);
      } catch (error) {
        if (!controller.signal.aborted) setFound({ error });
      }
    }, WAIT_MS);
    return () => {
      clearTimeout(timer);
      controller.abort();
    };
  }, [query]);
  const results = Array.isArray(found) ? found : [];
  const choose = (concept, act = addSteer) => {
    act(concept);
    setQuery("");
    input.current.focus();
  };
  const onKeyDown = (event) => {
    if (event.key === "Escape") setQuery("");
    if (results.length === 0) return;
    if (event.key === "Enter") choose(results[at]);
    else if (event.key === "ArrowDown") setAt((at + 1) % results.length);
    else if (event.key === "ArrowUp") setAt((at + results.length - 1) % results.length);
    else return;
    event.preventDefault();
  };
  return html`<div class="search">
    <label class="sr-only" for=${`${id}-input`}>Find a concept to steer by</label>
    <span class="search-box">
      <${Icon} name="search" />
      <input
        ref=${input}
        id=${`${id}-input`}
        type="text"
        role="combobox"
        autocomplete="off"
        spellcheck=${false}
        placeholder="Find a concept: animal, music, law"
        aria-expanded=${results.length > 0}
        aria-controls=${`${id}-list`}
        aria-activedescendant=${results.length ? `${id}-${at}` : undefined}
        value=${query}
        onInput=${(event) => setQuery(event.target.value)}
        onKeyDown=${onKeyDown}
      />
    </span>
    <ul id=${`${id}-list`} class="results" role="listbox" aria-label="Concepts found" hidden=${results.length === 0}>
      ${results.map(
        (concept, i) =>
          html`<li
            key=${concept.id}
            id=${`${id}-${i}`}
            role="option"
            aria-selected=${i === at}
            onMouseDown=${(event) => event.preventDefault()}
            onClick=${() => choose(concept)}
          >
            <strong><bdi>${conceptName(concept)}</bdi></strong>
            <small class="quiet"><bdi>${concept.description ?? `concept ${concept.id}`}</bdi></small>
          </li>`,
      )}
    </ul>
    ${found !== null && results.length === 0 && html`<p class="quiet" role="status">${sayNothingFound(found, query)}</p>`}
  </div>`;
}

function sayNothingFound(found, query) {
  return found.error ? `The search failed: ${found.error.message}` : `No concept matches "${query.trim()}".`;
}

function change(id, changes) {
  set({ steers: settings.value.steers.map((steer) => (steer.id === id ? { ...steer, ...changes } : steer)) });
}

function Slider({ steer }) {
  const name = conceptName({ ...steer, head: "known" });
  const { limit, step } = RANGE[steer.unit];
  const strength = (value) => {
    const number = Number(value);
    if (value !== "" && Number.isFinite(number)) change(steer.id, { strength: Math.max(-1000, Math.min(1000, number)) });
  };
  return html`<div class="slider" role="group" aria-label=${`Steer by ${name}`} data-testid="slider">
    <div class="slider-head">
      <span class="swatch swatch-known" aria-hidden="true"></span>
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
      <button type="button" class="icon-button" aria-label=${`Remove ${name}`} onClick=${() => remove("steers", steer.id)}>
        <${Icon} name="close" />
      </button>
    </div>
  </div>`;
}

/** The coloured part of a slider's track: from zero to the thumb. */
function fill(share) {
  const at = 0.5 + Math.max(-1, Math.min(1, share)) / 2;
  return { "--from": Math.min(at, 0.5), "--fill": Math.max(at, 0.5) };
}

function SliderMore({ steer, name }) {
  const { numLayers } = server.value.capabilities;
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
        <option value="fixed">all of the text</option>
        <option value="hard_cutoff">the first tokens</option>
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
    <button
      type="button"
      class="button"
      onClick=${() => {
        remove("steers", steer.id);
        addSuppression({ id: steer.id, name: steer.name, head: "known" });
      }}
    >
      Suppress instead
    </button>
  </div>`;
}

function wholeOrNull(text) {
  const value = Number(text);
  return text !== "" && Number.isInteger(value) && value >= 0 ? value : null;
}

function remove(list, id) {
  set({ [list]: settings.value[list].filter((item) => item.id !== id) });
}

function Suppression({ item }) {
  const name = conceptName({ head: "known", ...item });
  return html`<div class="slider is-suppressed" role="group" aria-label=${`Suppress ${name}`}>
    <div class="slider-head">
      <span class="tag">suppress</span>
      <bdi class="slider-name">${name}</bdi>
      <input
        type="number"
        class="slider-number"
        aria-label=${`Strength of suppressing ${name}`}
        min="0"
        max="1000"
        step="1"
        value=${item.strength}
        onChange=${(event) => {
          const strength = Math.max(0, Math.min(1000, Number(event.target.value) || 0));
          set({ suppress: settings.value.suppress.map((other) => (other.id === item.id ? { ...other, strength } : other)) });
        }}
      />
      <button
        type="button"
        class="icon-button"
        aria-label=${`Stop suppressing ${name}`}
        onClick=${() => remove("suppress", item.id)}
      >
        <${Icon} name="close" />
      </button>
    </div>
  </div>`;
}
