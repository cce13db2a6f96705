// What a server says it can do, in the page's words. Knows both the answer of /v1/capabilities and what to assume of a
// server that has no such address.

import { POLICIES } from "./request.js";

/** What every server can do. */
export const LEAST = Object.freeze({
  isChat: false,
  hasPresets: false,
  hasNeighbors: false,
  hasTokenize: false,
  policies: POLICIES.map((policy) => policy.id),
  numLayers: null,
  maxTokens: null,
});

/** Capabilities from the server's answer; `LEAST` for null. */
export function readCapabilities(answer) {
  if (answer === null || typeof answer !== "object") return LEAST;
  const offered = Object.keys(answer.policies ?? {});
  return {
    isChat: answer.has_chat_template === true,
    hasPresets: answer.has_presets === true,
    hasNeighbors: (answer.analyses ?? []).some((path) => path.endsWith("/neighbors")),
    // Came with the address itself.
    hasTokenize: true,
    policies: LEAST.policies.filter((id) => offered.length === 0 || offered.includes(id)),
    numLayers: answer.model?.n_layers ?? null,
    maxTokens: answer.limits?.max_tokens ?? null,
  };
}
