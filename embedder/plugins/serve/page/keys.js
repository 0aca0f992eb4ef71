/** Keys of the whole page, its help, and the theme. */

import { find } from "./dom.js";
import { chooseNone, hasChosen } from "./select.js";
import { now, update } from "./state.js";

const THEMES = ["auto", "light", "dark"];

/** @param {{focusGrid: () => boolean, selectAll: () => void}} hooks */
export function startKeys({ focusGrid, selectAll }) {
  const help = find("#help");
  find("#help-open").addEventListener("click", () => help.showModal());
  for (const dialog of document.querySelectorAll("dialog.small-dialog")) {
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.id !== "token" && dialog.close());
  }
  addEventListener("keydown", (event) => {
    const { target } = event;
    const isWriting =
      target instanceof HTMLElement && target.matches("input:not([type=checkbox], [type=range]), textarea, select");
    const isBox = target === find("#q"); // in which no word begins with a slash, and a question needs no mark
    const isOfPage = event.key === "?" || (event.key === "/" && !target.selectionStart);
    const isText = isWriting && !(isBox ? isOfPage : event.key === "Escape");
    if (isText || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.key === "/") {
      find("#q").focus();
      find("#q").select();
    } else if (event.key === "?") help.showModal();
    else if (event.key === "f") find("#filter-toggle").click();
    else if (event.key === "t") find("#theme").click();
    else if (event.key === "a") selectAll();
    else if (event.key === "Escape") escape();
    else if (event.key === "ArrowDown" && target === document.body) {
      if (!focusGrid()) return;
    } else return;
    event.preventDefault();
  });
}

/** Closes what is open, else steps out of what was searched with. */
function escape() {
  if (find("#refine").open) find("#refine").open = false;
  else if (hasChosen()) chooseNone();
  else if (!find("#filters").hidden) find("#filters-close").click();
  else if (!find("#compare-bar").hidden) find("#compare-toggle").click();
  else if (now().page) update({ page: "" });
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
