// Concepts beside the text: the list that builds up as words land, and the one that is lit. Knows how concepts are
// named, marked by head, and acted on.

import { html } from "./html.js";
import { diverging, drivenBy, tally } from "./attribution.js";
import { headOf } from "./capabilities.js";
import { factsOf } from "./concept_facts.js";
import { CloseButton, Icon } from "./icons.js";
import { newOverride, newSteer, newSuppression } from "./request.js";
import { handFocus } from "./roving.js";
import { isBusy, landedTokens, lit, runs, selection, server, set, settings, toast } from "./store.js";
import { cellText, conceptName, count, signed } from "./text.js";

const HEADS = ["known", "discovered"];
const LISTED = 6;
// The server refuses both for the same concepts.
const WHY_NOT = {
  known: "This concept is not steerable: it can be neither steered by nor suppressed.",
  discovered: "Discovered concepts can be neither steered by nor suppressed.",
};

/** The mark of a head or of epsilon: colour and pattern to see, the word to hear. */
export function Mark({ of }) {
  return html`<span class=${`swatch swatch-${of}`} aria-hidden="true"></span><span class="sr-only">${of}</span>`;
}

/** A concept as a button that lights its tokens: a mark for its head, its name, and tokens that stand for it. */
export function ConceptName({ concept, withTokens = false }) {
  const isLit = lit.value?.id === concept.id;
  // Without a name the tokens say what it is about; they are asked for only when the display is at rest.
  const top = withTokens && concept.name === null && !isBusy.value ? factsOf(concept.id).topTokens : null;
  return html`<button
    type="button"
    class="concept-name"
    aria-pressed=${isLit}
    title="Light up every word it drove"
    onClick=${() => {
      lit.value = isLit ? null : { id: concept.id, name: conceptName(concept), head: concept.head };
    }}
  >
    <${Mark} of=${concept.head} />
    <span class="concept-text"
      ><bdi>${conceptName(concept)}</bdi>${top?.length
        ? html`<small class="quiet"><bdi>${top.slice(0, 4).map(cellText).join(", ")}</bdi></small>`
        : null}</span
    >
  </button>`;
}

/** The strongest concepts of the words on show, of one lane. */
export function ConceptList({ lane }) {
  const all = tally(landedTokens(lane), runs.value[lane]?.attribution?.tokens);
  return html`<section class="card" aria-label="Concepts behind the text" data-testid="concepts">
    <h2>Concepts</h2>
    <${Legend} />
    ${all.length === 0
      ? html`<p class="quiet">They appear here as words land, with what they add in all to the words' logits.</p>`
      : HEADS.map((head) => html`<${HeadList} key=${head} head=${head} rows=${all.filter((row) => row.head === head)} />`)}
  </section>`;
}

function HeadList({ head, rows }) {
  // Those that moved words most, whichever way; of these the list goes by the totals that it shows.
  const shown = rows.slice(0, LISTED).sort((a, b) => Math.abs(b.total) - Math.abs(a.total));
  const bars = diverging(shown.map((row) => row.total));
  if (shown.length === 0) return null;
  return html`<h3>${head === "known" ? "Known: named by people" : "Discovered: found by the model"}</h3>
    <ul class="concept-bars">
      ${shown.map(
        (row, i) =>
          html`<li key=${row.id}>
            <${ConceptName} concept=${row} withTokens=${true} />
            <span class="track" style=${{ "--zero": bars[i].zero }}>
              <span class=${`bar bar-${row.head}`} style=${{ "--left": bars[i].left, "--width": bars[i].width }}></span>
            </span>
            <span class="value" title=${`over ${count(row.positions.length, "word")}`}>${signed(row.total, 1)}</span>
          </li>`,
      )}
    </ul>`;
}

/** What the three colours and patterns mean. */
export function Legend() {
  return html`<ul class="legend" aria-label="Colours and patterns">
    <li><span class="swatch swatch-known" aria-hidden="true"></span>known</li>
    <li><span class="swatch swatch-discovered" aria-hidden="true"></span>discovered</li>
    <li><span class="swatch swatch-epsilon" aria-hidden="true"></span>epsilon</li>
  </ul>`;
}

/** The lit concept: what it is, what it did here, and what can be done with it. */
export function LitConcept({ lane }) {
  if (lit.value === null) return null;
  const { id, head } = lit.value;
  const { about, topTokens, neighbors } = factsOf(id, ["about", "topTokens", "neighbors"]);
  const driven = [...drivenBy(id, landedTokens(lane), runs.value[lane]?.attribution?.tokens)];
  const concept = { id, head, name: about?.name ?? null };
  return html`<section class=${`card lit-card lit-card-${head}`} aria-label="Lit concept" data-testid="lit">
    <header class="card-head">
      <h2><${Mark} of=${head} /><bdi>${lit.value.name}</bdi></h2>
      <${CloseButton}
        label="Put the light out"
        onClick=${(event) => {
          handFocus(event, ".concept-name[aria-pressed=true]");
          lit.value = null;
        }}
      />
    </header>
    <p class="quiet">
      ${`${head} concept ${id}`}${about?.group?.name ? html`${" \u00b7 "}<bdi>${about.group.name}</bdi>` : ""}
      ${` \u00b7 drives ${count(driven.length, "word")} here`}
    </p>
    ${about?.description && html`<p><bdi>${about.description}</bdi></p>`}
    ${topTokens?.length > 0 && html`<h3>Promotes most</h3><${Chips} tokens=${topTokens} />`}
    ${neighbors?.length > 0 && html`<h3>Nearest</h3><${Neighbors} items=${neighbors} />`}
    ${about?.is_steerable === false && html`<p class="quiet">${WHY_NOT[head] ?? WHY_NOT.known}</p>`}
    <div class="row">
      ${about?.is_steerable &&
      html`<button type="button" class="button" onClick=${() => addSteer(concept)}>Steer by it</button>
        <${SuppressToggle} concept=${concept} text="Suppress it" />`}
      ${server.value.capabilities.hasOverrides &&
      html`<button type="button" class="button" onClick=${() => addOverride(concept)}>Set its weight</button>`}
    </div>
  </section>`;
}

function Chips({ tokens }) {
  return html`<ul class="chips">
    ${tokens.map((token) => html`<li key=${token.token_id} class="chip"><bdi>${cellText(token)}</bdi></li>`)}
  </ul>`;
}

function Neighbors({ items }) {
  return html`<ul class="chips">
    ${items.map((item) => html`<li key=${item.id}><${ConceptName} concept=${{ head: "known", ...item }} /></li>`)}
  </ul>`;
}

/** Add a slider for a concept, unless there is one. */
export function addSteer(concept, strength) {
  const { steers } = settings.value;
  if (steers.some((steer) => steer.id === concept.id)) return;
  set({ steers: [...steers, newSteer(concept, strength)] });
  toast.value = `${conceptName(concept)}: slider added. Generate to see it.`;
}

/** A button that is pressed while the concept is suppressed. `onRelease`: called before it lets go. */
export function SuppressToggle({ concept, text, label, onRelease }) {
  const isPressed = suppressionOf(concept.id) !== null;
  return html`<button
    type="button"
    class="button is-toggle"
    aria-pressed=${isPressed}
    aria-label=${label}
    title="Lower the words that it promotes"
    onClick=${(event) => {
      if (isPressed) onRelease?.(event);
      toggleSuppression(concept);
    }}
  >
    ${isPressed && html`<${Icon} name="check" />`}${text}
  </button>`;
}

/** The settings' suppression of a concept, or null. */
export function suppressionOf(id) {
  return settings.value.suppress.find((item) => item.id === id) ?? null;
}

function toggleSuppression(concept) {
  const others = settings.value.suppress.filter((item) => item.id !== concept.id);
  const isOn = others.length < settings.value.suppress.length;
  set({ suppress: isOn ? others : [...others, newSuppression(concept)] });
  toast.value = `${conceptName(concept)}: ${isOn ? "no longer suppressed" : "suppressed"}. Generate to see it.`;
}

/** Set a concept's weight, unless it is set. */
export function addOverride(concept) {
  const { overrides } = settings.value;
  if (overrides.some((item) => item.id === concept.id)) return;
  set({ overrides: [...overrides, newOverride(concept)] });
  const head = headOf(concept.id, server.value.capabilities);
  toast.value = `${conceptName({ ...concept, head })}: weight set. Generate to see it.`;
}

/** Which lane's concepts are on show: the opened word's, else the steered one. */
export function shownLane() {
  return selection.value?.lane ?? "main";
}
