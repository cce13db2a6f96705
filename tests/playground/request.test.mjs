// Settings to requests, code, links and presets.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { test } from "node:test";

import { LEAST, headOf, readCapabilities, servable } from "../../serve_app/playground/capabilities.js";
import { presetSettings } from "../../serve_app/playground/presets.js";
import * as request from "../../serve_app/playground/request.js";
import { checked, fromFragment, toFragment } from "../../serve_app/playground/share.js";
import { asCurl, asPython, pythonLiteral } from "../../serve_app/playground/snippets.js";

const { DEFAULTS } = request;
const animal = request.newSteer({ id: 5, name: "animal" }, 6);

test("a request holds only what was chosen", () => {
  const { path, body } = request.buildRequest({ ...DEFAULTS, prompt: "" }, { model: "m" });
  assert.equal(path, "v1/completions");
  assert.equal(body.prompt, "");
  for (const key of ["steering", "diffusion", "temperature", "top_p"]) assert.ok(!(key in body), key);
});

test("sliders and suppressions become steering, and the baseline has none", () => {
  const settings = {
    ...DEFAULTS,
    steers: [animal, { ...request.newSteer({ id: 7, name: null }, -2), schedule: "hard_cutoff", layer: 3, isGroup: true }],
    suppress: [request.newSuppression({ id: 9, name: null }, 4)],
  };
  assert.deepEqual(request.buildRequest(settings).body.steering, {
    interventions: [
      { concepts: [5], strength: 6, unit: "logits", schedule: "fixed" },
      { concepts: [7], strength: -2, unit: "logits", schedule: "hard_cutoff", layer: 3, cutoff_tokens: 32, group: true },
    ],
    suppress: [{ concept: 9, strength: 4 }],
  });
  assert.ok(!("steering" in request.buildRequest(settings, { isBaseline: true }).body));
});

test("a slider at zero asks for nothing", () => {
  const settings = { ...DEFAULTS, steers: [{ ...animal, strength: 0 }] };
  assert.equal(request.steeringOf(settings), null);
  assert.ok(!request.isSteered(settings));
  assert.ok(request.isSteered({ ...DEFAULTS, steers: [animal] }));
});

test("a policy brings its own parameter and no other", () => {
  const of = (changes) => request.diffusionOf({ ...DEFAULTS, ...changes });
  assert.equal(of({}), null);
  assert.deepEqual(of({ policy: "lossless", tokensPerStep: 4 }), { policy: "lossless" });
  assert.deepEqual(of({ policy: "threshold" }), { policy: "threshold", threshold: 0.5 });
  assert.deepEqual(of({ policy: "factor", policyValue: 0 }), { policy: "factor", factor: 0 });
  assert.deepEqual(of({ tokensPerStep: 4 }), { tokens_per_step: 4 });
});

test("guidance is sent with every policy but the one that is refused with it", () => {
  const of = (changes) => request.diffusionOf({ ...DEFAULTS, ...changes });
  assert.deepEqual(of({ guidance: 2 }), { cfg_scale: 2 });
  assert.deepEqual(of({ guidance: 2, policy: "factor" }), { policy: "factor", factor: 3, cfg_scale: 2 });
  assert.deepEqual(of({ guidance: 2, policy: "lossless" }), { policy: "lossless" });
  assert.equal(of({ guidance: 0 }), null);
});

test("set weights become overrides, and a weight of zero is one", () => {
  const overrides = [request.newOverride(animal, 0), request.newOverride({ id: 70 })];
  const expected = [{ concept: 5, weight: 0 }, { concept: 70, weight: 1 }];
  const settings = { ...DEFAULTS, overrides };
  assert.deepEqual(request.steeringOf(settings), { overrides: expected });
  assert.deepEqual(request.steeringOf({ ...settings, overrideMode: "reference" }), {
    overrides: expected,
    override_mode: "reference",
  });
  assert.ok(request.isSteered(settings));
  assert.equal(request.steeringOf({ ...DEFAULTS, overrideMode: "reference" }), null);
  assert.ok(!("steering" in request.buildRequest(settings, { isBaseline: true }).body));
});

test("what a server has not is not asked of it", () => {
  const settings = { ...DEFAULTS, guidance: 2, overrides: [request.newOverride(animal)] };
  assert.deepEqual(servable(settings, LEAST), { ...DEFAULTS });
  assert.deepEqual(servable(settings, { ...LEAST, hasGuidance: true, hasOverrides: true }), settings);
});

test("a turn of a chat goes to the chat's address", () => {
  const messages = [{ role: "user", content: "hello" }];
  const { path, body } = request.buildRequest(DEFAULTS, { messages });
  assert.equal(path, "v1/chat/completions");
  assert.deepEqual(body.messages, messages);
  assert.ok(!("prompt" in body));
});

test("a link gives back the settings it was made of", () => {
  const settings = { ...DEFAULTS, prompt: "\u00e9t\u00e9 \u2603", steers: [animal], seed: 9, policy: "factor", topP: 0.5 };
  Object.assign(settings, { guidance: 1.5, overrides: [request.newOverride(animal, 1.2)], overrideMode: "reference" });
  assert.deepEqual(fromFragment(toFragment(settings)), settings);
  assert.deepEqual(fromFragment(toFragment(DEFAULTS)), { ...DEFAULTS });
});

test("a link that holds nothing of ours gives nothing", () => {
  for (const fragment of ["", "#", "#s=", "#s=!!!", "#s=aGVsbG8", "#other"]) assert.equal(fromFragment(fragment), null);
});

test("a link's wrong values are left out one by one", () => {
  const settings = checked({
    prompt: 5,
    seed: -1,
    maxTokens: 2.5,
    policy: "unheard of",
    steers: [animal, { ...animal, unit: "tons" }, { ...animal, strength: 1e9 }, null, "x"],
    suppress: [{ id: "5", strength: 1 }, { id: 4, strength: 2, name: 7 }, { id: 3, strength: 2, extra: 1 }],
    guidance: 101,
    overrideMode: "at random",
    overrides: [{ id: 5, weight: "1" }, { id: 6, weight: 1e9 }, { weight: 1 }, { id: 7, weight: -0.5, extra: 1 }],
    __proto__: { polluted: true },
  });
  assert.deepEqual(settings, {
    ...DEFAULTS,
    steers: [animal],
    suppress: [{ id: 3, name: null, strength: 2 }],
    overrides: [{ id: 7, name: null, weight: -0.5 }],
  });
});

test("shell quoting survives quotes in the prompt", () => {
  const { body } = request.buildRequest({ ...DEFAULTS, prompt: "it's $HOME `x` \"y\"" });
  const command = asCurl("http://h/v1/completions", body);
  assert.ok(command.includes("it'\\''s $HOME `x` \\\"y\\\""));
});

/** The arguments that a POSIX shell gives curl for a command. */
function argumentsOf(command, variables) {
  const script = `curl() { for word; do printf '%s\\0' "$word"; done; }\n${command}`;
  const out = execFileSync("/bin/sh", ["-c", script], { env: variables, encoding: "utf8" });
  return out.split("\0").slice(0, -1);
}

test("a shell gives curl the very body and, where a key is in use, the key of its environment", () => {
  const { body } = request.buildRequest({ ...DEFAULTS, prompt: "it's $HOME `x` \"y\" \\ !" });
  const url = "http://h/v1/completions";
  const [options, to, json, sent, ...rest] = argumentsOf(asCurl(url, body), {});
  assert.deepEqual([options, to, json, JSON.parse(sent), rest], ["-sN", url, "--json", body, []]);
  const key = "a key's $HOME \"and\" `more`";
  const command = asCurl(url, body, { hasKey: true });
  assert.ok(command.includes('-H "authorization: Bearer $GLASSBLOCK_API_KEY"'));
  const words = argumentsOf(command, { GLASSBLOCK_API_KEY: key });
  assert.equal(words[words.indexOf("-H") + 1], `authorization: Bearer ${key}`);
  assert.deepEqual(JSON.parse(words[words.indexOf("--json") + 1]), body);
  assert.equal(words.length, 6);
});

test("Python reads the key from the environment where one is in use, and names none elsewhere", () => {
  const { path, body } = request.buildRequest(DEFAULTS, { model: "m" });
  const open = asPython("http://h/v1", path, body);
  assert.ok(open.includes('api_key="none"') && !open.includes("environ"));
  const keyed = asPython("http://h/v1", path, body, { hasKey: true });
  assert.ok(keyed.startsWith("import os\n\nfrom openai import OpenAI\n"));
  assert.ok(keyed.includes('api_key=os.environ["GLASSBLOCK_API_KEY"])'));
  assert.equal(keyed.replace("import os\n\n", "").replace('os.environ["GLASSBLOCK_API_KEY"]', '"none"'), open);
});

test("Python gets its own words for true, false and null", () => {
  assert.equal(pythonLiteral({ a: [true, false, null], b: "x\n" }), '{"a": [True, False, None], "b": "x\\n"}');
  const { path, body } = request.buildRequest({ ...DEFAULTS, steers: [animal] }, { model: "m" });
  const code = asPython("http://h/v1", path, body);
  assert.ok(code.includes("extra_body="));
  assert.ok(!code.includes("stream"));
  assert.ok(!/\b(true|false|null)\b/.test(code));
});

test("a preset of single concepts becomes sliders", () => {
  // As the server answers: everything spelled out.
  const concept = { id: 5, name: "animal" };
  const spelled = { strength: 6, unit: "logits", layer: 3, schedule: "fixed", cutoff_tokens: 32 };
  const steering = {
    interventions: [{ concepts: [{ ...concept, weight: 1 }], ...spelled }],
    suppress: [{ concept: { id: 9, name: null }, strength: 4 }],
    overrides: [{ concept, weight: 0.5 }],
    override_mode: "reference",
  };
  const loaded = presetSettings({ id: "zoo@1", name: "zoo", version: 1, steering });
  assert.deepEqual(loaded.steers, [{ ...animal, layer: 3 }]);
  assert.deepEqual(loaded.suppress, [{ id: 9, name: null, strength: 4 }]);
  assert.deepEqual(loaded.overrides, [request.newOverride(concept, 0.5)]);
  assert.deepEqual([loaded.overrideMode, loaded.preset], ["reference", null]);
});

test("what was saved from sliders comes back as the same sliders", () => {
  const settings = { ...DEFAULTS, steers: [{ ...animal, name: null }], suppress: [request.newSuppression({ id: 9 })] };
  settings.overrides = [request.newOverride({ id: 70 }, 0)];
  const { steers, suppress, overrides } = presetSettings({ name: "zoo", version: 1, steering: request.steeringOf(settings) });
  assert.deepEqual([steers, suppress, overrides], [settings.steers, settings.suppress, settings.overrides]);
});

test("a preset that sliders cannot show is taken by reference", () => {
  const expected = { steers: [], suppress: [], overrides: [], overrideMode: "delta", preset: "zoo@2" };
  const one = { concepts: [1], strength: 3 };
  for (const steering of [
    { interventions: [{ concepts: [1, 2], strength: 3 }] },
    { interventions: [{ concepts: [{ id: 1, weight: 0.5 }], strength: 3 }] },
    { interventions: [one, one] },
    { interventions: [one], overrides: [{ concept: "by label", weight: 1 }] },
    { interventions: [{ concepts: ["by label"], strength: 3 }] },
    { concepts: [1], strength: 2 },
  ]) {
    assert.deepEqual(presetSettings({ name: "zoo", version: 2, steering }), expected, JSON.stringify(steering));
  }
});

test("a server says what it can do, and of one that says nothing the least is assumed", () => {
  assert.deepEqual(readCapabilities(null), LEAST);
  const said = readCapabilities({
    model: { n_layers: 6 },
    policies: { confidence: {}, threshold: {}, unheard_of: {} },
    limits: { max_tokens: 512 },
    has_chat_template: true,
    has_presets: false,
    has_guidance: true,
    heads: { known: { num_concepts: 64, first_id: 0 }, discovered: { num_concepts: 32, first_id: 64 } },
  });
  assert.deepEqual(
    [said.isChat, said.hasPresets, said.policies, said.numLayers, said.maxTokens],
    [true, false, ["confidence", "threshold"], 6, 512],
  );
  assert.deepEqual([said.hasGuidance, said.hasOverrides, said.numConcepts], [true, false, 96]);
  assert.deepEqual([headOf(63, said), headOf(64, said), headOf(64, LEAST)], ["known", "discovered", "known"]);
});
