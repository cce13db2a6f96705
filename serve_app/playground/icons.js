// The page's few drawings, as inline SVG. They are decoration: every control that shows one has a name in words.

import { html } from "./html.js";

const PATHS = {
  play: "M7 5v14l12-7z",
  pause: "M7 5h3.5v14H7zM13.5 5H17v14h-3.5z",
  replay: "M12 5a7 7 0 1 1-6.6 4.7l1.9.7A5 5 0 1 0 12 7v3L7.5 6 12 2z",
  back: "M16 5v14L8 12zM6 5h2v14H6z",
  forward: "M8 5v14l8-7zM16 5h2v14h-2z",
  stop: "M7 7h10v10H7z",
  lock: "M8 10V8a4 4 0 1 1 8 0v2h1v9H7v-9zm2 0h4V8a2 2 0 1 0-4 0z",
  unlock: "M8 10V8a4 4 0 0 1 7.7-1.5l-1.8.8A2 2 0 0 0 10 8v2h7v9H7v-9z",
  dice: "M5 5h14v14H5zm4.5 3a1.5 1.5 0 1 0 0 3 1.5 1.5 0 0 0 0-3zm5 5a1.5 1.5 0 1 0 0 3 1.5 1.5 0 0 0 0-3z",
  check: "m9.5 18-5.6-5.6 1.5-1.5 4.1 4.1L18.6 6l1.5 1.5z",
  close: "M6.4 5 12 10.6 17.6 5 19 6.4 13.4 12l5.6 5.6-1.4 1.4-5.6-5.6L6.4 19 5 17.6 10.6 12 5 6.4z",
  share: "M14 4h6v6h-2V7.4l-7.3 7.3-1.4-1.4L16.6 6H14zM5 6h6v2H7v9h9v-4h2v6H5z",
  code: "m9 7-5 5 5 5 1.4-1.4L6.8 12l3.6-3.6zm6 0 5 5-5 5-1.4-1.4 3.6-3.6-3.6-3.6z",
  raw: "M5 5h14v2H5zm0 4h9v2H5zm0 4h14v2H5zm0 4h9v2H5z",
  sun: "M12 7a5 5 0 1 1 0 10 5 5 0 0 1 0-10zM11 1h2v4h-2zm0 18h2v4h-2zM1 11h4v2H1zm18 0h4v2h-4zM4.2 5.6l1.4-1.4 2.8 2.8L7 8.4zM15.6 17l1.4-1.4 2.8 2.8-1.4 1.4zM4.2 18.4 7 15.6 8.4 17l-2.8 2.8zM15.6 7l2.8-2.8 1.4 1.4L17 8.4z",
  moon: "M19.5 14.5A8 8 0 0 1 9.5 4.5a8 8 0 1 0 10 10z",
  search: "M10.5 4a6.5 6.5 0 0 1 5.2 10.4l4.4 4.5-1.4 1.4-4.5-4.4A6.5 6.5 0 1 1 10.5 4zm0 2a4.5 4.5 0 1 0 0 9 4.5 4.5 0 0 0 0-9z",
  copy: "M9 4h10v12h-2V6H9zM5 8h10v12H5z",
  save: "M6 4h12v16l-6-4-6 4z",
};

/** One of the drawings above. */
export function Icon({ name }) {
  return html`<svg class="icon" viewBox="0 0 24 24" aria-hidden="true" focusable="false"><path d=${PATHS[name]} /></svg>`;
}

/** The cross that closes or takes away what it stands in, which `label` names. */
export function CloseButton({ label, onClick }) {
  return html`<button type="button" class="icon-button" aria-label=${label} onClick=${onClick}>
    <${Icon} name="close" />
  </button>`;
}

/** The mark of the project: four glass blocks, one of them clear. */
export function Logo() {
  return html`<svg class="logo" viewBox="0 0 32 32" aria-hidden="true" focusable="false">
    <rect class="logo-known" x="2" y="2" width="13" height="13" rx="3.5" />
    <rect class="logo-discovered" x="17" y="2" width="13" height="13" rx="3.5" />
    <rect class="logo-mask" x="2.75" y="17.75" width="11.5" height="11.5" rx="3" />
    <rect class="logo-epsilon" x="17" y="17" width="13" height="13" rx="3.5" />
  </svg>`;
}
