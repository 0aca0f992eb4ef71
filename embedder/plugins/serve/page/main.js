/** The search page: shows what the address says, and keeps the address at what is shown. */

import { items, resumeSession, status } from "./api.js";
import { forgetPage, showPage } from "./archive.js";
import { compareSides, forgetVersions, modelName, showVersions, startCompare } from "./compare.js";
import { date, find, h, plural } from "./dom.js";
import { forgetFacets, showFilters, startFilters } from "./facets.js";
import { startKeys, startTheme } from "./keys.js";
import { hideBanner, showBanner } from "./notices.js";
import { showPanel, showPlace, startPanel } from "./panel.js";
import { commit, imageOf, showQuery, startQuery } from "./query.js";
import { Results } from "./results.js";
import { chooseAll, startSelection } from "./select.js";
import { hasFilters, hasQuery, NO_FILTERS, NO_QUERY, now, onChange, searchKey, SORTS, update } from "./state.js";
import { startViewer } from "./viewer.js";
import { forgetWelcome, showWelcome, startWelcome } from "./welcome.js";
import { compose } from "./where.js";

const DEFAULT_FOLD = 0.95;
const DEFAULT_COUNT = 40;
const STATUS_EVERY_MS = 60_000;
/** @type {Record<string, string>} */
const SORT_NAMES = {
  newest: "newest first",
  oldest: "oldest first",
  name: "by name",
  random: "at random",
  embedded: "last embedded first",
};

/** @typedef {import("./api.js").Hit} Hit */

/** @param {string} side */
const hooksOf = (side) => ({
  side,
  open: (/** @type {Hit} */ hit) => {
    commit();
    update({ item: hit.item_id, side, at: hit.segment });
  },
  more: (/** @type {Hit} */ hit) => update({ ...NO_QUERY, like: hit.item_id, segment: hit.segment, sort: "" }),
  changed: showCount,
  cure: (/** @type {import("./api.js").ApiError} */ { status: code, problem: { where } }) => {
    if (where === "version") return { label: "Show the latest", run: () => update({ version: "", vs: "" }) };
    if (code === 404 && where === "item") return { label: "Start again", run: () => update(NO_QUERY) };
    return null;
  },
  empty: () =>
    hasFilters(now())
      ? h("button", { type: "button", class: "button", onclick: () => update(NO_FILTERS) }, "Remove the filters")
      : now().least !== null
        ? h("button", { type: "button", class: "button", onclick: () => update({ least: null }) }, "Take any likeness")
        : null,
});
const left = new Results(find("#left .results"), hooksOf(""));
const right = new Results(find("#right .results"), hooksOf("right"));
let served = "";
let isStatusAsked = false; // whether it has answered, or failed
/** @type {string[]} further models that can be searched by */
let furtherModels = [];
let ownInstruction = ""; // of the main model's queries; empty where it takes none

/** Body of the search, or of the list, that a state asks for. @param {import("./state.js").State} state */
function requestOf(state) {
  const { q, like, segment, image, also, unlike, not, instruction, hybrid, fold, model, least, sort, seed, count } = state;
  const where = compose(state);
  const k = count || DEFAULT_COUNT;
  if (!hasQuery(state)) return { where, k, sort: sort || "newest", seed };
  const words = q.trim();
  const picture = like ? { item: like, segment } : image ? { upload: "image" } : {};
  const away = [...(not ? [{ text: not }] : []), ...unlike.map((id) => ({ item: id }))];
  const query = {
    ...(words ? { text: words } : {}),
    ...picture,
    ...(also.length ? { also: also.map((id) => ({ item: id })) } : {}),
    ...(away.length ? { not: away } : {}),
  };
  const isByWords = hybrid && Boolean(words);
  return {
    queries: [query],
    k,
    model: model || null,
    where,
    hybrid: isByWords,
    fold,
    min_score: least,
    ...(words && instruction && ownInstruction && !model ? { instruction } : {}),
    sort: sort || null,
  };
}

function show() {
  const state = now();
  if (state.instruction && !isStatusAsked) return undefined; // until it is known whether the model takes one
  const image = state.image ? imageOf(state.image) : null;
  const isAsked = hasQuery(state) || hasFilters(state) || Boolean(state.sort);
  const isSearch = !state.page && isAsked && !(state.image && !image);
  const isDouble = Boolean(state.vs) && isSearch;
  showQuery();
  showOptions();
  showFilters();
  showPage();
  showWelcome(!isSearch && !state.page);
  showVersions(Boolean(state.version || state.vs) || !find("#compare-bar").hidden);
  find("#results").hidden = !isSearch;
  find("#options").hidden = !isSearch;
  find("#results").classList.toggle("double", isDouble);
  find("#right").hidden = !isDouble;
  for (const head of document.querySelectorAll(".side-head")) head.hidden = !isDouble;
  const page = { archive: "This archive", duplicates: "Duplicates" }[state.page];
  document.title = page ?? (state.q ? `${state.q} · search` : isSearch ? "Results · search" : "Search");
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
  const state = now();
  const { q, hybrid, fold, sort, least, count, not } = state;
  const isQuery = hasQuery(state);
  find("#hybrid").checked = hybrid;
  find("#hybrid").disabled = !q.trim();
  find("#fold").checked = fold !== null;
  find("#fold").disabled = !isQuery;
  find("#fold-at").disabled = fold === null || !isQuery;
  find("#fold-at").value = String(fold ?? DEFAULT_FOLD);
  find("#fold-value").textContent = fold === null ? "" : fold.toFixed(2);
  find("#sort").replaceChildren(
    ...(isQuery ? [h("option", { value: "" }, "best first")] : []),
    ...SORTS.filter((each) => each !== "random" || !isQuery).map(
      (each) => h("option", { value: each }, SORT_NAMES[each]),
    ),
  );
  find("#sort").value = sort || (isQuery ? "" : "newest");
  find("#least").value = least ?? "";
  find("#number").value = String(count || DEFAULT_COUNT);
  find("#not").value = not;
  for (const field of document.querySelectorAll("#refine .of-query")) /** @type {any} */ (field).hidden = !isQuery;
  find("#refine").classList.toggle("set", least !== null || Boolean(count) || Boolean(not));
  showModels();
  showInstruction();
}

/** Shows the field of the instruction, where the model takes one; that of a link to one that takes none is not used. */
function showInstruction() {
  const { model, instruction } = now();
  find("#instruction-field").hidden = Boolean(model) || !(ownInstruction || instruction);
  find("#instruction").disabled = !ownInstruction;
  find("#instruction").title = ownInstruction ? "" : "This model takes no instruction";
  find("#instruction").placeholder = ownInstruction;
  find("#instruction").value = instruction;
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
  find("#count").textContent = page ? countOf(page) : "";
  if (page?.cursor && page.total === null) countAll();
  showPlace();
  if (!now().vs) return;
  compareSides(left, right);
  for (const [side, results] of [
    ["#left", left],
    ["#right", right],
  ])
    find(`${side} .side-model`).textContent = results.page?.model ? modelName(results.page.model) : "";
}

/** @param {import("./results.js").Page} page */
function countOf({ hits, cursor, total }) {
  const shown = hits.length.toLocaleString("en");
  if (!hasQuery(now())) {
    const all = plural(total ?? hits.length, "result");
    return hasFilters(now()) ? `${all}, all that fits the filters` : all;
  }
  if (!cursor) return plural(hits.length, "result");
  const of = now().least !== null ? "" : total === null ? "" : ` of ${total.toLocaleString("en")}`;
  return `The ${shown} best${of}, more as you scroll`;
}

/** @type {Map<string, Promise<number>>} items that fulfil a condition, from which a search takes the best */
const totals = new Map();

/** Counts the items among which the search looks. */
async function countAll() {
  const { page, askedVersion: version } = left;
  const where = compose(now());
  const key = JSON.stringify([where, version, served]);
  if (!totals.has(key)) totals.set(key, items({ where, version, k: 1 }).then((listed) => listed.num_items));
  const total = await totals.get(key)?.catch(() => null);
  if (!page || page !== left.page || total === null || total === undefined) return;
  page.total = Math.max(total, page.hits.length);
  find("#count").textContent = countOf(page);
}

/** Looks for a new publication, and offers it quietly. */
async function follow() {
  const { version, name, num_items: files, models, published_at: at, instruction } = await status().catch(() => ({}));
  const isFirstAnswer = !isStatusAsked;
  isStatusAsked = true;
  if (!version) {
    if (isFirstAnswer && now().instruction) show(); // without it
    return;
  }
  furtherModels = models.filter((each) => each.has_vectors).map((each) => each.name);
  showModels();
  ownInstruction = instruction ?? "";
  showInstruction();
  find("#store").textContent = [name, plural(files, "item"), `refreshed ${date(at)}`].join(" · ");
  if (served && version !== served) {
    showBanner("publication", "The archive has been published again.", { label: "Show it", run: refresh });
  }
  const isFirst = !served;
  served ||= version;
  if (isFirst && now().instruction) {
    if (!isFirstAnswer) forgetResults(); // those without the instruction
    show();
  }
}

/** Searches again in what is published now. */
async function refresh() {
  hideBanner("publication");
  served = "";
  isStatusAsked = false;
  forgetFacets();
  forgetVersions();
  forgetWelcome();
  forgetPage();
  forgetResults();
  show();
  await follow();
}

function forgetResults() {
  left.forget();
  right.forget();
}

function startOptions() {
  find("#sort").addEventListener("change", (event) => {
    const sort = event.target.value;
    update({ sort, seed: sort === "random" ? Math.floor(Math.random() * 8) : 0 });
  });
  find("#least").addEventListener("change", (event) => {
    const least = Number.parseFloat(event.target.value);
    update({ least: least >= -1 && least <= 1 ? least : null });
  });
  find("#number").addEventListener("change", (event) => {
    const count = Number(event.target.value);
    update({ count: count === DEFAULT_COUNT ? 0 : count });
  });
  find("#instruction").addEventListener("change", (event) => update({ instruction: event.target.value.trim() }));
  find("#not").addEventListener("change", (event) => update({ not: event.target.value.trim() }));
  for (const link of document.querySelectorAll("[data-page]"))
    link.addEventListener("click", (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      update({ ...NO_QUERY, ...NO_FILTERS, sort: "", page: link.dataset.page });
      scrollTo(0, 0);
    });
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
startKeys({ focusGrid: () => left.grid.focus(left.grid.current), selectAll: () => chooseAll(shownItems()) });
startFilters();
startSelection(shownItems);
startViewer();
startWelcome();
onChange((state, before) => {
  if (searchKey(state) !== searchKey(before)) show();
  showPanel();
});

/** Ids of all results that are loaded, and the publication of each; of what both sides have, the left one's. */
function shownItems() {
  /** @type {Map<string, string>} */
  const found = new Map();
  for (const { grid, askedVersion } of [left, right])
    for (const { item_id: id } of grid.hits) if (!found.has(id)) found.set(id, askedVersion);
  return found;
}

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
