// Settings to and from a link. They travel in the part behind `#`, which browsers never send to a server. What comes
// from a link is not trusted: each field must have its type and lie within its limits, or it is left out.

import { DEFAULTS, OVERRIDE_MODES, POLICIES } from "./request.js";

const VERSION = 1;
const MAX_ITEMS = 32;
const MAX_STRENGTH = 1000;

/** The fragment that stands for the settings; only what differs from the defaults is in it. */
export function toFragment(settings) {
  const changed = Object.entries(settings).filter(
    ([key, value]) => key in DEFAULTS && JSON.stringify(value) !== JSON.stringify(DEFAULTS[key]),
  );
  const bytes = new TextEncoder().encode(JSON.stringify({ v: VERSION, ...Object.fromEntries(changed) }));
  let binary = "";
  for (const byte of bytes) binary += String.fromCharCode(byte);
  return `#s=${btoa(binary).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "")}`;
}

/** The settings of a fragment, complete; null for one that holds none. */
export function fromFragment(fragment) {
  const match = /^#s=([A-Za-z0-9_-]+)$/.exec(fragment);
  if (!match) return null;
  try {
    const binary = atob(match[1].replaceAll("-", "+").replaceAll("_", "/"));
    const bytes = Uint8Array.from(binary, (char) => char.charCodeAt(0));
    const parsed = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes));
    return parsed !== null && typeof parsed === "object" && parsed.v === VERSION ? checked(parsed) : null;
  } catch {
    return null;
  }
}

/** Complete settings from an object of unknown origin. */
export function checked(found) {
  const settings = { ...DEFAULTS };
  const take = (key, check) => {
    if (key in found && check(found[key])) settings[key] = found[key];
  };
  take("prompt", (value) => typeof value === "string");
  take("maxTokens", isWhole(1, 1_000_000));
  take("seed", isWhole(0, Number.MAX_SAFE_INTEGER));
  take("isSeedLocked", isFlag);
  take("temperature", isNumberOrNull(0, 100));
  take("topP", isNumberOrNull(0, 1));
  take("policy", (value) => POLICIES.some((policy) => policy.id === value));
  take("policyValue", isNumberOrNull(0, 1e6));
  take("tokensPerStep", (value) => value === null || isWhole(1, 1024)(value));
  take("guidance", isNumberOrNull(0, 100));
  take("overrideMode", (value) => OVERRIDE_MODES.some((mode) => mode.id === value));
  take("preset", (value) => value === null || typeof value === "string");
  take("isComparing", isFlag);
  take("isChat", isFlag);
  settings.steers = list(found.steers).filter(isSteer).map(cleanSteer);
  settings.suppress = list(found.suppress)
    .filter((item) => isConcept(item) && isNumber(0, MAX_STRENGTH)(item.strength))
    .map(({ id, name, strength }) => ({ id, name: name ?? null, strength }));
  settings.overrides = list(found.overrides)
    .filter((item) => isConcept(item) && isNumber(-MAX_STRENGTH, MAX_STRENGTH)(item.weight))
    .map(({ id, name, weight }) => ({ id, name: name ?? null, weight }));
  return settings;
}

const list = (value) => (Array.isArray(value) ? value.slice(0, MAX_ITEMS) : []);
const isFlag = (value) => typeof value === "boolean";
const isNumber = (low, high) => (value) => typeof value === "number" && value >= low && value <= high;
const isWhole = (low, high) => (value) => Number.isInteger(value) && value >= low && value <= high;
const isNumberOrNull = (low, high) => (value) => value === null || isNumber(low, high)(value);

function isConcept(item) {
  if (item === null || typeof item !== "object") return false;
  return isWhole(0, 1e9)(item.id) && (item.name === undefined || item.name === null || typeof item.name === "string");
}

function isSteer(item) {
  return (
    isConcept(item) &&
    isNumber(-MAX_STRENGTH, MAX_STRENGTH)(item.strength) &&
    ["logits", "raw"].includes(item.unit) &&
    ["fixed", "hard_cutoff"].includes(item.schedule) &&
    (item.layer === null || isWhole(0, 10_000)(item.layer)) &&
    isWhole(1, 1_000_000)(item.cutoffTokens) &&
    isFlag(item.isGroup)
  );
}

function cleanSteer({ id, name, strength, unit, layer, schedule, cutoffTokens, isGroup }) {
  return { id, name: name ?? null, strength, unit, layer, schedule, cutoffTokens, isGroup };
}
