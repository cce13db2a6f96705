// The openai package for JavaScript: chat, completions, streams, embeddings and errors. Prints one line of JSON.
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0, timeout: 120_000 });
const report = { version: "", ran: [], checks: 0, failures: [] };
report.version = JSON.parse(readFileSync(new URL("node_modules/openai/package.json", import.meta.url))).version;

let partName = "";
async function part(name, body) {
  partName = name;
  report.ran.push(name);
  try {
    await body();
  } catch (error) {
    report.failures.push(`${name}: ${error}`);
  }
}
function that(holds, claim, seen) {
  report.checks += 1;
  if (!holds) report.failures.push(`${partName}: not so: ${claim}; saw ${JSON.stringify(seen)}`);
}
const equal = (seen, wanted, claim) =>
  that(JSON.stringify(seen) === JSON.stringify(wanted), `${claim} (wanted ${JSON.stringify(wanted)})`, seen);

const prompt = "a small animal that";
const common = { model, seed: 7, max_tokens: 70, ignore_eos: true, diffusion: { tokens_per_step: 8 } };
const messages = [{ role: "user", content: [{ type: "text", text: "an animal with wings" }] }];
const special = ["<|endofchunk|>", "<|endoftext|>"];
let text = "";
let answer = "";

await part("models", async () => {
  const ids = [];
  for await (const item of client.models.list()) ids.push(item.id);
  that(ids.includes(model), "the model is listed", ids);
});

await part("completions", async () => {
  const plain = await client.completions.create({ ...common, prompt });
  text = plain.choices[0].text;
  that(text.trim().length > 0, "there is text", text);
  equal(plain.choices[0].finish_reason, "length", "max_tokens ends it");
  equal(plain.usage.completion_tokens, 70, "max_tokens is exact");
  let streamed = "";
  let usage = null;
  const options = { stream: true, stream_options: { include_usage: true } };
  for await (const chunk of await client.completions.create({ ...common, prompt, ...options })) {
    streamed += chunk.choices[0]?.text ?? "";
    usage = chunk.usage ?? usage;
  }
  equal(streamed, text, "streamed text equals plain text");
  equal(usage?.completion_tokens, 70, "the stream's usage counts the tokens");
  const stop = text.slice(35, 39);
  const stopped = await client.completions.create({ ...common, prompt, stop: [stop] });
  equal(stopped.choices[0].text, text.split(stop)[0], "the text ends before the stop string");
  const scored = await client.completions.create({ ...common, prompt, logprobs: 2 });
  const spelled = scored.choices[0].logprobs.tokens.filter((token) => !special.includes(token)).join("");
  equal(spelled, text, "the tokens of logprobs spell the text, special ones aside");
});

await part("chat", async () => {
  const plain = await client.chat.completions.create({ ...common, messages, logprobs: true, top_logprobs: 2 });
  answer = plain.choices[0].message.content;
  that(answer.trim().length > 0, "there is text", answer);
  equal(plain.choices[0].message.role, "assistant", "the answer is the assistant's");
  equal(plain.choices[0].logprobs.content.length, 70, "log probabilities, one entry a token");
  equal(plain.usage.completion_tokens, 70, "max_tokens is exact");
});

await part("chat streamed", async () => {
  let streamed = "";
  const reasons = [];
  for await (const chunk of await client.chat.completions.create({ ...common, messages, stream: true })) {
    streamed += chunk.choices[0].delta.content ?? "";
    reasons.push(chunk.choices[0].finish_reason);
  }
  equal(streamed, answer, "streamed text equals plain text");
  equal(reasons.filter((reason) => reason !== null), ["length"], "one finish_reason");
  equal(reasons.at(-1), "length", "finish_reason comes last");
  const helper = client.chat.completions.stream({ ...common, messages });
  equal(await helper.finalContent(), answer, "the stream helper gathers the same");
});

await part("embeddings", async () => {
  const input = [prompt, "a plant"];
  const packed = await client.embeddings.create({ model, input });
  const floats = await client.embeddings.create({ model, input, encoding_format: "float" });
  equal(packed.data.map((item) => item.index), [0, 1], "one vector an input, in order");
  const width = floats.data[0].embedding.length;
  that(width >= 64, "a vector has the model's width", width);
  equal(packed.data[0].embedding.length, width, "base64, which the package asks for, has as many numbers");
  const off = floats.data.flatMap((item, i) => item.embedding.map((x, j) => Math.abs(x - packed.data[i].embedding[j])));
  that(Math.max(...off) < 1e-5, "base64 holds the same numbers", Math.max(...off));
});

await part("extensions", async () => {
  const steering = { concepts: ["animal"], strength: 8 };
  const steered = await client.completions.create({ ...common, prompt: "", steering });
  equal(steered.steering.resolved[0].concepts[0].name, "animal", "the concept is resolved");
});

await part("errors", async () => {
  const unknown = await client.completions.create({ ...common, prompt, model: "no-such-model" }).catch((e) => e);
  that(unknown instanceof OpenAI.NotFoundError, "an unknown model is a NotFoundError", `${unknown}`);
  equal(unknown.code, "model_not_found", "with its code");
  const wrong = await client.completions.create({ ...common, prompt, steering: { strenght: 1 } }).catch((e) => e);
  that(wrong instanceof OpenAI.BadRequestError, "a misspelt key of ours is a BadRequestError", `${wrong}`);
  equal(wrong.param, "steering.strenght", "that names its path");
});

await part("disconnects", async () => {
  const stream = await client.completions.create({ ...common, prompt, max_tokens: 900, stream: true });
  for await (const _ of stream) break;
  const after = await client.completions.create({ ...common, prompt });
  equal(after.choices[0].text, text, "after an abandoned stream the server answers as before");
});

console.log(`\n${JSON.stringify(report)}`);
process.exitCode = report.failures.length || !report.checks ? 1 : 0;
