// Arithmetic of explanations: what concepts did to tokens, and where bars begin and end. Knows the shapes of step
// events and of the answer's `attribution`; draws nothing.

const LEAST_SHARE = 0.1;

/**
 * Concepts behind some tokens, largest total effect first: {id, name, head, total, mass, positions}.
 *
 * A token's concepts are those of the full attribution where it is there, else those that its step told.
 */
export function tally(tokens, explained = []) {
  const found = new Map();
  const byPosition = new Map(explained.map((token) => [token.position, token]));
  for (const token of tokens) {
    for (const concept of conceptsAt(token, byPosition)) {
      const key = concept.id;
      const entry = found.get(key) ?? { ...concept, total: 0, mass: 0, positions: [] };
      entry.total += concept.contribution;
      entry.mass += Math.abs(concept.contribution);
      entry.positions.push(token.position);
      found.set(key, entry);
    }
  }
  return [...found.values()]
    .map(({ contribution, ...entry }) => entry)
    .sort((a, b) => b.mass - a.mass || a.id - b.id);
}

/**
 * Position -> contribution of one concept to the tokens that it drove.
 *
 * From the full attribution where it is there and from the steps elsewhere. A concept adds a little to nearly every
 * token; what is below `LEAST_SHARE` of its strongest contribution is no drive.
 */
export function drivenBy(conceptId, tokens, explained = []) {
  const driven = new Map();
  const byPosition = new Map(explained.map((token) => [token.position, token]));
  for (const token of tokens) {
    const hit = conceptsAt(token, byPosition).find((concept) => concept.id === conceptId);
    if (hit) driven.set(token.position, hit.contribution);
  }
  const least = LEAST_SHARE * Math.max(...[...driven.values()].map(Math.abs), 0);
  for (const [position, value] of driven) if (Math.abs(value) < least) driven.delete(position);
  return driven;
}

function conceptsAt(token, byPosition) {
  const full = byPosition.get(token.position);
  return full ? conceptsOf(full) : (token.concepts ?? []);
}

/** The parts of an explained token's logit, in the order in which they are added up. */
export function partsOf(explained) {
  return [
    { name: "known", value: explained.known_total },
    { name: "discovered", value: explained.discovered_total },
    { name: "epsilon", value: explained.epsilon },
  ];
}

/** How far the parts' sum is from the logit; rounding alone keeps it below 1e-5. */
export function sumError(explained) {
  return Math.abs(partsOf(explained).reduce((sum, part) => sum + part.value, 0) - explained.logit);
}

/**
 * Bars that add up from zero to the logit: each begins where the one before it ended.
 *
 * All places are shares of the width, 0 at the left; `zero` is where nothing has been added.
 */
export function waterfall(explained) {
  let sum = 0;
  const bars = partsOf(explained).map(({ name, value }) => {
    const from = sum;
    sum += value;
    return { name, value, from, to: sum };
  });
  const ends = [0, explained.logit, ...bars.flatMap((bar) => [bar.from, bar.to])];
  const low = Math.min(...ends);
  const span = Math.max(...ends) - low || 1;
  const place = (value) => (value - low) / span;
  return {
    zero: place(0),
    end: place(explained.logit),
    bars: bars.map((bar) => ({
      name: bar.name,
      value: bar.value,
      left: place(Math.min(bar.from, bar.to)),
      width: Math.abs(bar.to - bar.from) / span,
    })),
  };
}

/** A bar around zero for each value, on one scale: {zero, left, width} as shares of the width. */
export function diverging(values) {
  const low = Math.min(0, ...values);
  const span = Math.max(0, ...values) - low || 1;
  const zero = -low / span;
  return values.map((value) => ({
    zero,
    left: value < 0 ? zero + value / span : zero,
    width: Math.abs(value) / span,
  }));
}

/** An explained token's concepts of both heads, strongest first. */
export function conceptsOf(explained) {
  const of = (head) => (explained[head] ?? []).map((concept) => ({ ...concept, head }));
  return [...of("known"), ...of("discovered")].sort(byStrength);
}

/** The strongest few of some concepts, with at least `leastKnown` known ones, which have names, if there are so many. */
export function strongest(concepts, limit, leastKnown) {
  const sorted = [...concepts].sort(byStrength);
  const wanted = new Set(sorted.filter((concept) => concept.head === "known").slice(0, leastKnown));
  for (const concept of sorted) if (wanted.size < limit) wanted.add(concept);
  return sorted.filter((concept) => wanted.has(concept));
}

function byStrength(a, b) {
  return Math.abs(b.contribution) - Math.abs(a.contribution);
}

/** Tokens, steps and passes of a finished generation, and what was saved against one pass a token. */
export function savings(summary) {
  const passes = summary.forward_passes ?? summary.steps;
  return (tokens) => ({ tokens, steps: summary.steps, passes, saved: Math.max(0, tokens - passes) });
}
