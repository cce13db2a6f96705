// The opened token: the parts that add up to its logit, and the concepts behind it. Knows explanations, which come with
// the end of an answer; until then it shows what the step said.

import { html } from "./html.js";
import { conceptsOf, diverging, partsOf, strongest, sumError, waterfall } from "./attribution.js";
import { CloseButton } from "./icons.js";
import { handFocus } from "./roving.js";
import { explanationOf, isBusy, runs, selection, shown } from "./store.js";
import { exactText, percent, signed, spokenText } from "./text.js";
import { ConceptName } from "./view_concepts.js";

const SHOWN_CONCEPTS = 9;
const LEAST_KNOWN = 3;
const LABELS = { known: "known", discovered: "discovered", epsilon: "epsilon" };

/** The panel, or a hint while nothing is open. */
export function TokenPanel() {
  const { lane, position } = selection.value ?? {};
  const token = shown.value[lane]?.tokens.get(position) ?? null;
  if (selection.value === null) {
    return html`<section class="card token-card is-empty" aria-label="Opened word">
      <h2>Why this word?</h2>
      <p class="quiet">Select a word, in the text or on the canvas, to see which concepts put it there.</p>
    </section>`;
  }
  return html`<section class="card token-card is-opened" aria-label="Opened word" data-testid="token">
    <header class="card-head">
      <h2>
        <span class="sr-only">${token ? spokenText(token) : "Masked position"}</span>
        <bdi class="token-name" aria-hidden="true">${token ? exactText(token) : "\u2026"}</bdi>
      </h2>
      <${CloseButton}
        label="Close the opened word"
        onClick=${(event) => {
          handFocus(event, "[data-position][aria-pressed=true]");
          selection.value = null;
        }}
      />
    </header>
    ${token === null
      ? html`<p class="quiet">Position ${position} is still masked at this step.</p>`
      : html`<${Opened} lane=${lane} token=${token} />`}
  </section>`;
}

function Opened({ lane, token }) {
  const explained = explanationOf(lane, token.position);
  const rows = explained
    ? strongest(conceptsOf(explained), SHOWN_CONCEPTS, LEAST_KNOWN)
    : strongest(token.concepts ?? [], SHOWN_CONCEPTS, LEAST_KNOWN);
  return html`
    <dl class="token-facts">
      <div><dt>position</dt><dd>${token.position}</dd></div>
      <div><dt>landed</dt><dd>${`#${token.order + 1}, step ${token.step}`}</dd></div>
      <div><dt>confidence</dt><dd>${percent(token.confidence)}</dd></div>
      ${explained && html`<div><dt>log p</dt><dd>${signed(explained.logprob)}</dd></div>`}
    </dl>
    ${explained
      ? html`<${Sum} explained=${explained} />`
      : html`<p class="quiet">${isBusy.value ? "The sum comes with the end of the answer." : missing(lane)}</p>`}
    ${rows.length > 0 && html`<h3>Strongest concepts</h3>`}
    <${ConceptBars} rows=${rows} />
  `;
}

function missing(lane) {
  return runs.value[lane].attribution ? "Not part of the text, so nothing explains it." : "The answer did not get to its explanation.";
}

/** Known, discovered and epsilon, each from where the one before ended, and the logit that they reach. */
function Sum({ explained }) {
  const { zero, end, bars } = waterfall(explained);
  const values = Object.fromEntries(partsOf(explained).map((part) => [part.name, part.value]));
  const spoken =
    `known ${signed(values.known)}, discovered ${signed(values.discovered)}, epsilon ${signed(values.epsilon)}; ` +
    `together the logit ${signed(explained.logit)}`;
  return html`<figure class="sum" aria-label=${spoken} data-sum-error=${sumError(explained).toExponential(1)}>
    ${bars.map(
      (bar) =>
        html`<div class="sum-row" key=${bar.name} data-part=${bar.name} data-value=${bar.value}>
          <span class="sum-label">${LABELS[bar.name]}</span>
          <span class="track" style=${{ "--zero": zero }}>
            <span class=${`bar bar-${bar.name}`} style=${{ "--left": bar.left, "--width": bar.width }}></span>
          </span>
          <span class="sum-value">${signed(bar.value)}</span>
        </div>`,
    )}
    <div class="sum-row is-total" data-part="logit" data-value=${explained.logit}>
      <span class="sum-label">logit</span>
      <span class="track" style=${{ "--zero": zero }}>
        <span class="mark" style=${{ "--left": end }}></span>
      </span>
      <span class="sum-value">${signed(explained.logit)}</span>
    </div>
  </figure>`;
}

function ConceptBars({ rows }) {
  const bars = diverging(rows.map((row) => row.contribution));
  return html`<ul class="concept-bars">
    ${rows.map(
      (row, i) =>
        html`<li key=${row.id}>
          <${ConceptName} concept=${row} withTokens=${true} />
          <span class="track" style=${{ "--zero": bars[i].zero }}>
            <span class=${`bar bar-${row.head}`} style=${{ "--left": bars[i].left, "--width": bars[i].width }}></span>
          </span>
          <span class="value" title=${row.weight === undefined ? undefined : `weight ${row.weight.toFixed(3)}`}
            >${signed(row.contribution)}</span
          >
        </li>`,
    )}
  </ul>`;
}

