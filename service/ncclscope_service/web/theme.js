// Sets the theme before anything is drawn: what the reader chose here, else what the system says.
(() => {
  const media = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => {
    try {
      return localStorage.getItem("ncclscope-theme");
    } catch {
      return null; // storage may be forbidden
    }
  };
  const apply = () => {
    document.documentElement.dataset.theme = chosen() ?? (media.matches ? "dark" : "light");
    document.dispatchEvent(new Event("themechange"));
  };
  document.addEventListener("toggletheme", () => {
    const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try {
      localStorage.setItem("ncclscope-theme", next);
    } catch {
      document.documentElement.dataset.theme = next;
      return;
    }
    apply();
  });
  media.addEventListener("change", apply);
  apply();
})();
