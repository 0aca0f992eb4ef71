/** Filters made from the columns of the store, with counts that fit what is chosen already. */

import { ApiError, facets } from "./api.js";
import { date, DAY, find, h, icon, size } from "./dom.js";
import { children, tree } from "./folders.js";
import { toast } from "./notices.js";
import { hasFilters, NO_FILTERS, now, update } from "./state.js";
import { compose, quoteName } from "./where.js";

/** @typedef {import("./api.js").Facet} Facet */
/** @typedef {import("./state.js").ColumnFilter} ColumnFilter */

const OPEN_COLUMNS = 3; // the rest is folded
const SHOWN_VALUES = 8;
const NONE = "no value";
const HAS_ZONE = /T.*(Z|[+-]\d\d:\d\d)$/;
/** @type {Record<string, string>} */
const KINDS = { image: "picture", pair: "picture with a caption", video: "video", text: "caption only" };
// Columns of the embedder's own, which describe the run and not the image: they come last.
const TEXTS_OF_ITEMS = ["item_id", "content_version", "caption", "uri", "folder", "file_name"];
const OF_FILES = ["file_type", "file_date", "file_size"];
const OWN = [
  "num_vectors",
  "segment",
  "start_s",
  "end_s",
  "embedded_at",
  "run_id",
  "model_fingerprint",
  "preprocess_fingerprint",
];

/** @type {Promise<{num_rows: number, columns: Facet[]}>|null} */
let whole = null;
/** @type {Map<string, Promise<{columns: Facet[]}>>} answers for conditions */
const counted = new Map();
/** @type {Set<string>} columns that the reader unfolded, or folded */
const turned = new Set();
/** @type {Set<string>} columns of which all values are shown */
const unfolded = new Set();

/** Facets of the whole store, asked for once. */
export function allFacets() {
  whole ??= facets();
  whole.catch(forgetFacets); // the next one asks again
  return whole;
}

/** Forgets counts: another publication is served. */
export function forgetFacets() {
  whole = null;
  counted.clear();
}

/** Draws the filters and the chips of those that are set. */
export async function showFilters() {
  drawChips();
  const panel = find("#filters");
  if (panel.hidden) return;
  const state = now();
  try {
    const all = await allFacets();
    const shown = useful(all.columns);
    const counts = await Promise.all(shown.map((each) => countsFor(each)));
    if (state === now()) draw(all.columns, shown, counts);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (!whole) return;
    const { columns } = await allFacets();
    draw(columns, useful(columns), useful(columns)); // an own condition that is none: the search says why
  }
}

/**
 * Columns that can distinguish rows: of two values or more, most of which stand more than once.
 * @param {Facet[]} columns
 */
export function useful(columns) {
  const isRange = ({ type }) => type === "number" || type === "time";
  const place = ({ name }) => (name === "modality" ? -9 : OF_FILES.includes(name) ? 0.5 : OWN.indexOf(name) + 1);
  const numValues = (facet) => (isRange(facet) ? 1000 : (facet.values?.length ?? 0));
  return columns
    .filter((facet) => {
      const { name, values, num_null: nulls, min, max } = facet;
      if (name in now().filters) return true;
      if (isRange(facet)) return min !== null && min !== max;
      const isOfFew = values !== null && values.length + (nulls ? 1 : 0) > 1 && areShared(values);
      return !TEXTS_OF_ITEMS.includes(name) && isOfFew;
    })
    .sort((one, other) => place(one) - place(other) || Math.sign(numValues(one) - numValues(other) || 0));
}

/** Whether most rows have a value that others have, too. @param {{value: any, count: number}[]} values */
function areShared(values) {
  const sum = (/** @type {{count: number}[]} */ of) => of.reduce((total, { count }) => total + count, 0);
  return values.length > 0 && 2 * sum(values.filter(({ count }) => count > 1)) >= sum(values);
}

/** @param {Facet} facet @returns {Promise<Facet>} with counts under the filters of the other columns */
async function countsFor(facet) {
  const where = compose(now(), facet.name);
  if (!where) return facet;
  if (!counted.has(where)) counted.set(where, facets(where));
  const { columns } = await /** @type {Promise<{columns: Facet[]}>} */ (counted.get(where));
  return columns.find((each) => each.name === facet.name) ?? facet;
}

/** @type {string|null} the condition that its field was last given: what is typed there stays when counts arrive */
let drawnWhere = null;

/** @param {Facet[]} all @param {Facet[]} columns that are shown @param {Facet[]} counts */
function draw(all, columns, counts) {
  const body = find("#filter-list");
  const focused = document.activeElement?.id;
  const sections = columns.map((each, index) => section(each, counts[index], index));
  const isOwn = (/** @type {Facet} */ { name }) => OWN.includes(name);
  const [shown, own] = [false, true].map((is) => sections.filter((_, index) => isOwn(columns[index]) === is));
  const isOfFiles = all.some(({ name }) => name === "file_name");
  body.replaceChildren(
    ...(isOfFiles ? [nameField()] : []),
    ...folderSection(all.find(({ name }) => name === "folder")),
    ...shown,
    ...foldedOwn(own),
  );
  if (focused) document.getElementById(focused)?.focus();
  if (now().where !== drawnWhere) find("#where").value = drawnWhere = now().where;
  find("#columns").textContent = `Columns: ${all.map((each) => quoteName(each.name)).join(", ")}`;
  find("#reset").hidden = !hasFilters(now());
}

let areOwnOpen = false;

/** Filters by what describes the run, folded away. @param {Node[]} sections */
function foldedOwn(sections) {
  if (!sections.length) return [];
  const attributes = { class: "own", open: areOwnOpen, ontoggle: rememberOwn };
  return [h("details", attributes, summaryOf("how they were embedded"), ...sections)];
}

/** @param {any} event */
function rememberOwn(event) {
  if (event.target === event.currentTarget) areOwnOpen = event.target.open;
}

/** @param {string} name */
function summaryOf(name) {
  return h("summary", {}, h("span", {}, name), icon("down"));
}

function nameField() {
  const change = (/** @type {any} */ event) => update({ name: event.target.value.trim() });
  const field = h(
    "input",
    { type: "search", id: "in-name", value: now().name, placeholder: "part of it", onchange: change },
  );
  return h("label", { class: "name-field" }, h("span", {}, "File name"), field);
}

/** Folders as a tree: the way to the chosen one, and those in it. @param {Facet} [facet] */
function folderSection(facet) {
  const root = tree(facet?.values ?? []);
  if (!root.folders.length && !now().folder) return [];
  const row = (/** @type {import("./folders.js").Folder} */ folder, /** @type {number} */ depth) => {
    const isChosen = folder.path === now().folder;
    return h(
      "button",
      {
        type: "button",
        class: `folder depth-${Math.min(depth, 5)}`,
        id: `folder-${folder.path}`,
        "aria-current": isChosen ? "true" : null,
        onclick: () => update({ folder: isChosen ? parentOf(folder.path) : folder.path, page: "" }),
      },
      icon("folder"),
      h("span", { class: "words", title: folder.path }, folder.name),
      h("span", { class: "count" }, folder.count.toLocaleString("en")),
    );
  };
  const rows = (/** @type {any} */ folders, /** @type {number} */ depth) =>
    folders.flatMap((/** @type {import("./folders.js").Folder} */ each) => {
      const isOnWay = now().folder === each.path || now().folder.startsWith(`${each.path}/`);
      return [row(each, depth), ...(isOnWay ? rows(children(root, each.path), depth + 1) : [])];
    });
  return [
    h(
      "details",
      { open: true },
      summaryOf("folder"),
      h("div", { class: "folders", role: "group", "aria-label": "Folders" }, ...rows(root.folders, 0)),
    ),
  ];
}

/** Name of a column for people. @param {string} column */
function nameOf(column) {
  return column === "modality" ? "kind" : column.replaceAll("_", " ");
}

/** Value of a column for people. @param {string} column @param {string|null} value */
function valueOf(column, value) {
  return value === null ? NONE : value === "" ? "(empty)" : column === "modality" ? (KINDS[value] ?? value) : value;
}

/** @param {string} path */
function parentOf(path) {
  return path.includes("/") ? path.slice(0, path.lastIndexOf("/")) : "";
}

/** @param {Facet} facet @param {Facet} counts @param {number} index */
function section(facet, counts, index) {
  const body = facet.type === "number" || facet.type === "time" ? range : choices;
  const isSet = facet.name in now().filters;
  const isOpen = turned.has(facet.name) !== (index < OPEN_COLUMNS || isSet);
  return h(
    "details",
    {
      open: isOpen,
      ontoggle: (/** @type {any} */ event) => {
        if (event.target.open !== isOpen) turned.has(facet.name) ? turned.delete(facet.name) : turned.add(facet.name);
      },
    },
    summaryOf(nameOf(facet.name)),
    h("fieldset", {}, h("legend", { class: "hidden-text" }, facet.name), ...body(facet, counts)),
  );
}

/** @param {Facet} facet @param {Facet} counts */
function choices(facet, counts) {
  const chosen = now().filters[facet.name]?.values ?? [];
  const found = new Map((counts.values ?? []).map(({ value, count }) => [String(value), count]));
  const names = [
    ...new Set([...(facet.values ?? []).map(({ value }) => String(value)), ...chosen.filter((each) => each !== null)]),
  ];
  const isList = facet.type === "list";
  const rows = names.map((value) => choice(facet.name, value, found.get(value) ?? 0, chosen, isList));
  if (facet.num_null) rows.push(choice(facet.name, null, counts.num_null ?? 0, chosen, isList));
  const hidden = rows.slice(SHOWN_VALUES);
  if (hidden.length < 2 || unfolded.has(facet.name)) return rows;
  const all = h(
    "button",
    {
      type: "button",
      class: "link small",
      onclick: () => {
        unfolded.add(facet.name);
        all.replaceWith(...hidden);
        hidden[0].querySelector("input")?.focus();
      },
    },
    `${hidden.length} more`,
  );
  return [...rows.slice(0, SHOWN_VALUES), all];
}

/**
 * @param {string} column
 * @param {string|null} value
 * @param {number} count
 * @param {(string|null)[]} chosen
 * @param {boolean} isList
 */
function choice(column, value, count, chosen, isList) {
  const id = `in-${column}-${value ?? ""}-${value === null}`;
  const isChosen = chosen.includes(value);
  const change = () => {
    const rest = chosen.filter((each) => each !== value);
    setColumn(column, { values: isChosen ? rest : [...rest, value], isList });
  };
  return h(
    "label",
    { class: count || isChosen ? "choice" : "choice none" },
    h("input", { type: "checkbox", id, checked: isChosen, onchange: change }),
    h("span", { class: "words", title: value ?? NONE }, valueOf(column, value)),
    h("span", { class: "count" }, count.toLocaleString("en")),
  );
}

/** @param {Facet} facet */
function range(facet) {
  const isTime = facet.type === "time";
  const isOfFile = facet.name === "file_date"; // of which nobody remembers the minute
  const isDay = isTime && (isOfFile || DAY.test(facet.min));
  const isZoned = isTime && HAS_ZONE.test(facet.min); // filtered, and shown, by the reader's zone
  const set = now().filters[facet.name] ?? { min: "", max: "" };
  const number = (value) => Number(value).toLocaleString("en", { maximumFractionDigits: 3 });
  const shown = (value) => (isTime ? date(value) : facet.name === "file_size" ? size(value) : number(value));
  const field = (end, label) =>
    h(
      "label",
      { class: "end-of-range" },
      h("span", { class: "muted small" }, label),
      h("input", {
        type: isDay ? "date" : isTime ? "datetime-local" : "number",
        step: isDay ? null : isTime ? "1" : "any",
        max: isDay ? "9999-12-31" : isTime ? "9999-12-31T23:59:59" : null,
        id: `${end}-${facet.name}`,
        value: !isZoned || DAY.test(set[end]) ? set[end] : local(set[end]).slice(0, isDay ? 10 : 19),
        placeholder: isTime ? "" : shown(facet[end]),
        onchange: (/** @type {any} */ event) => {
          const value = event.target.value;
          if (!event.target.reportValidity()) return; // a year of five digits
          const moment = new Date(isDay ? `${value}T00:00` : value);
          if (isDay && end === "max") moment.setTime(moment.setDate(moment.getDate() + 1) - 1);
          setColumn(facet.name, { [end]: isZoned && value ? moment.toISOString() : value });
        },
      }),
    );
  const ends = `${shown(facet.min)} to ${shown(facet.max)}`;
  return [
    h("div", { class: "range" }, field("min", "from"), field("max", "to")),
    h("p", { class: "muted small" }, ends),
  ];
}

/** Writes a time as `datetime-local` has it, in the reader's zone; empty where a link has none. @param {string} time */
function local(time) {
  const parsed = new Date(time);
  const shown = new Date(parsed.getTime() - parsed.getTimezoneOffset() * 60_000);
  return Number.isNaN(shown.getTime()) ? "" : shown.toISOString().slice(0, 19);
}

/** End of a range for people. @param {string} column @param {string} end */
function endOf(column, end) {
  if (!HAS_ZONE.test(end)) return end;
  return column === "file_date" ? local(end).slice(0, 10) || end : date(end);
}

/** @param {string} column @param {Partial<ColumnFilter>} changes */
function setColumn(column, changes) {
  const filter = { ...(now().filters[column] ?? { values: [], min: "", max: "" }), ...changes };
  const { [column]: _, ...rest } = now().filters;
  const isSet = filter.values.length || filter.min !== "" || filter.max !== "";
  update({ filters: isSet ? { ...rest, [column]: filter } : rest });
}

/** Draws a chip for each filter, which takes it away. */
function drawChips() {
  const { filters, where, folder, name } = now();
  const chips = Object.entries(filters).flatMap(([column, { values, min, max }]) => {
    const label = nameOf(column);
    const [from, to] = [min, max].map((end) => endOf(column, end));
    const range = min !== "" && max !== "" ? `${from} to ${to}` : min !== "" ? `from ${from}` : `to ${to}`;
    return [
      ...values.map((value) => [
        `${label}: ${valueOf(column, value)}`,
        () => setColumn(column, { values: values.filter((each) => each !== value) }),
      ]),
      ...(min !== "" || max !== "" ? [[`${label}: ${range}`, () => setColumn(column, { min: "", max: "" })]] : []),
    ];
  });
  if (folder) chips.unshift([`in ${folder}`, () => update({ folder: "" })]);
  if (name) chips.push([`name: ${name}`, () => update({ name: "" })]);
  if (where) chips.push([where, () => update({ where: "" })]);
  find("#chips").replaceChildren(
    ...chips.map(([text, remove]) =>
      h(
        "button",
        { type: "button", class: "chip", "aria-label": `Remove the filter ${text}`, onclick: remove },
        h("span", { class: "words" }, text),
        icon("close"),
      ),
    ),
  );
  const count = find("#filter-count");
  count.textContent = String(chips.length);
  count.hidden = !chips.length;
}

/** Readies the filters' own buttons. */
export function startFilters() {
  const panel = find("#filters");
  const toggle = find("#filter-toggle");
  const show = (isShown) => {
    panel.hidden = !isShown;
    toggle.setAttribute("aria-expanded", String(isShown));
    if (isShown) showFilters();
  };
  toggle.addEventListener("click", () => show(panel.hidden));
  find("#filters-close").addEventListener("click", () => {
    show(false);
    toggle.focus();
  });
  find("#reset").addEventListener("click", () => update(NO_FILTERS));
  find("#own").addEventListener("submit", (event) => {
    event.preventDefault();
    const where = (drawnWhere = find("#where").value.trim());
    if (where === now().where) toast("The condition is set already");
    update({ where });
  });
  if (matchMedia("(min-width: 1100px)").matches && hasFilters(now())) show(true);
}
