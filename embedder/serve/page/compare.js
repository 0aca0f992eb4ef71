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
 * Says how each result of one side stands on the other.
 * @param {Hit[]} here
 * @param {Hit[]} there
 * @returns {Map<string, Mark>} by item id
 */
export function differences(here, there) {
  const ranks = new Map(there.map((hit, rank) => [hit.item_id, rank]));
  return new Map(
    here.map((hit, rank) => {
      const other = ranks.get(hit.item_id);
      if (other === undefined) return [hit.item_id, { text: "only here", kind: "only" }];
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
  const ids = new Set(right.map((hit) => hit.item_id));
  const both = left.filter((hit) => ids.has(hit.item_id)).length;
  const same = left.filter((hit, rank) => right[rank]?.item_id === hit.item_id).length;
  return `${both} of ${Math.max(left.length, right.length)} on both sides, ${same} at the same rank`;
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
  left.grid.mark(isWhole ? differences(left.grid.hits, right.grid.hits) : new Map());
  right.grid.mark(isWhole ? differences(right.grid.hits, left.grid.hits) : new Map());
  find("#summary").textContent = isWhole
    ? summary(left.grid.hits, right.grid.hits) + twoModels(left.page.model, right.page.model)
    : "";
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
