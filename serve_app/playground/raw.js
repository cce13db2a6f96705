// A streamed answer as text. Knows how much of a long one a page can show; draws nothing.

import { count } from "./text.js";

/** Chunks that are shown before and after a gap. */
export const SHOWN_AT_EACH_END = 200;

/** All chunks, with the mark that the server ends a stream with if it came. */
export function rawText(chunks, isComplete) {
  return join([...chunks.map(asLine), ...endOf(isComplete)]);
}

/** The same with a gap in the middle of a long stream: what explains an answer comes last. */
export function rawExcerpt(chunks, isComplete) {
  const numHidden = chunks.length - 2 * SHOWN_AT_EACH_END;
  if (numHidden <= 0) return rawText(chunks, isComplete);
  return join([
    ...chunks.slice(0, SHOWN_AT_EACH_END).map(asLine),
    `... ${count(numHidden, "chunk")} left out here; Copy takes all ...`,
    ...chunks.slice(-SHOWN_AT_EACH_END).map(asLine),
    ...endOf(isComplete),
  ]);
}

const asLine = (chunk) => JSON.stringify(chunk);
const endOf = (isComplete) => (isComplete ? ["[DONE]"] : []);
const join = (lines) => lines.join("\n\n");
