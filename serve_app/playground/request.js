// From what the controls say to the request that is sent. Knows the API's fields and their defaults; a setting that
// asks for nothing is left out, so the shown request holds only what somebody chose.

/** Where the controls stand at a first visit. */
export const DEFAULTS = Object.freeze({
  prompt: "",
  maxTokens: 120,
  seed: 1,
  isSeedLocked: true,
  temperature: null,
  topP: null,
  policy: "confidence",
  policyValue: null,
  tokensPerStep: null,
  guidance: null,
  steers: [],
  suppress: [],
  overrides: [],
  overrideMode: "delta",
  preset: null,
  isComparing: false,
  isChat: false,
});

/** A new slider for a concept. Layer null: the server's default. */
export function newSteer(concept, strength = 4) {
  return {
    id: concept.id,
    name: concept.name ?? null,
    strength,
    unit: "logits",
    layer: null,
    schedule: "fixed",
    cutoffTokens: 32,
    isGroup: false,
  };
}

/** A new suppression of a concept. */
export function newSuppression(concept, strength = 8) {
  return { id: concept.id, name: concept.name ?? null, strength };
}

/** A new override: the weight of a concept of either head, in place of what the model finds. */
export function newOverride(concept, weight = 1) {
  return { id: concept.id, name: concept.name ?? null, weight };
}

/** True if the settings steer, suppress or override anything. */
export function isSteered(settings) {
  return steeringOf(settings) !== null;
}

/** The request's `steering`, or null where there is none. */
export function steeringOf(settings) {
  const steering = {};
  if (settings.preset !== null) steering.preset = settings.preset;
  const interventions = settings.steers.filter((steer) => steer.strength !== 0).map(interventionOf);
  if (interventions.length) steering.interventions = interventions;
  if (settings.suppress.length) {
    steering.suppress = settings.suppress.map(({ id, strength }) => ({ concept: id, strength }));
  }
  if (settings.overrides.length) {
    steering.overrides = settings.overrides.map(({ id, weight }) => ({ concept: id, weight }));
    if (settings.overrideMode !== DEFAULTS.overrideMode) steering.override_mode = settings.overrideMode;
  }
  return Object.keys(steering).length ? steering : null;
}

function interventionOf(steer) {
  const intervention = { concepts: [steer.id], strength: steer.strength, unit: steer.unit, schedule: steer.schedule };
  if (steer.layer !== null) intervention.layer = steer.layer;
  if (steer.schedule === "hard_cutoff") intervention.cutoff_tokens = steer.cutoffTokens;
  if (steer.isGroup) intervention.group = true;
  return intervention;
}

/** How an override acts. */
export const OVERRIDE_MODES = [
  { id: "delta", hint: "Moves the model's state by the change of the weight alone." },
  { id: "reference", hint: "Composes the state anew; one known concept then drops what no concept explains." },
];

/** The parameter that each policy has of its own, with what the server takes where none is given. */
export const POLICIES = [
  { id: "confidence", label: "One at a time", hint: "The surest position in each pass: the best text." },
  { id: "lossless", label: "Lossless", hint: "The same text; guesses ahead and keeps what proves right." },
  {
    id: "threshold",
    label: "Threshold",
    hint: "All positions surer than this share.",
    parameter: { key: "threshold", fallback: 0.5, min: 0.05, max: 1, step: 0.05 },
  },
  {
    id: "factor",
    label: "Factor",
    hint: "More at once as long as all are sure; a larger factor takes more.",
    parameter: { key: "factor", fallback: 3, min: 0, max: 8, step: 0.25 },
  },
  {
    id: "entropy_bound",
    label: "Entropy bound",
    hint: "Positions until their entropies, in nats, reach this bound.",
    parameter: { key: "entropy_bound", fallback: 4, min: 0, max: 16, step: 0.5 },
  },
];

/** True if a policy's guesses can be guided; the server refuses guidance with one whose guesses cannot. */
export function canGuide(policy) {
  return policy !== "lossless";
}

/** The request's `diffusion`, or null for the default. */
export function diffusionOf(settings) {
  const policy = POLICIES.find((item) => item.id === settings.policy) ?? { id: settings.policy };
  const diffusion = {};
  if (policy.id !== "confidence") diffusion.policy = policy.id;
  if (policy.parameter) diffusion[policy.parameter.key] = settings.policyValue ?? policy.parameter.fallback;
  if (settings.tokensPerStep !== null && policy.id !== "lossless") diffusion.tokens_per_step = settings.tokensPerStep;
  if (settings.guidance && canGuide(policy.id)) diffusion.cfg_scale = settings.guidance;
  return Object.keys(diffusion).length ? diffusion : null;
}

/**
 * The address and body of a generation.
 *
 * `isBaseline` leaves all steering out; `messages` makes it a turn of a chat instead of the prompt's continuation.
 */
export function buildRequest(settings, { model, isBaseline = false, messages = null, topK = 16 } = {}) {
  const body = {
    ...(model ? { model } : {}),
    ...(messages ? { messages } : { prompt: settings.prompt }),
    max_tokens: settings.maxTokens,
    seed: settings.seed,
  };
  if (settings.temperature !== null) body.temperature = settings.temperature;
  if (settings.topP !== null) body.top_p = settings.topP;
  const steering = isBaseline ? null : steeringOf(settings);
  if (steering) body.steering = steering;
  const diffusion = diffusionOf(settings);
  if (diffusion) body.diffusion = diffusion;
  body.attribution = { level: "both", top_k: topK };
  body.stream = true;
  body.stream_options = { include_usage: true, include_diffusion: "steps" };
  return { path: messages ? "v1/chat/completions" : "v1/completions", body };
}

/** A seed that a request may have. */
export function randomSeed(random = Math.random) {
  return Math.floor(random() * 2 ** 31);
}
