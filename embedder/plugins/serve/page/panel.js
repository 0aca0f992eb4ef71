/** The panel of one item: its image or video, its row, where it comes from, and what is near it. */

import { ApiError, fileUrl, imageUrl, item } from "./api.js";
import { baseName, date, find, h, icon, size, thumbnail } from "./dom.js";
import { why } from "./grid.js";
import { errorCard, toast } from "./notices.js";
import { markWords, marking } from "./marks.js";
import { player } from "./player.js";
import { NO_FILTERS, NO_QUERY, now, update, write } from "./state.js";
import { view } from "./viewer.js";

/** @typedef {import("./api.js").Hit} Hit */

const ENLARGED = 3; // a small image is shown so many times its size at most
const MIN_SHOWN_PX = 420;
// Columns that describe the run and not what the image shows.
const OF_RUN = ["content_version", "model_fingerprint", "preprocess_fingerprint", "run_id", "embedded_at"];
const OF_FILE = [
  "item_id",
  "uri",
  "source",
  "size_bytes",
  "modified",
  "state",
  "step",
  "error_type",
  "error",
  "updated_at",
];

const dialog = find("#item");
const body = find("#item-body");
let stop = new AbortController();
let shown = "";
let isClosing = false; // by this page, not by the browser
let path = "";
/** @type {{context: (id: string) => {hits: Hit[], version: string}, closed: (id: string) => void}} */
let hooks;

/**
 * Readies the panel.
 * @param {{context: (id: string) => {hits: Hit[], version: string}, closed: (id: string) => void}} given context:
 *   the hits that the arrows go through, and their publication
 */
export function startPanel(given) {
  hooks = given;
  dialog.addEventListener("cancel", (event) => {
    event.preventDefault();
    closePanel();
  });
  // A browser need not ask before: on Esc without a click on the page, on a phone's gesture. The event comes later than the
  // closing, perhaps after a click on the next item, so that what is in the address doesn't say whose closing it was.
  dialog.addEventListener("close", () => {
    if (!isClosing && now().item) closePanel();
    isClosing = false;
  });
  dialog.addEventListener("click", (event) => event.target === dialog && closePanel());
  find("#item-close").addEventListener("click", closePanel);
  find("#item-previous").addEventListener("click", () => step(-1));
  find("#item-next").addEventListener("click", () => step(1));
  find("#item-more").addEventListener("click", moreLikeThis);
  find("#item-also").addEventListener("click", () => addExample("also"));
  find("#item-not").addEventListener("click", () => addExample("unlike"));
  find("#item-zoom").addEventListener("click", enlarge);
  find("#item-path").addEventListener("click", () => copy(path, "The path is in the clipboard"));
  find("#item-link").addEventListener("click", () => copy(location.href, "The link is in the clipboard"));
  dialog.addEventListener("keydown", (event) => {
    if (event.target.closest("video, input") || event.ctrlKey || event.metaKey) return;
    if (event.key === "ArrowLeft") step(-1);
    else if (event.key === "ArrowRight") step(1);
    else if (event.key === "m") moreLikeThis();
    else if (event.key === "z") enlarge();
    else return;
    event.preventDefault();
  });
}

/** Opens, changes or closes the panel as the state says. */
export async function showPanel() {
  const { item: id, at, version: asked, vs, side } = now();
  const key = JSON.stringify([id, asked, vs, side]);
  if (!id) {
    if (dialog.open) {
      isClosing = true;
      dialog.close();
    }
    if (shown) {
      body.replaceChildren();
      hooks.closed(shown);
    }
    stop.abort();
    shown = "";
    return;
  }
  if (!dialog.open) dialog.showModal();
  if (dialog.dataset.key === key && shown === id) return;
  stop.abort();
  stop = new AbortController();
  shown = id;
  dialog.dataset.key = key;
  const { hits, version } = hooks.context(id);
  const hit = hits.find((each) => each.item_id === id);
  find("#item-name").textContent = hit?.caption || baseName(id);
  path = hit?.uri || id;
  showPlace();
  showFile(id, version, isVideo(hit));
  body.replaceChildren(
    h(
      "div",
      { class: "stage" },
      isVideo(hit) ? null : stillImage(id, at, hit?.caption ?? "", version, hit?.since, hit?.carryover ?? {}),
    ),
  );
  try {
    draw(id, at, await item(id, { segment: at, version }, stop.signal), version, hit);
  } catch (error) {
    if (error instanceof ApiError) fail(id, error);
    else if (!(error instanceof DOMException)) throw error;
  }
}

/** @param {string} id @param {ApiError} error */
function fail(id, error) {
  const name = baseName(id);
  const search = {
    label: `Search for ${name}`,
    run: () => update({ ...NO_QUERY, ...NO_FILTERS, name, item: "", version: "", vs: "" }),
  };
  const latest = { label: "Show the latest", run: () => update({ version: "", vs: "", side: "" }) };
  find("#item-tools").hidden = true;
  body.replaceChildren(
    errorCard(error, error.problem.where === "version" ? latest : error.status === 404 ? search : null),
  );
}

/** Readies what is done with the original. @param {string} id @param {string} version @param {boolean} isMoving */
function showFile(id, version, isMoving) {
  find("#item-tools").hidden = false;
  find("#item-zoom").hidden = isMoving;
  find("#item-open").href = fileUrl(id, { version });
  find("#item-download").href = fileUrl(id, { version, download: true });
}

function enlarge() {
  if (!find("#item-zoom").hidden) view(now().item, find("#item-name").textContent, hooks.context(now().item).version);
}

export function closePanel() {
  update({ item: "", side: "", at: 0 });
}

/** Says which of the results is shown. */
export function showPlace() {
  const id = now().item;
  const { hits } = hooks.context(id);
  const place = hits.findIndex((each) => each.item_id === id);
  find("#item-place").textContent = place < 0 ? "" : `${place + 1} of ${hits.length}`;
  find("#item-previous").disabled = place <= 0;
  find("#item-next").disabled = place < 0 || place === hits.length - 1;
}

/** @param {string} id @param {number} at @param {any} answer @param {string} version @param {Hit} [hit] */
function draw(id, at, answer, version, hit) {
  const { segments } = answer;
  const [first] = segments;
  const row = segments.find((each) => each.segment === at) ?? first ?? {};
  const caption = row.caption ?? hit?.caption ?? "";
  const found = new Map();
  if (hit) for (const each of [hit, ...hit.segments]) found.set(each.start_s, each.score);
  const times = segments.filter((each) => each.start_s !== null && each.start_s !== undefined);
  find("#item-name").textContent = caption || baseName(id);
  path = answer.item.uri || row.uri || id;
  showFile(id, version, times.length > 0);
  const about = { ...row, ...hit?.carryover };
  const stage = times.length
    ? player({ id, segment: at, segments: times, found, name: caption || id, version }, (segment) =>
        update({ at: segment }, { replace: true }),
      )
    : stillImage(id, at, caption, version, answer.since, about);
  const origin = { ...answer.provenance, ...answer.item };
  for (const name of Object.keys(origin)) if (OF_FILE.includes(name) || origin[name] === false) delete origin[name];
  const { size_bytes: bytes, modified, source, error, step } = answer.item;
  const file = {
    name: baseName(id),
    folder: id.includes("/") ? id.slice(0, id.lastIndexOf("/")) : "",
    path: answer.item.uri,
    size: bytes && size(bytes),
    modified: (modified ?? "").split("|")[0],
    source,
    note: error && `${step}: ${error}`,
  };
  body.replaceChildren(
    h("div", { class: "stage" }, stage),
    h(
      "div",
      { class: "facts" },
      hit && why(hit) ? h("p", { class: "muted small" }, `${why(hit)}.`) : null,
      near("Looks nearly the same", hit?.duplicates ?? [], version),
      near("Near it", answer.neighbours, version),
      table("About it", about, [...OF_RUN, ...marking(about), "uri", "item_id", "modality", ...(times.length ? [] : ["segment"])]),
      table("File", file, []),
      folded("How it was embedded", table("", { item_id: id, kind: row.modality, ...origin }, [])),
    ),
  );
  body.scrollTop = 0;
}

/**
 * @param {string} id
 * @param {number} at
 * @param {string} caption
 * @param {string} version
 * @param {string|null|undefined} since what became of it since that publication
 * @param {Record<string, any>} row its columns
 */
function stillImage(id, at, caption, version, since, row) {
  if (since === "changed") return h("p", { class: "broken" }, icon("broken"), "changed since this publication");
  const url = (size) => imageUrl(id, at, size, version);
  const image = h("img", { class: "still", alt: caption || id });
  image.sizes = "(min-width: 900px) 560px, 100vw";
  image.srcset = [320, 640, 1280].map((size) => `${url(size)} ${size}w`).join(", ");
  image.src = url(640);
  image.addEventListener("load", () => {
    image.style.maxWidth = `${Math.max(MIN_SHOWN_PX, ENLARGED * image.naturalWidth)}px`;
  });
  image.addEventListener("click", enlarge);
  image.addEventListener("error", () =>
    image.replaceWith(h("p", { class: "broken" }, icon("broken"), "its file can't be read")),
  );
  return markWords(image, row, now().q);
}

/**
 * @param {string} title
 * @param {{item_id: string, segment?: number, caption?: string|null, score: number}[]} hits
 * @param {string} version
 */
function near(title, hits, version) {
  if (!hits?.length) return null;
  const links = hits.map((each) => {
    const name = each.caption || baseName(each.item_id);
    const go = { item: each.item_id, at: each.segment ?? 0 };
    return h(
      "li",
      {},
      h(
        "a",
        {
          href: write({ ...now(), ...go }),
          title: `${name} (${each.score.toFixed(2)})`,
          onclick: (/** @type {MouseEvent} */ event) => {
            if (event.ctrlKey || event.metaKey || event.shiftKey) return;
            event.preventDefault();
            update(go);
          },
        },
        thumbnail({ src: imageUrl(each.item_id, each.segment ?? 0, 160, version), alt: name }),
      ),
    );
  });
  return h("section", {}, h("h3", {}, title), h("ul", { class: "near" }, ...links));
}

/** @param {string} title @param {Record<string, any>} values @param {string[]} without */
function table(title, values, without) {
  const rows = Object.entries(values).filter(
    ([name, value]) => value !== null && value !== undefined && value !== "" && !without.includes(name),
  );
  if (!rows.length) return null;
  return h(
    "section",
    {},
    title ? h("h3", {}, title) : null,
    h(
      "dl",
      {},
      ...rows.flatMap(([name, value]) => [h("dt", {}, name.replaceAll("_", " ")), h("dd", {}, written(value))]),
    ),
  );
}

/** @param {string} title @param {Node|null} content */
function folded(title, content) {
  return content && h("details", { class: "folded" }, h("summary", {}, title, icon("down")), content);
}

/** Writes a value as people read it. @param {any} value @returns {string} */
function written(value) {
  if (value === null) return "none";
  if (typeof value === "number") return value.toLocaleString("en", { maximumFractionDigits: 4 });
  if (Array.isArray(value)) return value.map(written).join(", ");
  if (typeof value === "object") return Object.entries(value).map(
    ([name, each]) => `${name}: ${written(each)}`,
  ).join("; ");
  if (typeof value === "string" && /^[[{]/.test(value)) {
    try {
      return written(JSON.parse(value));
    } catch {
      return value; // a text that begins so
    }
  }
  return /^\d{4}-\d\d-\d\dT\d\d:/.test(value) ? date(value) : String(value);
}

/** @param {Hit|undefined} hit */
function isVideo(hit) {
  return hit !== undefined && hit.start_s !== null;
}

/** @param {1|-1} direction */
function step(direction) {
  const { hits } = hooks.context(now().item);
  const place = hits.findIndex((each) => each.item_id === now().item);
  const next = place < 0 ? undefined : hits[place + direction];
  if (next) update({ item: next.item_id, at: next.segment }, { replace: true });
}

function moreLikeThis() {
  const { item: like, at: segment } = now();
  update({ ...NO_QUERY, like, segment, item: "", side: "", at: 0, sort: "", page: "" });
}

/** Adds the item to the search. @param {"also"|"unlike"} kind */
function addExample(kind) {
  const { item: id, at: segment, like, image } = now();
  const closed = { item: "", side: "", at: 0, page: "" };
  if (kind === "also" && !like && !image) update({ like: id, segment, sort: "", ...closed });
  else update({ [kind]: [...new Set([...now()[kind], id])].slice(0, 16), ...closed });
}

/** @param {string} text @param {string} done */
async function copy(text, done) {
  try {
    await navigator.clipboard.writeText(text);
    toast(done);
  } catch {
    toast(`This browser copies nothing here: ${text}`);
  }
}
