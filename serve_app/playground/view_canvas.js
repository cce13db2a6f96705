// The text as it forms: finished blocks as prose, the block in work as a canvas of cells. Knows how cells look and are
// named, and which is in the tab order; model text enters the page as text nodes only.

import { html, useState } from "./html.js";
import { drivenBy } from "./attribution.js";
import { cellsOf, currentBlock, progress } from "./replay.js";
import { moveFocus } from "./roving.js";
import { landedTokens, lit, runs, sealedTokens, selection, shown } from "./store.js";
import { cellText, exactText, isContinuation, isSpecial, percent, signed, spokenText, tokenTexts } from "./text.js";

const TARGETS = ".cell, .word";

/** One lane: its prompt and prose, then its canvas. */
export function Lane({ lane, title }) {
  const state = shown.value[lane];
  const run = runs.value[lane];
  const isDone = state.phase === "done" || (state.blocks.length > 0 && state.blocks.every((block) => block.isSealed));
  const driven = drivenOf(lane);
  return html`<section class="lane" aria-label=${title}>
    ${title && html`<h2 class="lane-title">${title}</h2>`}
    <${Prose} lane=${lane} run=${run} driven=${driven} isDone=${isDone} />
    ${!(isDone && state.phase === "done") && html`<${Canvas} lane=${lane} state=${state} driven=${driven} />`}
  </section>`;
}

function drivenOf(lane) {
  if (lit.value === null) return null;
  const map = drivenBy(lit.value.id, landedTokens(lane), runs.value[lane].attribution?.tokens);
  const strongest = Math.max(...[...map.values()].map(Math.abs), 1e-9);
  return { map, strongest, head: lit.value.head };
}

/** How a lit concept shows on a token: strength as opacity, sign as the kind of line. */
function litProps(driven, position) {
  if (driven === null) return { classes: "", style: {} };
  const value = driven.map.get(position);
  if (value === undefined) return { classes: " is-dim", style: {} };
  const share = Math.abs(value) / driven.strongest;
  const classes = ` is-lit lit-${driven.head} ${value < 0 ? "lit-against" : "lit-for"}`;
  return { classes, style: { "--lit": share.toFixed(3) }, value };
}

/** Which member of a group is in the tab order: the last one that had the focus, or the first. */
function useRoving() {
  const [active, setActive] = useState(null);
  return {
    active,
    onFocusIn: (event) => {
      const key = event.target.closest(TARGETS)?.dataset.position;
      if (key !== undefined) setActive(Number(key));
    },
  };
}

function open(lane, event) {
  const target = event.target.closest(TARGETS);
  if (!target || target.hasAttribute("aria-disabled")) return;
  selection.value = { lane, position: Number(target.dataset.position) };
  // On a narrow page the panel covers the lower half; the word shall stay in sight.
  requestAnimationFrame(() => target.scrollIntoView({ block: "nearest" }));
}

function onKeyDown(lane, event) {
  if (moveFocus(event, TARGETS)) return;
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    open(lane, event);
  } else if (event.key === "Escape" && (selection.value || lit.value)) {
    selection.value = null;
    lit.value = null;
  }
}

function isOpen(lane, position) {
  return selection.value?.lane === lane && selection.value.position === position;
}

function Prose({ lane, run, driven, isDone }) {
  const { active, onFocusIn } = useRoving();
  const tokens = sealedTokens(lane);
  const texts = tokenTexts(tokens);
  const first = tokens.find((token) => token.position === active) ? active : tokens[0]?.position;
  const prompt = promptOf(run.body);
  return html`<div
    class="prose"
    role="group"
    dir="auto"
    aria-label=${tokens.length ? "Finished text, token by token" : "The prompt"}
    onClick=${(event) => open(lane, event)}
    onFocusIn=${(event) => {
      onFocusIn(event);
      if (event.target.matches(":focus-visible")) open(lane, event);
    }}
    onKeyDown=${(event) => onKeyDown(lane, event)}
  >
    ${prompt !== "" && html`<span class="prompt">${prompt}</span>`}${tokens.map((token) =>
      html`<${Word}
        key=${token.position}
        token=${token}
        text=${texts.get(token.position)}
        driven=${driven}
        isOpen=${isOpen(lane, token.position)}
        isInTabOrder=${token.position === first}
      />`)}${isDone && tokens.length === 0 && html`<span class="quiet">No text: the model ended at once.</span>`}
  </div>`;
}

/** The prompt's text; token ids have none here. */
export function promptOf(body) {
  if (body.messages) return "";
  return typeof body.prompt === "string" ? body.prompt : "";
}

function Word({ token, text, driven, isOpen, isInTabOrder }) {
  const special = isSpecial(token);
  const { classes, style, value } = litProps(driven, token.position);
  const label = `${spokenText(token)}${value === undefined ? "" : `, ${signed(value)} from ${lit.value.name ?? "it"}`}`;
  const lead = special ? "" : /^\s*/.exec(text)[0];
  const body = special ? "" : text.slice(lead.length);
  // White space stays outside of the word's box, except where it is all that there is.
  return html`${body && lead}<span
    class=${`word${special ? " is-special" : ""}${isOpen ? " is-open" : ""}${classes}`}
    style=${style}
    role="button"
    tabindex=${isInTabOrder ? 0 : -1}
    aria-pressed=${isOpen}
    aria-label=${special || text.trim() === "" || value !== undefined ? label : undefined}
    data-position=${token.position}
    >${body || (special ? "" : lead)}</span
  >`;
}

function Canvas({ lane, state, driven }) {
  const { active, onFocusIn } = useRoving();
  const cells = cellsOf(state);
  const block = currentBlock(state);
  if (block === null) return html`<div class="canvas is-empty" aria-hidden="true">${ghosts()}</div>`;
  const { filled, total } = progress(state);
  const usable = cells.filter((cell) => cell.kind === "token" || cell.kind === "mask");
  const first = usable.some((cell) => cell.position === active) ? active : usable[0]?.position;
  return html`<div
    class="canvas"
    role="group"
    aria-label=${`Canvas of block ${block.block + 1}: ${filled} of ${total} positions filled. Arrow keys move.`}
    onClick=${(event) => open(lane, event)}
    onFocusIn=${(event) => {
      onFocusIn(event);
      if (event.target.matches(":focus-visible")) open(lane, event);
    }}
    onKeyDown=${(event) => onKeyDown(lane, event)}
  >
    ${cells.map(
      (cell, i) =>
        html`<${Cell}
          key=${i}
          cell=${cell}
          before=${cells[i - 1]?.token}
          promptToken=${cell.kind === "prompt" ? runs.value[lane].promptTokens?.at(cell.position) : null}
          driven=${driven}
          isOpen=${cell.kind === "token" && isOpen(lane, cell.position)}
          isInTabOrder=${cell.position === first && cell.kind !== "prompt" && cell.kind !== "outside"}
        />`,
    )}
  </div>`;
}

function ghosts() {
  return Array.from({ length: 64 }, (_, i) => html`<span key=${i} class="cell is-mask"></span>`);
}

function Cell({ cell, before, promptToken, driven, isOpen, isInTabOrder }) {
  if (cell.kind === "prompt") {
    const said = promptToken ? `, ${promptToken.trim()}` : "";
    return html`<span class="cell is-prompt" role="img" aria-label=${`a token of the prompt, fixed${said}`}
      ><span class="cell-text"><bdi>${promptToken?.trim()}</bdi></span></span
    >`;
  }
  if (cell.kind === "outside") return html`<span class="cell is-outside" aria-hidden="true"></span>`;
  const common = { type: "button", tabindex: isInTabOrder ? 0 : -1, "data-position": cell.position };
  if (cell.kind === "mask") {
    const label = `position ${cell.position}, still masked`;
    return html`<button ...${common} class="cell is-mask" aria-disabled="true" aria-label=${label}></button>`;
  }
  const { token } = cell;
  const { classes, style, value } = litProps(driven, cell.position);
  const classNames = [
    "cell is-token",
    cell.isLanded ? "is-landed" : "",
    isContinuation(token, before) ? "is-continuation" : "",
    isSpecial(token) ? "is-special" : "",
    isOpen ? "is-open" : "",
  ];
  const spoken = `position ${cell.position}: ${spokenText(token)}, confidence ${percent(token.confidence)}`;
  return html`<button
    ...${common}
    class=${classNames.filter(Boolean).join(" ") + classes}
    style=${{ "--confidence": (token.confidence ?? 0).toFixed(3), ...style }}
    title=${exactText(token)}
    aria-pressed=${isOpen}
    aria-label=${value === undefined ? spoken : `${spoken}, ${signed(value)} from the lit concept`}
  >
    <span class="cell-text" dir="auto">${cellText(token)}</span>
  </button>`;
}
