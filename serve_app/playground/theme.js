// Runs before the first paint: a theme chosen earlier holds from the start, without a flash of the other one.
try {
  const chosen = localStorage.getItem("theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Without storage the system's choice holds.
}
