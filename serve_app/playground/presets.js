// Saved steering: to and from the server's presets. Knows the preset addresses and which presets sliders can show.

import { askJson } from "./api.js";
import { newSteer, newSuppression, steeringOf } from "./request.js";

const ADDRESS = "v1/steering/presets";

/** The presets that the server holds. */
export async function listPresets(key) {
  return (await askJson(ADDRESS, { key })).data ?? [];
}

/** Save the settings' steering under a name; the answer has its version. */
export async function savePreset(name, description, settings, key) {
  return askJson(ADDRESS, { key, body: { name, description, steering: steeringOf(settings) } });
}

/** `name@version`, as requests refer to a preset. */
export function presetId(preset) {
  return preset.id ?? `${preset.name}@${preset.version}`;
}

/**
 * The settings that a preset stands for: sliders where they can show all of it, else a reference to it.
 *
 * `named` gives a concept's name for an id, or null.
 */
export function presetSettings(preset, named = () => null) {
  const sliders = asSliders(preset.steering ?? {}, named);
  return sliders ? { ...sliders, preset: null } : { steers: [], suppress: [], preset: presetId(preset) };
}

const SLIDER_KEYS = new Set(["concepts", "strength", "unit", "layer", "schedule", "cutoff_tokens", "group"]);

function asSliders(steering, named) {
  const { interventions = [], suppress = [], ...others } = steering;
  if (Object.values(others).some((value) => value !== null && value !== false && value !== undefined)) return null;
  const steers = interventions.map((item) => asSlider(item, named));
  const suppressed = suppress.map((item) => (Number.isInteger(item.concept) ? item : null));
  if ([...steers, ...suppressed].includes(null)) return null;
  if (new Set(steers.map((steer) => steer.id)).size !== steers.length) return null;
  return {
    steers,
    suppress: suppressed.map((item) => newSuppression({ id: item.concept, name: named(item.concept) }, item.strength)),
  };
}

function asSlider(item, named) {
  const [only, ...rest] = item.concepts ?? [];
  const id = only?.id ?? only;
  const weight = only?.weight ?? 1;
  if (rest.length || !Number.isInteger(id) || weight !== 1) return null;
  if (Object.keys(item).some((key) => !SLIDER_KEYS.has(key))) return null;
  return {
    ...newSteer({ id, name: named(id) }, item.strength),
    unit: item.unit ?? "logits",
    layer: item.layer ?? null,
    schedule: item.schedule ?? "fixed",
    cutoffTokens: item.cutoff_tokens ?? 32,
    isGroup: item.group ?? false,
  };
}
