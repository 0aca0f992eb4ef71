/** The search box: words with those of before, an image dropped, pasted or chosen, and what it looks like now. */

import { imageUrl } from "./api.js";
import { baseName, find, h, icon, keep, recall, thumbnail } from "./dom.js";
import { toast } from "./notices.js";
import { hasQuery, NO_QUERY, now, update, withoutSlash } from "./state.js";

const TYPING_PAUSE_MS = 250;
const KEPT_SEARCHES = 30;
const SHOWN_SEARCHES = 8;
const MAX_SIDE = 1024; // of an image that is sent: models look at 512 pixels or fewer
const SEND_WHOLE_BYTES = 400_000;

/** @type {Map<string, Blob>} images of this tab, by the key in the address */
const images = new Map();
/** @type {Map<string, string>} their addresses */
const addresses = new Map();
let typing = 0;
/** @type {string|null} words whose address was pushed: that of the letters that follow replaces it, until back leaves it */
let typed = null;

const form = find("#search");
const input = find("#q");
const list = find("#history");
const chip = find("#chip");

/**
 * Image that a state names.
 * @param {string} key
 * @returns {Blob|null} null where this tab has it no more
 */
export function imageOf(key) {
  if (!images.has(key)) {
    const kept = recall(sessionStorage, `image.${key}`);
    if (typeof kept !== "string") return null;
    images.set(key, new Blob([Uint8Array.from(kept, (each) => each.charCodeAt(0))]));
  }
  return images.get(key) ?? null;
}

/** Readies the box. */
export function startQuery() {
  input.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => searchWords(false), TYPING_PAUSE_MS);
    showHistory();
  });
  input.addEventListener("focus", showHistory);
  input.addEventListener("blur", () => commit());
  input.addEventListener("keydown", onKey);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    searchWords(true);
  });
  form.addEventListener("focusout", (event) => {
    if (!form.contains(event.relatedTarget)) hideHistory();
  });
  find("#clear").addEventListener("click", () => {
    update(NO_QUERY);
    input.focus();
  });
  const file = find("#file");
  find("#choose").addEventListener("click", () => file.click());
  file.addEventListener("change", () => {
    searchImage(file.files[0]);
    file.value = "";
  });
  startDrop();
  addEventListener("paste", (event) => {
    const pasted = [...(event.clipboardData?.files ?? [])].find((each) => each.type.startsWith("image/"));
    if (pasted) searchImage(pasted);
  });
}

/** Shows the query of the state in the box. */
export function showQuery() {
  const state = now();
  if (state.q !== typed) typed = null;
  if (document.activeElement !== input || typed === null) input.value = state.q;
  const image = state.image && imageOf(state.image);
  if (image && !addresses.has(state.image)) addresses.set(state.image, URL.createObjectURL(image));
  const own = image && addresses.get(state.image);
  const source = state.like ? imageUrl(state.like, state.segment, 160, state.version) : own;
  chip.hidden = !state.like && !state.image;
  chip.replaceChildren(
    ...(source ? [thumbnail({ src: source, alt: "" })] : []),
    h("span", {}, state.like ? "like this" : image ? "your image" : "an image of another tab"),
    cross("Search without the picture", () => update({ like: "", segment: 0, image: "" })),
  );
  input.placeholder = chip.hidden ? "Search by words, or drop an image" : "and words";
  find("#clear").hidden = !hasQuery(state);
  showExamples();
}

/** Shows the further examples, and those to stay away from. */
function showExamples() {
  const { also, unlike, not, version } = now();
  const without = (/** @type {string[]} */ ids, /** @type {string} */ id) => ids.filter((each) => each !== id);
  const picture = (/** @type {string} */ id) => thumbnail({ src: imageUrl(id, 0, 160, version), alt: baseName(id) });
  const row = find("#examples");
  row.replaceChildren(
    ...also.map((id) => example("and", picture(id), () => update({ also: without(also, id) }))),
    ...unlike.map((id) => example("not", picture(id), () => update({ unlike: without(unlike, id) }))),
    ...(not ? [example("not", h("span", {}, not), () => update({ not: "" }))] : []),
  );
  row.hidden = !row.childElementCount;
}

/** @param {string} kind @param {Node} content @param {() => void} remove */
function example(kind, content, remove) {
  return h("span", { class: `query-chip ${kind}` }, h("b", {}, kind), content, cross("Remove the example", remove));
}

/** @param {string} label @param {() => void} run */
function cross(label, run) {
  return h(
    "button",
    { type: "button", class: "cross", "aria-label": label, title: label, onclick: run },
    icon("close"),
  );
}

/** Keeps the words in the history: they were meant. */
export function commit() {
  typed = null;
  const words = now().q.trim();
  if (!words) return;
  const before = history().filter((each) => each !== words);
  keep(localStorage, "history", [words, ...before].slice(0, KEPT_SEARCHES));
}

/** @returns {string[]} */
function history() {
  const kept = recall(localStorage, "history");
  return Array.isArray(kept) ? kept.filter((each) => typeof each === "string") : [];
}

/** @param {boolean} isMeant by Enter or a choice, and not by a pause in typing */
function searchWords(isMeant) {
  clearTimeout(typing);
  const text = withoutSlash(input.value);
  if (text !== input.value) input.value = text;
  const words = text.trim();
  if (words || now().q) {
    const replace = typed !== null;
    typed = words;
    update({ q: words, page: "", ...(now().q ? {} : { sort: "" }) }, { replace });
  }
  if (!isMeant) return;
  commit();
  hideHistory();
}

/**
 * Searches with an image.
 * @param {Blob|undefined} file
 */
export async function searchImage(file) {
  if (!file) return;
  const image = await smaller(file);
  const key = Math.random().toString(36).slice(2, 10);
  images.set(key, image);
  const bytes = new Uint8Array(await image.arrayBuffer());
  keep(sessionStorage, `image.${key}`, Array.from(bytes, (byte) => String.fromCharCode(byte)).join("")); // for a reload
  update({ like: "", segment: 0, image: key, sort: "", page: "" });
  toast("Searching with your image");
}

/** Makes a large image smaller, so that a slow line carries it; what the browser can't read is sent as it is. */
async function smaller(file) {
  if (file.size <= SEND_WHOLE_BYTES) return file;
  try {
    const bitmap = await createImageBitmap(file);
    const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
    const canvas = new OffscreenCanvas(Math.ceil(bitmap.width * scale), Math.ceil(bitmap.height * scale));
    const context = canvas.getContext("2d");
    if (!context) return file;
    context.fillStyle = "white";
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
    return await canvas.convertToBlob({ type: "image/jpeg", quality: 0.92 });
  } catch {
    return file;
  }
}

function startDrop() {
  const target = find("#drop");
  let depth = 0;
  const carriesFile = (event) => event.dataTransfer?.types.includes("Files");
  addEventListener("dragenter", (event) => {
    if (!carriesFile(event)) return;
    depth += 1;
    target.hidden = false;
  });
  addEventListener("dragleave", (event) => {
    if (!carriesFile(event)) return;
    depth = Math.max(0, depth - 1);
    target.hidden = depth === 0;
  });
  addEventListener("dragover", (event) => {
    if (carriesFile(event)) event.preventDefault();
  });
  addEventListener("drop", (event) => {
    if (!carriesFile(event)) return;
    event.preventDefault();
    depth = 0;
    target.hidden = true;
    const file = [...event.dataTransfer.files].find((each) => each.type.startsWith("image/") || !each.type);
    if (file) searchImage(file);
    else toast("That is no image: drop a JPEG, PNG, WebP or another image file");
  });
}

function showHistory() {
  const typed = input.value.trim().toLowerCase();
  const fitting = history().filter((each) => each.toLowerCase().includes(typed) && each !== input.value.trim());
  const options = fitting.slice(0, SHOWN_SEARCHES).map((words, index) =>
    h(
      "li",
      {
        role: "option",
        id: `past-${index}`,
        "aria-selected": "false",
        onpointerdown: (/** @type {Event} */ event) => event.preventDefault(), // the box keeps the focus
        onclick: () => choose(words),
      },
      icon("clock"),
      words,
    ),
  );
  list.replaceChildren(...options);
  const isOpen = document.activeElement === input && options.length > 0;
  list.hidden = !isOpen;
  input.setAttribute("aria-expanded", String(isOpen));
  input.removeAttribute("aria-activedescendant");
}

function hideHistory() {
  list.hidden = true;
  input.setAttribute("aria-expanded", "false");
  input.removeAttribute("aria-activedescendant");
}

/** @param {string} words */
function choose(words) {
  input.value = words;
  typed = null;
  searchWords(true);
}

/** @param {KeyboardEvent} event */
function onKey(event) {
  if (event.key === "?" || (event.key === "/" && !input.selectionStart)) return; // keys of the page
  const options = [...list.children];
  const selected = options.findIndex((each) => each.getAttribute("aria-selected") === "true");
  if (event.key === "Enter" && selected >= 0) {
    event.preventDefault();
    choose(options[selected].lastChild.textContent);
  } else if (event.key === "Escape") {
    event.preventDefault();
    if (list.hidden) input.blur();
    else hideHistory();
  } else if ((event.key === "ArrowDown" || event.key === "ArrowUp") && !list.hidden) {
    event.preventDefault();
    const next = selected + (event.key === "ArrowDown" ? 1 : -1);
    options.forEach((each, index) => each.setAttribute("aria-selected", String(index === next)));
    if (options[next]) input.setAttribute("aria-activedescendant", options[next].id);
    else input.removeAttribute("aria-activedescendant");
    if (next >= options.length) hideHistory();
  } else if (event.key === "ArrowDown") {
    event.preventDefault();
    document.querySelector(".grid .tile-link[tabindex='0']")?.focus();
  }
}
