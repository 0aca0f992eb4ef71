/**
 * What is searched and shown, kept in the page's address: a link can be shared, back and forward work.
 *
 * @typedef {{values: (string|null)[], min: string, max: string, isList?: boolean}} ColumnFilter a null stands for rows
 *   without a value; of a list, the values are elements
 * @typedef {Object} State
 * @property {string} q text searched for
 * @property {string} like id of the item whose like is searched for
 * @property {number} segment its segment
 * @property {string} image key of an image that this tab holds
 * @property {string[]} also ids of further items whose like is searched for
 * @property {string[]} unlike ids of items to stay away from
 * @property {string} not words to stay away from
 * @property {string} instruction of words, in the place of the model's own
 * @property {string} folder that items lie in, or below
 * @property {string} name part of the names of files
 * @property {string} sort order: empty for the best, or of a list the newest, first
 * @property {number} seed of the order at random
 * @property {number} count results that are asked for at once; 0 for as many as usual
 * @property {number|null} least cosine of a result
 * @property {string} page "archive", "duplicates", or empty for the search
 * @property {Record<string, ColumnFilter>} filters by column
 * @property {string} where own SQL condition
 * @property {boolean} hybrid rank by the caption's words, too
 * @property {number|null} fold cosine from which near-duplicates are one result
 * @property {string} model further model to search by; empty for the main one
 * @property {string} version publication to search in; empty for the latest
 * @property {string} vs publication next to it; empty for none
 * @property {string} item id of the item that the panel shows
 * @property {string} side "right" where it was opened among the results of the publication next to it
 * @property {number} at its segment
 */

const TEXTS = [
  ...["q", "like", "image", "not", "instruction", "folder", "name", "where", "sort", "model", "version", "vs"],
  ...["item", "side", "page"],
];
const NUMBERS = ["segment", "at", "seed", "count"];
const LISTS = ["also", "unlike"];
export const SORTS = ["newest", "oldest", "name", "random", "embedded"];

/** @type {Set<(now: State, before: State) => void>} */
const listeners = new Set();
/** @type {State} */
let current = read(location.search);

/**
 * Reads a state from the query of an address.
 * @param {string} address
 * @returns {State}
 */
export function read(address) {
  const params = new URLSearchParams(address);
  /** @type {any} */
  const state = { filters: bare({}), hybrid: params.get("hybrid") === "1", fold: null };
  for (const name of TEXTS) state[name] = params.get(name) ?? "";
  for (const name of NUMBERS) state[name] = Math.max(0, Number.parseInt(params.get(name) ?? "0", 10) || 0);
  for (const name of LISTS) state[name] = params.getAll(name).slice(0, 16);
  if (!SORTS.includes(state.sort)) state.sort = "";
  state.q = withoutSlash(state.q);
  const fold = Number(params.get("fold"));
  if (fold > 0 && fold <= 1) state.fold = fold;
  const least = Number.parseFloat(params.get("least") ?? "");
  state.least = least >= -1 && least <= 1 ? least : null;
  for (const [name, value] of params) {
    const [, kind, column] = /^(in|has|none|min|max)\.(.+)$/s.exec(name) ?? [];
    if (!column) continue;
    const filter = (state.filters[column] ??= { values: [], min: "", max: "" });
    if (kind === "has") filter.isList = true;
    if (kind === "in" || kind === "has") filter.values.push(value);
    else if (kind === "none") filter.values.push(null);
    else filter[kind] = value;
  }
  return state;
}

/**
 * Filters without what every object has: a column may be named `constructor`.
 * @param {Record<string, ColumnFilter>} filters
 */
function bare(filters) {
  return Object.assign(Object.create(null), filters);
}

/**
 * Writes a state as the query of an address; what is not set is left out.
 * @param {State} state
 * @returns {string}
 */
export function write(state) {
  const params = new URLSearchParams();
  for (const name of [...TEXTS, ...NUMBERS]) if (state[name]) params.set(name, String(state[name]));
  for (const name of LISTS) for (const id of state[name]) params.append(name, id);
  if (state.least !== null) params.set("least", String(state.least));
  if (state.hybrid) params.set("hybrid", "1");
  if (state.fold !== null) params.set("fold", String(state.fold));
  for (const [column, { values, min, max, isList }] of Object.entries(state.filters)) {
    const kind = isList ? "has" : "in";
    for (const value of values) params.append(value === null ? `none.${column}` : `${kind}.${column}`, value ?? "1");
    if (min !== "") params.set(`min.${column}`, min);
    if (max !== "") params.set(`max.${column}`, max);
  }
  const text = params.toString();
  return text ? `?${text}` : "";
}

/** The state now; it is not changed in place. */
export function now() {
  return current;
}

/**
 * Changes the state and the address.
 * @param {Partial<State>} changes
 * @param {{replace?: boolean}} [how] replace: without an entry that back returns to
 */
export function update(changes, { replace = false } = {}) {
  const before = current;
  const next = { ...current, ...changes };
  next.filters = bare(next.filters);
  const address = write(next);
  if (address === write(before)) return;
  current = next;
  const url = address || location.pathname;
  if (replace) history.replaceState(null, "", url);
  else history.pushState(null, "", url);
  for (const listener of listeners) listener(current, before);
}

/**
 * Calls a function after each change, those by back and forward included.
 * @param {(now: State, before: State) => void} listener
 */
export function onChange(listener) {
  listeners.add(listener);
}

/**
 * Names what decides the results, so that a panel that opens searches nothing again.
 * @param {State} state
 */
export function searchKey(state) {
  return write({ ...state, item: "", side: "", at: 0 });
}

/** Words without the slashes before them, which open the box. @param {string} words */
export function withoutSlash(words) {
  return words.replace(/^[\s/]*\//, "");
}

/** @param {State} state */
export function hasQuery(state) {
  return Boolean(state.q.trim() || state.like || state.image);
}

/** Query without anything, for a new one. */
export const NO_QUERY = { q: "", like: "", segment: 0, image: "", also: [], unlike: [], not: "", instruction: "" };
/** What takes all filters away. */
export const NO_FILTERS = { filters: {}, where: "", folder: "", name: "" };

/** @param {State} state */
export function hasFilters(state) {
  return Object.keys(state.filters).length > 0 || Boolean(state.where.trim() || state.folder || state.name.trim());
}

addEventListener("popstate", () => {
  const before = current;
  current = read(location.search);
  for (const listener of listeners) listener(current, before);
});
