// htm bound to preact, and the hooks that the views use: the one place that names the vendored files.

import { h, render } from "./vendor/preact.mjs";
import htm from "./vendor/htm.mjs";

export const html = htm.bind(h);
export { render };
export { useEffect, useId, useLayoutEffect, useRef, useState } from "./vendor/hooks.mjs";
export { batch, computed, effect, signal } from "./vendor/signals.mjs";
