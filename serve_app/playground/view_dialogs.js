// The dialogs: the request as code, what went to and came from the server, and its models. Knows the current settings
// and runs.

import { html, useEffect, useRef, useState } from "./html.js";
import { address, askJson } from "./api.js";
import { CloseButton, Icon } from "./icons.js";
import { rawExcerpt, rawText } from "./raw.js";
import { buildRequest } from "./request.js";
import { asCurl, asPython } from "./snippets.js";
import { activeLanes, apiKey, asked, conversation, dialog, runs, server, settings, toast } from "./store.js";

/** The open dialog, if one is. */
export function Dialogs() {
  if (dialog.value === "code") return html`<${Frame} title="This request as code"><${Code} /><//>`;
  if (dialog.value === "raw") return html`<${Frame} title="Request and answer"><${Raw} /><//>`;
  if (dialog.value === "models") return html`<${Frame} title="Models"><${Models} /><//>`;
  return null;
}

/** Text to the clipboard, with a word about how it went. */
export async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    toast.value = `${what} copied`;
  } catch {
    toast.value = `${what}: the browser does not let the page copy; select it and copy by hand`;
  }
}

function Frame({ title, children }) {
  const element = useRef(null);
  useEffect(() => {
    // The browser keeps the focus inside and gives it back.
    element.current.showModal();
  }, []);
  const close = () => {
    dialog.value = null;
  };
  return html`<dialog ref=${element} aria-label=${title} onClose=${close}>
    <header class="card-head">
      <h2>${title}</h2>
      <${CloseButton} label="Close" onClick=${() => element.current.close()} />
    </header>
    ${children}
  </dialog>`;
}

/** Text with a button that copies it, or what `whole` gives if that is more than is shown. */
function Block({ title, text, testid, whole = () => text }) {
  return html`<div class="code-block">
    <header class="card-head">
      <h3>${title}</h3>
      <button type="button" class="button" onClick=${() => copy(whole(), title)}><${Icon} name="copy" />Copy</button>
    </header>
    <pre tabindex="0" role="region" aria-label=${title} data-testid=${testid}><code dir="ltr">${text}</code></pre>
  </div>`;
}

function Code() {
  const { model, capabilities } = server.value;
  const hasKey = apiKey.value !== "";
  const isChat = settings.value.isChat && capabilities.isChat;
  const messages = isChat ? [...conversation.value, { role: "user", content: settings.value.prompt }] : null;
  const { path, body } = buildRequest(asked.value, { model, messages });
  return html`<${Block} title="curl" text=${asCurl(address(path), body, { hasKey })} testid="curl" />
    <${Block} title="Python, with the openai package" text=${asPython(address("v1"), path, body, { hasKey })} testid="python" />`;
}

function Raw() {
  if (activeLanes.value.length === 0) return html`<p class="quiet">Nothing has been sent yet.</p>`;
  return activeLanes.value.map((lane) => {
    const run = runs.value[lane];
    // A run is done by the end mark alone; anything else is an error.
    const isComplete = run.status === "done";
    const suffix = lane === "main" ? "" : ", unsteered";
    return html`<section key=${lane}>
      <p class="quiet">request id <code>${run.requestId ?? "none"}</code></p>
      <${Block} title=${`Request${suffix}`} text=${`POST ${address(run.path)}\n${JSON.stringify(run.body, null, 2)}`} testid="raw-request" />
      <${Block}
        title=${`Answer${suffix}, chunk by chunk`}
        text=${rawExcerpt(run.raw, isComplete)}
        whole=${() => rawText(run.raw, isComplete)}
        testid="raw-answer"
      />
    </section>`;
  });
}

/** The answer of v1/models, asked for with the key, which a link could not send. */
function Models() {
  const path = "v1/models";
  const [{ text, error }, setAnswer] = useState({});
  useEffect(() => {
    askJson(path, { key: apiKey.value }).then(
      (answer) => setAnswer({ text: JSON.stringify(answer, null, 2) }),
      (problem) => setAnswer({ error: problem }),
    );
  }, []);
  if (error) return html`<p class="inline-error" role="alert">${error.message} <code>${error.code}</code></p>`;
  if (text === undefined) return html`<p class="quiet" role="status">Asking the server</p>`;
  return html`<${Block} title=${address(path)} text=${text} testid="models" />`;
}
