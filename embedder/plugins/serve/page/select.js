/** Selection of results, kept while the page is open, and what can be done with it. */

import { exported } from "./api.js";
import { find, h, plural } from "./dom.js";
import { announce, explain, toast } from "./notices.js";
import { now, update } from "./state.js";

const MAX_EXPORTED = 1000;
const MAX_EXAMPLES = 16;
const FORMATS = { csv: "CSV", parquet: "Parquet", paths: "Paths", zip: "Files as a zip", sheet: "Contact sheet" };

/** @type {Map<string, string>} publication that each is shown of, by id, in the order in which they were chosen */
const chosen = new Map();
/** @type {Set<() => void>} */
const listeners = new Set();
/** @type {() => Map<string, string>} */
let visible = () => new Map();
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
 * @param {string} version publication that it is shown of; empty for the latest
 * @param {boolean} [isRange] with all between it and the one before
 */
export function choose(id, version, isRange = false) {
  const shown = visible();
  const ids = [...shown.keys()];
  const [from, to] = [ids.indexOf(last), ids.indexOf(id)].sort((one, other) => one - other);
  if (isRange && from >= 0) for (const each of [...shown].slice(from, to + 1)) chosen.set(...each);
  else if (chosen.has(id)) chosen.delete(id);
  else chosen.set(id, version);
  last = id;
  tell();
}

/** @param {Map<string, string>} shown publication of each item, by id */
export function chooseAll(shown) {
  for (const each of shown) chosen.set(...each);
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
  const written = [...chosen].slice(0, MAX_EXPORTED);
  const versions = [...new Set(written.map(([, version]) => version))]; // a file of each
  const idsOf = (/** @type {string} */ version) => written.filter((each) => each[1] === version).map(([id]) => id);
  if (chosen.size > MAX_EXPORTED) toast(`The first ${MAX_EXPORTED.toLocaleString("en")} are written`);
  const bar = find("#selection");
  bar.setAttribute("aria-busy", "true");
  try {
    const files = await Promise.all(versions.map((version) => exported(idsOf(version), format, version)));
    if (format === "paths") await copyOrSave(new Blob(files.map(({ content }) => content)), files[0].name);
    else for (const { content, name } of files) save(content, name);
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
  const ids = [...chosen.keys()].slice(0, MAX_EXAMPLES);
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

/** @param {() => Map<string, string>} shownItems publication of each item that results show, by id, in their order */
export function startSelection(shownItems) {
  visible = shownItems;
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
