// Sets the theme before the first paint: the one that was chosen, else the system's. Loaded as a classic script, so that
// the page does not flash.
(() => {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    let chosen = null;
    try { chosen = localStorage.getItem("theme"); } catch { /* storage is blocked: the system's theme applies */ }
    document.documentElement.dataset.theme = chosen === "light" || chosen === "dark" ? chosen : system.matches ? "dark" : "light";
    window.dispatchEvent(new Event("themechange"));
  };
  system.addEventListener("change", apply);
  window.addEventListener("themechosen", apply);
  apply();
})();
