// Sets the chosen theme before the first paint; a classic script, as modules run after it.
try {
  const theme = localStorage.getItem("embedder.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage is switched off: the system's theme stays.
}
