// Saved steering: to and from the server's presets. Knows the preset addresses and which presets sliders can show.

import { askJson } from "./api.js";
import { DEFAULTS, newOverride, newSteer, newSuppression, steeringOf } from "./request.js";

const ADDRESS = "v1/steering/presets";

/** The presets that the server holds. */
export async function listPresets(key) {
  return (await askJson(`${ADDRESS}?limit=100`, { key })).data ?? [];
}

/** Save the settings' steering under a name; the answer has its version. */
export async function savePreset(name, description, settings, key) {
  return askJson(ADDRESS, { key, body: { name, description, steering: steeringOf(settings) } });
}

/** `name@version`, as requests refer to a preset. */
export function presetId(preset) {
  return preset.id ?? `${preset.name}@${preset.version}`;
}

/** The settings that a preset stands for: sliders where they can show all of it, else a reference to it. */
export function presetSettings(preset) {
  const sliders = asSliders(preset.steering ?? {});
  const nothing = { steers: [], suppress: [], overrides: [], overrideMode: DEFAULTS.overrideMode };
  return sliders ? { ...sliders, preset: null } : { ...nothing, preset: presetId(preset) };
}

const SLIDER_KEYS = new Set(["concepts", "strength", "unit", "layer", "schedule", "cutoff_tokens", "group"]);

function asSliders({ interventions = [], suppress = [], overrides = [], override_mode: mode, ...others }) {
  if (!Object.values(others).every(isNothing)) return null;
  const steers = interventions.map(asSlider);
  const suppressed = suppress.map(asSuppression);
  const overridden = overrides.map(asOverride);
  if ([...steers, ...suppressed, ...overridden].includes(null)) return null;
  // There is one slider for a concept.
  const hasTwins = (items) => new Set(items.map((item) => item.id)).size !== items.length;
  if ([steers, suppressed, overridden].some(hasTwins)) return null;
  return { steers, suppress: suppressed, overrides: overridden, overrideMode: mode ?? DEFAULTS.overrideMode };
}

const isNothing = (value) => value === null || value === false || (Array.isArray(value) && value.length === 0);

/** {id, name} of a concept given by its id or as an object; null for one that is given by its label. */
function conceptOf(item) {
  const id = item?.id ?? item;
  return Number.isInteger(id) ? { id, name: item?.name ?? null } : null;
}

function asSlider(item) {
  const [first, ...rest] = item.concepts ?? [];
  const concept = conceptOf(first);
  if (concept === null || rest.length || (first.weight ?? 1) !== 1) return null;
  if (Object.keys(item).some((key) => !SLIDER_KEYS.has(key))) return null;
  return {
    ...newSteer(concept, item.strength),
    unit: item.unit ?? "logits",
    layer: item.layer ?? null,
    schedule: item.schedule ?? "fixed",
    cutoffTokens: item.cutoff_tokens ?? 32,
    isGroup: item.group ?? false,
  };
}

function asSuppression(item) {
  const concept = conceptOf(item.concept);
  return concept && newSuppression(concept, item.strength);
}

function asOverride(item) {
  const concept = conceptOf(item.concept);
  return concept && newOverride(concept, item.weight);
}
