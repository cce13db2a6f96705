// Every word with the server. Knows addresses, headers, errors and streams; nothing of what is shown. Addresses are
// relative to the page, so a gateway may serve all of it under a prefix.

import { createParser } from "./sse.js";

/** An answer other than success, or none. `code` is the server's, or `server_away` and `stream_cut` of our own. */
export class ApiError extends Error {
  constructor({ message, code, status = 0, param = null, requestId = null, retryAfter = null }) {
    super(message);
    Object.assign(this, { code, status, param, requestId, retryAfter });
  }
}

/** The address of a path, absolute. */
export function address(path) {
  return new URL(path, document.baseURI).href;
}

function newRequestId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return `page-${[...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

async function send(path, { body, key, signal, method } = {}) {
  const requestId = newRequestId();
  const headers = { "x-request-id": requestId };
  if (body !== undefined) headers["content-type"] = "application/json";
  if (key) headers.authorization = `Bearer ${key}`;
  const options = { method: method ?? (body === undefined ? "GET" : "POST"), headers, signal };
  if (body !== undefined) options.body = JSON.stringify(body);
  let response;
  try {
    response = await fetch(address(path), options);
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError({ message: "The server does not answer.", code: "server_away", requestId });
  }
  const answeredId = response.headers.get("x-request-id") ?? requestId;
  if (!response.ok) throw await failure(response, answeredId);
  return { response, requestId: answeredId };
}

async function failure(response, requestId) {
  const text = await response.text().catch(() => "");
  const retryAfter = Number(response.headers.get("retry-after")) || null;
  let error = {};
  try {
    error = JSON.parse(text).error ?? {};
  } catch {
    // A proxy's page is no JSON; its status says enough.
  }
  return new ApiError({
    message: error.message ?? `The server answered ${response.status} ${response.statusText}`.trim(),
    code: error.code ?? `http_${response.status}`,
    status: response.status,
    param: error.param ?? null,
    requestId,
    retryAfter,
  });
}

/** A JSON answer. Options: `body` (makes it a POST), `method`, `key`, `signal`. */
export async function askJson(path, options) {
  const { response } = await send(path, options);
  return response.status === 204 ? null : response.json();
}

/** The same, or null where the server does not have such a thing or does not answer. */
export async function askIfThere(path, options) {
  try {
    return await askJson(path, options);
  } catch (error) {
    if (error instanceof ApiError) return null;
    throw error;
  }
}

/**
 * A streamed answer: `onOpen(requestId)`, then `onChunk(object)` for every chunk. Resolves at its proper end.
 *
 * Raises ApiError for a refusal, for an error within the stream and for a stream that breaks off; an abort of `signal`
 * is raised as fetch raises it.
 */
export async function askStream(path, { body, key, signal, onOpen, onChunk }) {
  const { response, requestId } = await send(path, { body, key, signal });
  onOpen(requestId);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const parse = createParser();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      for (const data of parse(value)) {
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError({ ...chunk.error, requestId });
        onChunk(chunk);
      }
    }
  } catch (error) {
    if (error instanceof ApiError || signal?.aborted) throw error;
  }
  throw new ApiError({ message: "The connection broke off before the end.", code: "stream_cut", requestId });
}
