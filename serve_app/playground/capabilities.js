// What a server says it can do, in the page's words. Knows both the answer of /v1/capabilities and what to assume of a
// server that has no such address.

import { POLICIES } from "./request.js";

/** What every server can do. */
export const LEAST = Object.freeze({
  isChat: false,
  hasPresets: false,
  hasNeighbors: false,
  hasTokenize: false,
  hasGuidance: false,
  hasOverrides: false,
  policies: POLICIES.map((policy) => policy.id),
  numLayers: null,
  firstDiscovered: null,
  numConcepts: null,
  maxTokens: null,
});

/** Capabilities from the server's answer; `LEAST` for null. */
export function readCapabilities(answer) {
  if (answer === null || typeof answer !== "object") return LEAST;
  const offered = Object.keys(answer.policies ?? {});
  return {
    isChat: answer.has_chat_template === true,
    hasPresets: answer.has_presets === true,
    // These came together with the address itself.
    hasNeighbors: true,
    hasTokenize: true,
    hasGuidance: answer.has_guidance === true,
    hasOverrides: answer.has_overrides === true,
    policies: LEAST.policies.filter((id) => offered.length === 0 || offered.includes(id)),
    numLayers: answer.model?.n_layers ?? null,
    firstDiscovered: answer.heads?.discovered?.first_id ?? null,
    numConcepts: numConceptsOf(answer.heads ?? {}),
    maxTokens: answer.limits?.max_tokens ?? null,
  };
}

function numConceptsOf({ known, discovered }) {
  return known ? known.num_concepts + (discovered?.num_concepts ?? 0) : null;
}

/** The head of a concept: ids of discovered ones follow on those of known ones. */
export function headOf(id, capabilities) {
  return capabilities.firstDiscovered !== null && id >= capabilities.firstDiscovered ? "discovered" : "known";
}

/** Settings without what this server has not: a link from elsewhere may hold it, and no control here would show it. */
export function servable(settings, capabilities) {
  return {
    ...settings,
    guidance: capabilities.hasGuidance ? settings.guidance : null,
    overrides: capabilities.hasOverrides ? settings.overrides : [],
  };
}
