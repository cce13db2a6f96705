// A request written as a command line and as Python. Knows how shells and Python quote; sends nothing.

const KEY_VARIABLE = "GLASSBLOCK_API_KEY";
const STANDARD = ["model", "prompt", "messages", "max_tokens", "seed", "temperature", "top_p"];

/**
 * The very request of the page as a curl command, for POSIX shells. `hasKey`: it goes with an API key, which the command
 * takes from the environment; the key itself is in no code, which may be shown around.
 */
export function asCurl(url, body, { hasKey = false } = {}) {
  const json = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  // In double quotes, so that the shell puts the variable's value there.
  const key = hasKey ? ` -H "authorization: Bearer $${KEY_VARIABLE}"` : "";
  return `curl -sN ${url}${key} --json '${json}'\n`;
}

/** The same request with OpenAI's Python client: fields of ours go in `extra_body`. Answers at once, not as a stream. */
export function asPython(baseUrl, path, body, { hasKey = false } = {}) {
  const key = hasKey ? `os.environ["${KEY_VARIABLE}"]` : '"none"';
  const extra = Object.fromEntries(
    Object.entries(body).filter(([key]) => !STANDARD.includes(key) && !key.startsWith("stream")),
  );
  const fields = STANDARD.filter((key) => key in body).map((key) => `    ${key}=${pythonLiteral(body[key], 4)},`);
  const isChat = path.includes("chat");
  const call = isChat ? "client.chat.completions.create" : "client.completions.create";
  const text = isChat ? "answer.choices[0].message.content" : "answer.choices[0].text";
  return `${hasKey ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url=${pythonLiteral(baseUrl)}, api_key=${key})
answer = ${call}(
${fields.join("\n")}
    extra_body=${pythonLiteral(extra, 4)},
)
print(${text})
for token in answer.model_extra["attribution"][0]["tokens"]:
    print(repr(token["token"]), token["known_total"], token["discovered_total"], token["epsilon"])
`;
}

/** A JSON value as Python writes it. */
export function pythonLiteral(value, indent = 0) {
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = " ".repeat(indent + 4);
  const items = Array.isArray(value)
    ? value.map((item) => pythonLiteral(item, indent + 4))
    : Object.entries(value).map(([key, item]) => `${JSON.stringify(key)}: ${pythonLiteral(item, indent + 4)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const line = `${open}${items.join(", ")}${close}`;
  if (line.length <= 80 && !line.includes("\n")) return line;
  return `${open}\n${items.map((item) => `${inner}${item},`).join("\n")}\n${" ".repeat(indent)}${close}`;
}
