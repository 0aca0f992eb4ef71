/** Keys of the whole page, its help, and the theme. */

import { find } from "./dom.js";
import { now, update } from "./state.js";

const THEMES = ["auto", "light", "dark"];

/** @param {{focusGrid: () => boolean}} hooks */
export function startKeys({ focusGrid }) {
  const help = find("#help");
  find("#help-open").addEventListener("click", () => help.showModal());
  for (const dialog of document.querySelectorAll("dialog.small-dialog")) {
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.id !== "token" && dialog.close());
  }
  addEventListener("keydown", (event) => {
    const { target } = event;
    const isWriting =
      target instanceof HTMLElement && target.matches("input:not([type=checkbox], [type=range]), textarea, select");
    if (isWriting || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.key === "/") {
      find("#q").focus();
      find("#q").select();
    } else if (event.key === "?") help.showModal();
    else if (event.key === "f") find("#filter-toggle").click();
    else if (event.key === "t") find("#theme").click();
    else if (event.key === "Escape") escape();
    else if (event.key === "ArrowDown" && target === document.body) {
      if (!focusGrid()) return;
    } else return;
    event.preventDefault();
  });
}

/** Steps back: out of the filters, then out of what was searched with. */
function escape() {
  if (!find("#filters").hidden && matchMedia("(max-width: 900px)").matches) find("#filters-close").click();
  else if (now().like || now().image) update({ like: "", segment: 0, image: "" });
  else find("#q").focus();
}

/** Readies the button that goes round the themes: the system's, light, dark. */
export function startTheme() {
  const button = find("#theme");
  const root = document.documentElement;
  const name = () => root.dataset.theme ?? "auto";
  const label = () => {
    button.setAttribute("aria-label", `Theme: ${name()}`);
    button.title = `Theme: ${name()} (t)`;
    button.querySelector("use").setAttribute("href", `#i-${name()}`);
  };
  button.addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(name()) + 1) % THEMES.length];
    if (next === "auto") delete root.dataset.theme;
    else root.dataset.theme = next;
    try {
      localStorage.setItem("embedder.theme", next);
    } catch {
      // Storage is switched off: the choice holds until the page is left.
    }
    label();
  });
  label();
}
