// What a visitor can try with one click. Knows the demo model's concepts by name only: they are looked up on the server
// before use, and an example whose concept is not there is not offered.

/** Where a first visit begins. */
export const FIRST = { prompt: "an animal that", maxTokens: 96 };

export const EXAMPLES = [
  {
    id: "toward",
    title: "Steer toward animal",
    about: "The same seed with and without one concept",
    concepts: [{ name: "animal", strength: 6 }],
    settings: { prompt: "any of several", isComparing: true, seed: 1, maxTokens: 61 },
  },
  {
    id: "away",
    title: "Steer away from animal",
    about: "A negative strength turns a prompt's meaning",
    concepts: [{ name: "animal", strength: -6 }],
    settings: { prompt: "large tropical", isComparing: true, seed: 2, maxTokens: 62 },
  },
  {
    id: "blend",
    title: "Blend plant and food",
    about: "Two concepts at once, from nothing",
    concepts: [
      { name: "plant", strength: 4 },
      { name: "food", strength: 4 },
    ],
    settings: { prompt: "", seed: 2, maxTokens: 64 },
  },
  {
    id: "fast",
    title: "Several words a pass",
    about: "Fill many positions at once, and see what it costs",
    concepts: [],
    settings: { prompt: "the act of", policy: "entropy_bound", policyValue: 6, seed: 2, maxTokens: 61 },
  },
];
