// Presets: save the steering under a name, load one that the server holds. Shown only where the server has presets.

import { html, useEffect, useState } from "./html.js";
import { CloseButton } from "./icons.js";
import { listPresets, presetId, presetSettings, savePreset } from "./presets.js";
import { steeringOf } from "./request.js";
import { apiKey, asked, set, settings, toast } from "./store.js";

/** Loads and saves presets. */
export function Presets() {
  const [list, setList] = useState([]);
  const [name, setName] = useState("");
  const [error, setError] = useState(null);
  const attempt = async (work) => {
    try {
      setError(null);
      await work();
    } catch (problem) {
      setError(problem);
    }
  };
  const refresh = () => attempt(async () => setList(await listPresets(apiKey.value)));
  useEffect(() => {
    refresh();
  }, []);
  const save = () =>
    attempt(async () => {
      const saved = await savePreset(name.trim().replace(/\s+/g, "-"), "Saved in the playground", asked.value, apiKey.value);
      toast.value = `Saved as ${presetId(saved)}`;
      setName("");
      await refresh();
    });
  const load = (id) => {
    const preset = list.find((item) => presetId(item) === id);
    if (!preset) return;
    set(presetSettings(preset));
    toast.value = `Loaded ${id}`;
  };
  return html`<div class="presets">
    ${settings.value.preset !== null &&
    html`<p class="tag-line">
      <span class="tag">preset</span> <bdi>${settings.value.preset}</bdi>
      <${CloseButton} label="Leave the preset" onClick=${() => set({ preset: null })} />
    </p>`}
    <div class="row">
      <label class="grow">
        <span class="sr-only">Load a preset</span>
        <select value="" onChange=${(event) => load(event.target.value)} disabled=${list.length === 0}>
          <option value="">${list.length ? "Load a preset" : "No presets yet"}</option>
          ${list.map(
            (preset) =>
              html`<option key=${presetId(preset)} value=${presetId(preset)} disabled=${preset.is_compatible === false}>
                ${presetId(preset)}${preset.is_compatible === false ? " (of another model)" : ""}
              </option>`,
          )}
        </select>
      </label>
    </div>
    ${steeringOf(asked.value) !== null &&
    html`<form
      class="row"
      onSubmit=${(event) => {
        event.preventDefault();
        if (name.trim() !== "") save();
      }}
    >
      <label class="grow">
        <span class="sr-only">Name of a new preset</span>
        <input type="text" placeholder="Save as" value=${name} onInput=${(event) => setName(event.target.value)} />
      </label>
      <button type="submit" class="button" disabled=${name.trim() === ""}>Save</button>
    </form>`}
    ${error && html`<p class="inline-error" role="alert">${error.message} <code>${error.code}</code></p>`}
  </div>`;
}
