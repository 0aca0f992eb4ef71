/** The panel of one item: its image or video, its row, where it comes from, and what is near it. */

import { ApiError, imageUrl, item } from "./api.js";
import { date, find, h, icon } from "./dom.js";
import { errorCard } from "./notices.js";
import { player } from "./player.js";
import { now, update, write } from "./state.js";

/** @typedef {import("./api.js").Hit} Hit */

const ENLARGED = 3; // a small image is shown so many times its size at most
const MIN_SHOWN_PX = 420;
// Columns that tell about the run and not about what the image shows.
const OF_RUN = ["content_version", "model_fingerprint", "preprocess_fingerprint", "run_id", "embedded_at"];

const dialog = find("#item");
const body = find("#item-body");
let stop = new AbortController();
let shown = "";
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
  dialog.addEventListener("click", (event) => event.target === dialog && closePanel());
  find("#item-close").addEventListener("click", closePanel);
  find("#item-previous").addEventListener("click", () => step(-1));
  find("#item-next").addEventListener("click", () => step(1));
  find("#item-more").addEventListener("click", moreLikeThis);
  find("#item-link").addEventListener("click", copyLink);
  dialog.addEventListener("keydown", (event) => {
    if (event.target.closest("video, input") || event.ctrlKey || event.metaKey) return;
    if (event.key === "ArrowLeft") step(-1);
    else if (event.key === "ArrowRight") step(1);
    else if (event.key === "m") moreLikeThis();
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
      dialog.close();
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
  find("#item-name").textContent = hit?.caption || id;
  showPlace();
  body.replaceChildren(
    h("div", { class: "stage" }, isVideo(hit) ? null : stillImage(id, at, hit?.caption ?? "", version)),
  );
  try {
    draw(id, at, await item(id, { segment: at, version }, stop.signal), version, hit);
  } catch (error) {
    if (error instanceof ApiError) body.replaceChildren(errorCard(error));
    else if (!(error instanceof DOMException)) throw error;
  }
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
  find("#item-name").textContent = caption || id;
  const stage = times.length
    ? player({ id, segment: at, segments: times, found, name: caption || id, version }, (segment) =>
        update({ at: segment }, { replace: true }),
      )
    : stillImage(id, at, caption, version);
  const about = { ...row, ...hit?.carryover, score: hit?.score };
  const origin = { ...answer.provenance, ...answer.item };
  for (const name of Object.keys(origin)) if (name === "item_id" || origin[name] === false) delete origin[name];
  body.replaceChildren(
    h("div", { class: "stage" }, stage),
    h(
      "div",
      { class: "facts" },
      near("Looks nearly the same", hit?.duplicates ?? [], version),
      near("Near it", answer.neighbours, version),
      table("About it", about, [...OF_RUN, ...(times.length ? [] : ["segment"])]),
      table("Where it comes from", origin, []),
    ),
  );
  body.scrollTop = 0;
}

/** @param {string} id @param {number} at @param {string} caption @param {string} version */
function stillImage(id, at, caption, version) {
  const url = (size) => imageUrl(id, at, size, version);
  const image = h("img", { class: "still", alt: caption || id });
  image.sizes = "(min-width: 900px) 560px, 100vw";
  image.srcset = [320, 640, 1280].map((size) => `${url(size)} ${size}w`).join(", ");
  image.src = url(640);
  image.addEventListener("load", () => {
    image.style.maxWidth = `${Math.max(MIN_SHOWN_PX, ENLARGED * image.naturalWidth)}px`;
  });
  image.addEventListener("error", () =>
    image.replaceWith(h("p", { class: "broken" }, icon("broken"), "its file can't be read")),
  );
  return image;
}

/**
 * @param {string} title
 * @param {{item_id: string, segment?: number, caption?: string|null, score: number}[]} hits
 * @param {string} version
 */
function near(title, hits, version) {
  if (!hits?.length) return null;
  const links = hits.map((each) => {
    const name = each.caption || each.item_id;
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
        h("img", { src: imageUrl(each.item_id, each.segment ?? 0, 160, version), alt: name, loading: "lazy" }),
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
    h("h3", {}, title),
    h(
      "dl",
      {},
      ...rows.flatMap(([name, value]) => [h("dt", {}, name.replaceAll("_", " ")), h("dd", {}, written(value))]),
    ),
  );
}

/** @param {any} value */
function written(value) {
  if (typeof value === "number") return value.toLocaleString("en", { maximumFractionDigits: 4 });
  if (typeof value === "object") return JSON.stringify(value);
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
  update({ q: "", image: "", like, segment, item: "", side: "", at: 0 });
}

async function copyLink() {
  const label = find("#item-link-text");
  try {
    await navigator.clipboard.writeText(location.href);
    label.textContent = "Copied";
  } catch {
    label.textContent = "Copy it from the address bar";
  }
  setTimeout(() => (label.textContent = "Link"), 2500);
}
