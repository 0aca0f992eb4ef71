/** Selection of results, kept while the page is open, and what can be done with it. */

import { exported } from "./api.js";
import { find, h, plural } from "./dom.js";
import { announce, explain, toast } from "./notices.js";
import { now, update } from "./state.js";

const MAX_EXPORTED = 1000;
const MAX_EXAMPLES = 16;
const FORMATS = { csv: "CSV", parquet: "Parquet", paths: "Paths", zip: "Files as a zip", sheet: "Contact sheet" };

/** @type {Set<string>} ids, in the order in which they were chosen */
const chosen = new Set();
/** @type {Set<() => void>} */
const listeners = new Set();
/** @type {() => string[]} */
let visible = () => [];
let last = ""; // where a range begins

/** @param {string} id */
export function isChosen(id) {
  return chosen.has(id);
}

export function hasChosen() {
  return chosen.size > 0;
}

/** @param {() => void} listener called after each change */
export function onChosen(listener) {
  listeners.add(listener);
}

/**
 * Chooses an item, or takes it away again.
 * @param {string} id
 * @param {boolean} [isRange] with all between it and the one before
 */
export function choose(id, isRange = false) {
  const ids = visible();
  const [from, to] = [ids.indexOf(last), ids.indexOf(id)].sort((one, other) => one - other);
  if (isRange && from >= 0) for (const each of ids.slice(from, to + 1)) chosen.add(each);
  else if (chosen.has(id)) chosen.delete(id);
  else chosen.add(id);
  last = id;
  tell();
}

/** @param {string[]} ids */
export function chooseAll(ids) {
  for (const id of ids) chosen.add(id);
  tell();
}

export function chooseNone() {
  chosen.clear();
  last = "";
  tell();
}

function tell() {
  const bar = find("#selection");
  bar.hidden = !chosen.size;
  document.body.classList.toggle("choosing", chosen.size > 0);
  find("#selected").textContent = `${chosen.size.toLocaleString("en")} selected`;
  announce(`${plural(chosen.size, "item")} selected`);
  for (const listener of listeners) listener();
}

/** @param {string} format */
async function handOn(format) {
  const ids = [...chosen].slice(0, MAX_EXPORTED);
  if (chosen.size > MAX_EXPORTED) toast(`The first ${MAX_EXPORTED.toLocaleString("en")} are written`);
  const bar = find("#selection");
  bar.setAttribute("aria-busy", "true");
  try {
    const { content, name } = await exported(ids, format, now().version);
    if (format === "paths") await copyOrSave(content, name);
    else save(content, name);
  } catch (error) {
    toast(error.problem ? explain(error).what : String(error));
  } finally {
    bar.removeAttribute("aria-busy");
  }
}

/** @param {Blob} content @param {string} name */
async function copyOrSave(content, name) {
  try {
    await navigator.clipboard.writeText(await content.text());
    toast("The paths are in the clipboard");
  } catch {
    save(content, name);
  }
}

/** @param {Blob} content @param {string} name */
function save(content, name) {
  const url = URL.createObjectURL(content);
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

/** @param {"also"|"unlike"} kind */
function searchWith(kind) {
  const ids = [...chosen].slice(0, MAX_EXAMPLES);
  const { q, like, image, also, unlike } = now();
  chooseNone();
  if (kind === "unlike") {
    update({ unlike: [...new Set([...unlike, ...ids])].slice(0, MAX_EXAMPLES), page: "" });
    if (!q && !like && !image) toast("Now say what to look for instead");
    return;
  }
  const hasPicture = like || image;
  const [first, ...rest] = ids;
  const more = [...new Set([...also, ...(hasPicture ? ids : rest)])].slice(0, MAX_EXAMPLES);
  update({ ...(hasPicture ? {} : { like: first, segment: 0 }), also: more, sort: "", page: "" });
}

/** @param {() => string[]} idsOnScreen those that results show, in their order */
export function startSelection(idsOnScreen) {
  visible = idsOnScreen;
  find("#formats").replaceChildren(
    ...Object.entries(FORMATS).map(([format, label]) =>
      h("button", { type: "button", class: "button", onclick: () => handOn(format) }, label),
    ),
  );
  find("#select-all").addEventListener("click", () => chooseAll(visible()));
  find("#select-none").addEventListener("click", chooseNone);
  find("#select-like").addEventListener("click", () => searchWith("also"));
  find("#select-unlike").addEventListener("click", () => searchWith("unlike"));
}
