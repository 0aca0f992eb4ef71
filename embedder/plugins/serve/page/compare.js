/** Two publications side by side, of one model or two: which results only one of them has, how the others moved. */

import { versions } from "./api.js";
import { date, find, h } from "./dom.js";
import { now, update } from "./state.js";

/** @typedef {import("./api.js").Hit} Hit */
/** @typedef {{text: string, kind: "only"|"up"|"down"|""}} Mark */

const MODEL_CHARACTERS = 8; // of a fingerprint, which names a model

/** @type {Promise<Record<string, any>[]>|null} */
let known = null;

/** Name of a model. @param {string} fingerprint */
export function modelName(fingerprint) {
  return `model ${fingerprint.slice(0, MODEL_CHARACTERS)}`;
}

/** Publications that can be asked, the latest first. */
export function allVersions() {
  known ??= versions();
  known.catch(forgetVersions); // the next one asks again
  return known;
}

export function forgetVersions() {
  known = null;
}

/**
 * Ranks of the results that both sides have: those that only one has take no rank.
 * @param {Hit[]} here
 * @param {Hit[]} there
 * @returns {Map<string, number>} by item id
 */
function sharedRanks(here, there) {
  const ids = new Set(there.map((hit) => hit.item_id));
  return new Map(here.filter((hit) => ids.has(hit.item_id)).map((hit, rank) => [hit.item_id, rank]));
}

/**
 * Says how each result of one side stands on the other.
 * @param {Hit[]} here
 * @param {Hit[]} there
 * @returns {Map<string, Mark>} by item id
 */
export function differences(here, there) {
  const [ranks, others] = [sharedRanks(here, there), sharedRanks(there, here)];
  return new Map(
    here.map((hit) => {
      const [rank, other] = [ranks.get(hit.item_id), others.get(hit.item_id)];
      if (rank === undefined || other === undefined) return [hit.item_id, { text: "only here", kind: "only" }];
      const moved = other - rank; // a smaller rank is better
      if (!moved) return [hit.item_id, { text: "", kind: "" }];
      return [hit.item_id, moved > 0 ? { text: `▲ ${moved}`, kind: "up" } : { text: `▼ ${-moved}`, kind: "down" }];
    }),
  );
}

/**
 * Sums the differences up.
 * @param {Hit[]} left
 * @param {Hit[]} right
 */
export function summary(left, right) {
  const [ranks, others] = [sharedRanks(left, right), sharedRanks(right, left)];
  const same = [...ranks].filter(([id, rank]) => others.get(id) === rank).length;
  return `${ranks.size} of ${Math.max(left.length, right.length)} on both sides, ${same} at the same rank`;
}

/**
 * Depth to which two lists are compared: that of the shorter one of which more may follow.
 * @param {{hits: Hit[], cursor: any}} left
 * @param {{hits: Hit[], cursor: any}} right
 */
export function sharedDepth(left, right) {
  return Math.min(...[left, right].map(({ hits, cursor }) => (cursor ? hits.length : Infinity)));
}

/**
 * Warns of two models, as their scores are not on one scale.
 * @param {string} left fingerprint
 * @param {string} right fingerprint
 */
function twoModels(left, right) {
  return left === right ? "" : `; ${modelName(left)} and ${modelName(right)}: compare ranks, not scores`;
}

/**
 * Marks the results of both sides and says it in a line.
 * @param {import("./results.js").Results} left
 * @param {import("./results.js").Results} right
 */
export function compareSides(left, right) {
  const isWhole = left.page && right.page;
  if (isWhole && !left.loading && !right.loading) evenOut(left, right);
  const depth = isWhole ? sharedDepth(left.page, right.page) : 0;
  const [here, there] = [left, right].map(({ grid }) => grid.hits.slice(0, depth));
  left.grid.mark(differences(here, there));
  right.grid.mark(differences(there, here));
  const summed = isWhole ? summary(here, there) + twoModels(left.page.model, right.page.model) : "";
  find("#summary").textContent = summed && Number.isFinite(depth) ? `Of the first ${depth}: ${summed}` : summed;
}

/**
 * Loads more of the side that is behind.
 * @param {import("./results.js").Results} left
 * @param {import("./results.js").Results} right
 */
function evenOut(left, right) {
  const [behind, ahead] = left.page.hits.length < right.page.hits.length ? [left, right] : [right, left];
  if (behind.page.cursor && behind.page.hits.length < ahead.page.hits.length) behind.more();
}

/**
 * Draws the choice of publications.
 * @param {boolean} isOpen
 */
export async function showVersions(isOpen) {
  find("#compare-bar").hidden = !isOpen;
  find("#compare-toggle").setAttribute("aria-expanded", String(isOpen));
  if (!isOpen) return;
  const all = await allVersions();
  const { version, vs } = now();
  const latest = all[0]?.run_id ?? "";
  for (const [select, chosen] of [
    [find("#left-version"), version || latest],
    [find("#right-version"), vs],
  ]) {
    const options = all.map((each) => option(each, latest));
    if (select.id === "right-version") options.unshift(h("option", { value: "" }, "choose a publication"));
    else if (!all.some((each) => each.run_id === chosen) && chosen)
      options.push(h("option", { value: chosen }, chosen));
    select.replaceChildren(...options);
    select.value = chosen;
  }
  find("#compare-note").textContent =
    all.length > 1 ? "" : "There is one publication only: nothing to compare with yet.";
}

/** @param {Record<string, any>} each @param {string} latest */
function option(each, latest) {
  const model = each.model ? ` · ${modelName(each.model)}` : "";
  const time = each.published_at ?? each.at;
  const name = `${time ? date(time) : each.run_id}${model}${each.run_id === latest ? " · latest" : ""}`;
  return h("option", { value: each.run_id }, name);
}

/** Readies the choice. */
export function startCompare() {
  find("#compare-toggle").addEventListener("click", () => {
    const isOpen = find("#compare-bar").hidden;
    showVersions(isOpen);
    if (!isOpen) update({ version: "", vs: "" });
  });
  find("#left-version").addEventListener("change", async (event) => {
    const [first] = await allVersions();
    update({ version: event.target.value === first?.run_id ? "" : event.target.value });
  });
  find("#right-version").addEventListener("change", (event) => update({ vs: event.target.value }));
}
