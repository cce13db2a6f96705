// Finding a concept by words. Knows how a combobox behaves, and nothing of what becomes of the concept chosen.

import { html, useEffect, useId, useRef, useState } from "./html.js";
import { Icon } from "./icons.js";
import { handFocus } from "./roving.js";
import { conceptName } from "./text.js";
import { Mark } from "./view_concepts.js";

const WAIT_MS = 150;

/**
 * A combobox. `find`: (query, abort signal) -> concepts; `onChoose`: what becomes of the chosen one. With `hasHeads` each
 * result says of which head it is.
 */
export function ConceptSearch({ label, placeholder, find, onChoose, hasHeads = false }) {
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
        setFound(await find(query, controller.signal));
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
  const choose = (concept) => {
    onChoose(concept);
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
    <label class="sr-only" for=${`${id}-input`}>${label}</label>
    <span class="search-box">
      <${Icon} name="search" />
      <input
        ref=${input}
        id=${`${id}-input`}
        type="text"
        role="combobox"
        autocomplete="off"
        spellcheck=${false}
        placeholder=${placeholder}
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
            <strong
              >${hasHeads && html`<${Mark} of=${concept.head} /> `}<bdi>${conceptName(concept)}</bdi></strong
            >
            <small class="quiet"><bdi>${concept.description ?? `${concept.head ?? ""} concept ${concept.id}`}</bdi></small>
          </li>`,
      )}
    </ul>
    ${found !== null && results.length === 0 && html`<p class="quiet" role="status">${sayNothingFound(found, query)}</p>`}
  </div>`;
}

/** Give the focus to the search of the same part, for a button that is about to go away. */
export function focusSearch(event) {
  handFocus(event, "[role=combobox]", event.target.closest(".has-search"));
}

function sayNothingFound(found, query) {
  return found.error ? `The search failed: ${found.error.message}` : `No concept matches "${query.trim()}".`;
}
