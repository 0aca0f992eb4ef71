/** The search page: shows what the address says, and keeps the address at what is shown. */

import { resumeSession, status } from "./api.js";
import { compareSides, forgetVersions, modelName, showVersions, startCompare } from "./compare.js";
import { find, h, plural } from "./dom.js";
import { forgetFacets, showFilters, startFilters } from "./facets.js";
import { startKeys, startTheme } from "./keys.js";
import { hideBanner, showBanner } from "./notices.js";
import { showPanel, showPlace, startPanel } from "./panel.js";
import { commit, imageOf, showQuery, startQuery } from "./query.js";
import { Results } from "./results.js";
import { hasFilters, hasQuery, now, onChange, searchKey, update } from "./state.js";
import { forgetWelcome, showWelcome } from "./welcome.js";
import { compose } from "./where.js";

const NEUTRAL_QUERY = "an image"; // what filters alone are ranked by: a search needs a query
const DEFAULT_FOLD = 0.95;
const STATUS_EVERY_MS = 60_000;

/** @typedef {import("./api.js").Hit} Hit */

/** @param {string} side */
const hooksOf = (side) => ({
  side,
  open: (/** @type {Hit} */ hit) => {
    commit();
    update({ item: hit.item_id, side, at: hit.segment });
  },
  more: (/** @type {Hit} */ hit) => update({ q: "", image: "", like: hit.item_id, segment: hit.segment }),
  changed: showCount,
  empty: () =>
    hasFilters(now())
      ? h(
          "button",
          { type: "button", class: "button", onclick: () => update({ filters: {}, where: "" }) },
          "Remove the filters",
        )
      : null,
});
const left = new Results(find("#left .results"), hooksOf(""));
const right = new Results(find("#right .results"), hooksOf("right"));
let served = "";
/** @type {string[]} further models that can be searched by */
let furtherModels = [];

/** Body of the search that a state asks for. @param {import("./state.js").State} state */
function requestOf(state) {
  const { q, like, segment, image, hybrid, fold, model } = state;
  const words = q.trim() || NEUTRAL_QUERY;
  const query = like ? { item: like, segment } : image ? { upload: "image" } : { text: words };
  return { queries: [query], model: model || null, where: compose(state), hybrid: hybrid && "text" in query, fold };
}

function show() {
  const state = now();
  const image = state.image ? imageOf(state.image) : null;
  const isSearch = (hasQuery(state) || hasFilters(state)) && !(state.image && !image);
  const isDouble = Boolean(state.vs);
  showQuery();
  showOptions();
  showFilters();
  showWelcome(!isSearch);
  showVersions(Boolean(state.version || state.vs) || !find("#compare-bar").hidden);
  find("#results").hidden = !isSearch;
  find("#options").hidden = !isSearch;
  find("#results").classList.toggle("double", isDouble);
  find("#right").hidden = !isDouble;
  for (const head of document.querySelectorAll(".side-head")) head.hidden = !isDouble;
  document.title = state.q ? `${state.q} · search` : isSearch ? "Results · search" : "Search";
  if (!isSearch) return [left, right].forEach((each) => each.clear());
  const request = requestOf(state);
  const key = searchKey({ ...state, vs: "" });
  left.show(key, request, image, state.version);
  if (isDouble) right.show(searchKey({ ...state, version: state.vs, vs: "" }), request, image, state.vs);
  else right.clear();
  return undefined;
}

/** Shows the switches as the state has them. */
function showOptions() {
  const { hybrid, fold, like, image } = now();
  find("#hybrid").checked = hybrid;
  find("#hybrid").disabled = Boolean(like || image);
  find("#fold").checked = fold !== null;
  find("#fold-at").disabled = fold === null;
  find("#fold-at").value = String(fold ?? DEFAULT_FOLD);
  find("#fold-value").textContent = fold === null ? "" : fold.toFixed(2);
  showModels();
}

/** Shows the choice of models, where there is one. */
function showModels() {
  const { model } = now();
  const names = new Set(["", ...furtherModels, model]); // one that is not there is refused with a cure
  find("#model-choice").hidden = names.size === 1;
  find("#model").replaceChildren(...Array.from(names, (name) => h("option", { value: name }, name || "main")));
  find("#model").value = model;
}

/** Says how many results there are, and how the sides differ. */
function showCount() {
  const { page } = left;
  const count = page?.cursor ? `${page.hits.length}+ results` : page ? plural(page.hits.length, "result") : "";
  find("#count").textContent = hasQuery(now()) || !page ? count : `${count}, all that fits the filters`;
  showPlace();
  if (!now().vs) return;
  compareSides(left, right);
  for (const [side, results] of [
    ["#left", left],
    ["#right", right],
  ])
    find(`${side} .side-model`).textContent = results.page ? modelName(results.page.model) : "";
}

/** Looks for a new publication, and offers it quietly. */
async function follow() {
  const { version, name, num_items: items, models } = await status().catch(() => ({}));
  if (!version) return;
  furtherModels = models.filter((each) => each.has_vectors).map((each) => each.name);
  showModels();
  find("#store").textContent = [name, items === undefined ? null : `${items.toLocaleString("en")} items`]
    .filter(Boolean)
    .join(" · ");
  if (served && version !== served) {
    showBanner("publication", "The archive has been published anew.", { label: "Show it", run: refresh });
  }
  served ||= version;
}

/** Searches anew in what is published now. */
async function refresh() {
  hideBanner("publication");
  served = "";
  forgetFacets();
  forgetVersions();
  forgetWelcome();
  left.forget();
  right.forget();
  show();
  await follow();
}

function startOptions() {
  find("#model").addEventListener("change", (event) => update({ model: event.target.value }));
  find("#hybrid").addEventListener("change", (event) => update({ hybrid: event.target.checked }));
  find("#fold").addEventListener("change", (event) =>
    update({ fold: event.target.checked ? Number(find("#fold-at").value) : null }),
  );
  find("#fold-at").addEventListener("input", (event) => {
    find("#fold-value").textContent = Number(event.target.value).toFixed(2);
  });
  find("#fold-at").addEventListener("change", (event) => update({ fold: Number(event.target.value) }));
}

startTheme();
startQuery();
startOptions();
startPanel({ context, closed: focusItem });
startKeys({ focusGrid: () => left.grid.focus(left.grid.current) });
startFilters();
onChange((state, before) => {
  if (searchKey(state) !== searchKey(before)) show();
  showPanel();
});

/** Results among which an item was found, and the publication that has it. @param {string} id */
function context(id) {
  const { version, vs, side } = now();
  const has = (/** @type {Results} */ { grid }) => grid.hits.some((hit) => hit.item_id === id);
  const isRight = vs && (side === "right" || (!has(left) && has(right)));
  return isRight ? { hits: right.grid.hits, version: vs } : { hits: left.grid.hits, version };
}

/** Returns the focus to the tile whose panel was closed. @param {string} id */
function focusItem(id) {
  for (const { grid } of [left, right]) {
    const index = grid.hits.findIndex((hit) => hit.item_id === id);
    if (index >= 0) return grid.focus(index);
  }
  return false;
}

show();
startCompare();
showPanel();
resumeSession().then(follow);
setInterval(() => document.visibilityState === "visible" && follow(), STATUS_EVERY_MS);
addEventListener("online", follow);
if (!hasQuery(now()) && !matchMedia("(pointer: coarse)").matches) find("#q").focus();
document.documentElement.dataset.ready = "true";
performance.mark("embedder:ready");
