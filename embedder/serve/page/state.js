/**
 * What is searched and shown, kept in the page's address: a link can be shared, back and forward work.
 *
 * @typedef {{values: (string|null)[], min: string, max: string}} ColumnFilter a null stands for rows without a value
 * @typedef {Object} State
 * @property {string} q text searched for
 * @property {string} like id of the item whose like is searched for
 * @property {number} segment its segment
 * @property {string} image key of an image that this tab holds
 * @property {Record<string, ColumnFilter>} filters by column
 * @property {string} where own SQL condition
 * @property {boolean} hybrid rank by the caption's words, too
 * @property {number|null} fold cosine from which near-duplicates are one result
 * @property {string} model further model to search by; empty for the main one
 * @property {string} version publication to search in; empty for the latest
 * @property {string} vs publication beside it; empty for none
 * @property {string} item id of the item that the panel shows
 * @property {string} side "right" where it was opened among the results of the publication beside
 * @property {number} at its segment
 */

const TEXTS = ["q", "like", "image", "where", "model", "version", "vs", "item", "side"];
const NUMBERS = ["segment", "at"];

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
  const state = { filters: {}, hybrid: params.get("hybrid") === "1", fold: null };
  for (const name of TEXTS) state[name] = params.get(name) ?? "";
  for (const name of NUMBERS) state[name] = Math.max(0, Number.parseInt(params.get(name) ?? "0", 10) || 0);
  const fold = Number(params.get("fold"));
  if (fold > 0 && fold <= 1) state.fold = fold;
  for (const [name, value] of params) {
    const [, kind, column] = /^(in|none|min|max)\.(.+)$/s.exec(name) ?? [];
    if (!column) continue;
    const filter = (state.filters[column] ??= { values: [], min: "", max: "" });
    if (kind === "in") filter.values.push(value);
    else if (kind === "none") filter.values.push(null);
    else filter[kind] = value;
  }
  return state;
}

/**
 * Writes a state as the query of an address; what is not set is left out.
 * @param {State} state
 * @returns {string}
 */
export function write(state) {
  const params = new URLSearchParams();
  for (const name of [...TEXTS, ...NUMBERS]) if (state[name]) params.set(name, String(state[name]));
  if (state.hybrid) params.set("hybrid", "1");
  if (state.fold !== null) params.set("fold", String(state.fold));
  for (const [column, { values, min, max }] of Object.entries(state.filters)) {
    for (const value of values) params.append(value === null ? `none.${column}` : `in.${column}`, value ?? "1");
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
 * Names what decides the results, so that a panel that opens searches nothing anew.
 * @param {State} state
 */
export function searchKey(state) {
  return write({ ...state, item: "", side: "", at: 0 });
}

/** @param {State} state */
export function hasQuery(state) {
  return Boolean(state.q.trim() || state.like || state.image);
}

/** @param {State} state */
export function hasFilters(state) {
  return Object.keys(state.filters).length > 0 || Boolean(state.where.trim());
}

addEventListener("popstate", () => {
  const before = current;
  current = read(location.search);
  for (const listener of listeners) listener(current, before);
});
