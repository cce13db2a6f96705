// Chunks of the finished text, each with its concepts' shares. Knows the answer's `attribution.chunks`.

import { html } from "./html.js";
import { isRevealed, runs } from "./store.js";
import { signed } from "./text.js";
import { ConceptName } from "./view_concepts.js";

const SHOWN = 4;

/** One bar a chunk; a chunk is the text between two end-of-chunk marks. */
export function Chunks({ lane }) {
  const chunks = runs.value[lane]?.attribution?.chunks ?? [];
  if (chunks.length === 0 || !isRevealed.value) return null;
  const all = chunks.flatMap((chunk) => [...chunk.concepts.slice(0, SHOWN).map((item) => item.score), chunk.epsilon_pct / 100]);
  const most = Math.max(...all.map(Math.abs), 1e-9);
  return html`<details class="card chunks" data-testid="chunks">
    <summary><h2>Chunk by chunk</h2></summary>
    <p class="quiet">
      Mean share of each concept in a chunk's words, and of epsilon, what no concept explains. Shares have signs.
    </p>
    <ol>
      ${chunks.map((chunk) => html`<${Chunk} key=${chunk.start} chunk=${chunk} most=${most} />`)}
    </ol>
  </details>`;
}

function Chunk({ chunk, most }) {
  const concepts = chunk.concepts.slice(0, SHOWN);
  return html`<li class="chunk">
    <p class="chunk-text" dir="auto">${chunk.text.trim() || "\u2423"}</p>
    <ul class="shares">
      ${concepts.map(
        (concept) =>
          html`<li key=${concept.id}>
            <${ConceptName} concept=${concept} />
            <${Share} head=${concept.head} share=${concept.score} most=${most} />
          </li>`,
      )}
      <li>
        <span class="concept-name is-plain"
          ><span class="swatch swatch-epsilon" aria-hidden="true"></span><span class="concept-text">epsilon</span></span
        >
        <${Share} head="epsilon" share=${(chunk.epsilon_pct ?? 0) / 100} most=${most} />
      </li>
    </ul>
  </li>`;
}

/** A signed share around a zero mark in the middle; all chunks have one scale, up to `most`. */
function Share({ head, share, most }) {
  const width = Math.abs(share) / most / 2;
  const left = share < 0 ? 0.5 - width : 0.5;
  return html`<span class="track" style=${{ "--zero": 0.5 }}>
      <span class=${`bar bar-${head}`} style=${{ "--left": left, "--width": width }}></span>
    </span>
    <span class="value">${`${signed(share * 100, 0)}\u202f%`}</span>`;
}
