// The clock of the display: how far into the recorded events it is. Knows numbers of events and seconds; the events are
// recorded whatever the display does.

export const SPEEDS = [
  { id: "0.25", label: "\u00bc\u00d7", rate: 6 },
  { id: "0.5", label: "\u00bd\u00d7", rate: 12 },
  { id: "1", label: "1\u00d7", rate: 24 },
  { id: "2", label: "2\u00d7", rate: 48 },
  { id: "live", label: "live", rate: Infinity },
];

/** A player at the beginning. `cursor` counts events shown; `carry` is the part of the next one that is due. */
export const START = { cursor: 0, isPlaying: true, speed: "1", carry: 0 };

/** The player `seconds` later, with `available` events recorded. */
export function tick(player, seconds, available) {
  if (!player.isPlaying || player.cursor >= available) return player.carry === 0 ? player : { ...player, carry: 0 };
  const { rate } = SPEEDS.find((speed) => speed.id === player.speed);
  if (rate === Infinity) return { ...player, cursor: available, carry: 0 };
  // After a pause of the clock itself, as in a hidden tab, at most a second is made up for.
  const due = player.carry + rate * Math.min(seconds, 1);
  const cursor = Math.min(available, player.cursor + Math.floor(due));
  return { ...player, cursor, carry: cursor === available ? 0 : due - Math.floor(due) };
}

/** Moved to an event by hand, which pauses. */
export function seek(player, cursor, available) {
  return { ...player, cursor: Math.max(0, Math.min(Math.round(cursor), available)), carry: 0, isPlaying: false };
}

/** Play or pause; play at the end begins again. */
export function toggle(player, available, isComplete) {
  if (player.isPlaying && !(isComplete && player.cursor >= available)) return { ...player, isPlaying: false };
  const cursor = isComplete && player.cursor >= available ? 0 : player.cursor;
  return { ...player, cursor, carry: 0, isPlaying: true };
}

/** The number of events after which the next or the previous step has been shown. */
export function stepFrom(events, cursor, direction) {
  let at = cursor;
  do at += direction;
  while (at > 0 && at < events.length && events[at - 1].type !== "step");
  return Math.max(0, Math.min(at, events.length));
}
