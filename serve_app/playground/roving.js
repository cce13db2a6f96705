// Where the focus goes: by arrow keys among many small targets of which one is in the tab order, and when a button goes
// away. Knows elements and where they lie, nothing of what they mean.

/** Handle a key in a group whose members match `selector`; true if the focus moved. */
export function moveFocus(event, selector) {
  const members = [...event.currentTarget.querySelectorAll(selector)];
  const at = members.indexOf(event.target.closest(selector));
  const target = at < 0 ? null : targetOf(event.key, members, at);
  if (!target) return false;
  event.preventDefault();
  target.focus();
  return true;
}

/**
 * Give the focus to the first match in sight, for a button that is about to go away. Only if a key pressed it: on a
 * phone the focus could call up the keyboard.
 */
export function handFocus(event, selector, within = document) {
  if (event.detail !== 0) return;
  [...within.querySelectorAll(selector)].find((element) => element.checkVisibility())?.focus();
}

function targetOf(key, members, at) {
  if (key === "ArrowRight") return members[at + 1];
  if (key === "ArrowLeft") return members[at - 1];
  if (key === "Home") return members[0];
  if (key === "End") return members.at(-1);
  if (key === "ArrowDown") return nearest(members.slice(at + 1), members[at], 1);
  if (key === "ArrowUp") return nearest(members.slice(0, at).reverse(), members[at], -1);
  return null;
}

/** The member of the next line in a direction that lies nearest, by the middle of its box. */
function nearest(candidates, from, direction) {
  const box = from.getBoundingClientRect();
  const middle = (box.left + box.right) / 2;
  let best = null;
  let line = null;
  for (const candidate of candidates) {
    const other = candidate.getBoundingClientRect();
    const isBeyond = direction > 0 ? other.top >= box.bottom - 1 : other.bottom <= box.top + 1;
    if (!isBeyond) continue;
    line ??= other.top;
    if (Math.abs(other.top - line) > 2) break;
    const distance = Math.abs((other.left + other.right) / 2 - middle);
    if (best === null || distance < best.distance) best = { candidate, distance };
  }
  return best?.candidate ?? null;
}
