try {
  var theme = localStorage.getItem("gristmill-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch (refused) {
  // Storage may be forbidden: the system's theme holds.
}
