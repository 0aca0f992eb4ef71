/** What stands there before the first search: folders, what is newest, some at random, and ways in. */

import { imageUrl, items } from "./api.js";
import { allFacets, useful } from "./facets.js";
import { tree } from "./folders.js";
import { baseName, find, h, icon, plural, recall, thumbnail } from "./dom.js";
import { now, update, write } from "./state.js";
import { compose } from "./where.js";

const CARDS = 12;
const SAMPLES = 4;
const STRIP = 12;

const SEEDS = 8; // orders that a server keeps

let isDrawn = false;
let seed = Math.floor(Math.random() * SEEDS);

/** @param {boolean} isShown */
export async function showWelcome(isShown) {
  find("#welcome").hidden = !isShown;
  if (!isShown || isDrawn) return;
  isDrawn = true;
  drawRecent();
  try {
    await Promise.all([drawStrip("#newest", "newest"), drawRandom(), drawCards()]);
  } catch {
    isDrawn = false; // the next visit tries again
  }
}

/** Takes the samples away: another publication is served. */
export function forgetWelcome() {
  isDrawn = false;
}

/** @param {string} selector @param {string} sort @param {number} [order] */
async function drawStrip(selector, sort, order = 0) {
  const { items: hits, num_items: total } = await items({ sort, seed: order, k: STRIP });
  const section = find(selector);
  section.hidden = !total;
  section.querySelector(".strip-images").replaceChildren(...hits.map(tile));
  const all = plural(total, "picture or video", "pictures and videos");
  find("#welcome-count").textContent = total ? `${all} to search by what they show.` : "There is nothing here yet.";
}

async function drawRandom() {
  seed = (seed + 1) % SEEDS;
  await drawStrip("#random", "random", seed);
}

/** @param {import("./api.js").Hit} hit */
function tile(hit) {
  const name = hit.caption || baseName(hit.item_id);
  const open = (/** @type {MouseEvent} */ event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    update({ item: hit.item_id });
  };
  const href = write({ ...now(), item: hit.item_id });
  return h(
    "li",
    {},
    h(
      "a",
      { href, title: name, onclick: open },
      thumbnail({ src: imageUrl(hit.item_id, hit.segment, 320), alt: name }),
    ),
  );
}

/** Cards of folders; where there are none, of the values of a column. */
async function drawCards() {
  const { columns } = await allFacets();
  const folders = tree(columns.find(({ name }) => name === "folder")?.values ?? []).folders;
  const topic = useful(columns).find(
    ({ name, type, values }) => type === "text" && name !== "modality" && (values?.length ?? 0) > 2,
  );
  const cards =
    folders.length > 1
      ? folders.map(({ name, path, count }) => ({ label: name, count, state: { folder: path } }))
      : (topic?.values ?? [])
          .filter(({ value, count }) => String(value).trim() && count > 1)
          .map(({ value, count }) => {
            const filters = { [topic?.name ?? ""]: { values: [String(value)], min: "", max: "" } };
            return { label: String(value), count, state: { filters } };
          });
  find("#topics").hidden = !cards.length;
  find("#topics h2").textContent = folders.length > 1 ? "Folders" : (topic?.name ?? "").replaceAll("_", " ");
  find("#topics .cards").replaceChildren(...(await Promise.all(cards.slice(0, CARDS).map(card))));
}

/** @param {{label: string, count: number, state: any}} of */
async function card({ label, count, state }) {
  const where = compose({ filters: {}, where: "", folder: "", name: "", ...state });
  const { items: hits } = await items({ where, k: SAMPLES, sort: "newest" });
  const images = hits.map((hit) => thumbnail({ src: imageUrl(hit.item_id, hit.segment, 160), alt: "" }));
  return h(
    "button",
    { type: "button", class: "topic", onclick: () => update(state) },
    h("span", { class: `mosaic of-${images.length}` }, ...images),
    h(
      "span",
      { class: "topic-name" },
      h("span", { class: "words", title: label }, label),
      h("span", { class: "count" }, count.toLocaleString("en")),
    ),
  );
}

function drawRecent() {
  const recent = recall(localStorage, "history");
  const words = Array.isArray(recent) ? recent.slice(0, 6).map(String) : [];
  find("#recent").replaceChildren(
    ...words.map(
      (each) => h(
        "button",
        { type: "button", class: "chip", onclick: () => update({ q: each }) },
        icon("clock"),
        h("span", { class: "words" }, each),
      ),
    ),
  );
}

export function startWelcome() {
  find("#newest-all").addEventListener("click", () => update({ sort: "newest" }));
  find("#random-again").addEventListener("click", drawRandom);
  find("#random-all").addEventListener(
    "click",
    () => update({ sort: "random", seed }),
  );
}
