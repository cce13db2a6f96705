// Names, descriptions and top tokens of concepts, asked for once each and only when something shows them. Knows the
// concept addresses of the API.

import { askIfThere, askJson } from "./api.js";
import { signal } from "./html.js";
import { apiKey, server } from "./store.js";

const MAX_AT_ONCE = 3;
const NUM_TOP_TOKENS = 8;

/** Concept id -> {about, topTokens, neighbors} as far as they are known; each null until then. */
export const facts = signal(new Map());

const asked = new Set();
const failed = new Set();
const queue = [];
let numRunning = 0;

/** What is known of a concept; asks for the rest. `parts`: which of `about`, `topTokens`, `neighbors` are wanted. */
export function factsOf(id, parts = ["topTokens"]) {
  for (const part of parts) {
    const key = `${part} ${id}`;
    if (asked.has(key)) continue;
    asked.add(key);
    queue.push(() => fetchPart(id, part));
  }
  pump();
  return facts.value.get(id) ?? { about: null, topTokens: null, neighbors: null };
}

/** Let what a silent server did not answer be asked again. */
export function forgetFailures() {
  for (const key of failed) asked.delete(key);
  failed.clear();
}

function pump() {
  while (numRunning < MAX_AT_ONCE && queue.length) {
    numRunning += 1;
    queue
      .shift()()
      .finally(() => {
        numRunning -= 1;
        pump();
      });
  }
}

const ADDRESSES = {
  about: (id) => `v1/concepts/${id}`,
  topTokens: (id) => `v1/concepts/${id}/top_tokens?k=${NUM_TOP_TOKENS}`,
  neighbors: (id) => `v1/concepts/${id}/neighbors?k=6`,
};

async function fetchPart(id, part) {
  if (part === "neighbors" && !server.value.capabilities.hasNeighbors) return;
  const answer = await askIfThere(ADDRESSES[part](id), { key: apiKey.value });
  if (answer === null) {
    failed.add(`${part} ${id}`);
    return;
  }
  const before = facts.value.get(id) ?? { about: null, topTokens: null, neighbors: null };
  const found = part === "about" ? answer : answer.data;
  facts.value = new Map(facts.value).set(id, { ...before, [part]: found });
}

/** Concepts that match some words, best first; only those that can be steered. */
export async function searchConcepts(query, signal) {
  const wanted = new URLSearchParams({ query, steerable: "true", limit: "12" });
  return (await askJson(`v1/concepts?${wanted}`, { key: apiKey.value, signal })).data;
}

/** Concepts of both heads that match some words or have this number, best first. */
export async function findConcepts(query, signal) {
  const wanted = new URLSearchParams({ query, limit: "12" });
  const numConcepts = server.value.capabilities.numConcepts ?? 0;
  const isId = /^\d{1,9}$/.test(query.trim()) && Number(query) < numConcepts;
  const [byId, byWords] = await Promise.all([
    isId ? askJson(`v1/concepts/${Number(query)}`, { key: apiKey.value, signal }) : null,
    askJson(`v1/concepts?${wanted}`, { key: apiKey.value, signal }),
  ]);
  return byId ? [byId, ...byWords.data.filter((concept) => concept.id !== byId.id)] : byWords.data;
}

/** The steerable concept of exactly this name, or null. */
export async function findByName(name) {
  const wanted = new URLSearchParams({ query: name, steerable: "true", limit: "5" });
  const answer = await askIfThere(`v1/concepts?${wanted}`, { key: apiKey.value });
  return answer?.data.find((concept) => concept.name?.toLowerCase() === name.toLowerCase()) ?? null;
}
