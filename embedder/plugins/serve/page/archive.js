/** Pages next to the search: what the archive is, what changed last and what was rejected; and groups of duplicates. */

import { ApiError, duplicates, imageUrl, items, rejects, status } from "./api.js";
import { allVersions, modelName } from "./compare.js";
import { baseName, date, find, h, plural, thumbnail } from "./dom.js";
import { announce, errorCard } from "./notices.js";
import { choose, chooseAll, isChosen, onChosen } from "./select.js";
import { now, update, write } from "./state.js";
import { compose, quoteText } from "./where.js";

const SHOWN_CHANGES = 24;
const SHOWN_REJECTS = 200;
const DEFAULT_FOLD = 0.95;

const body = find("#extra");
let drawn = "";
let stop = new AbortController();

/** Draws the page that the state names, or none. */
export async function showPage() {
  const { page, fold } = now();
  body.hidden = !page;
  const key = page === "duplicates" ? JSON.stringify([page, fold, compose(now())]) : page;
  if (key === drawn) return;
  drawn = key;
  stop.abort();
  stop = new AbortController();
  if (!page) return body.replaceChildren();
  try {
    if (page === "duplicates") await drawDuplicates(fold ?? DEFAULT_FOLD);
    else await drawArchive();
  } catch (error) {
    if (error instanceof ApiError) body.replaceChildren(errorCard(error));
    else if (!(error instanceof DOMException)) throw error;
  }
  return undefined;
}

/** Draws the page again when it is next shown: another publication is served. */
export function forgetPage() {
  drawn = "";
}

async function drawArchive() {
  const [served, found, versions] = await Promise.all([status(), rejects({ k: SHOWN_REJECTS }), allVersions()]);
  const where = `run_id = ${quoteText(served.publication)}`;
  const changed = await items({ where, sort: "embedded", k: SHOWN_CHANGES });
  const ofRun = { run_id: { values: [served.publication], min: "", max: "" } };
  const all = () => update({ page: "", sort: "embedded", filters: ofRun });
  const facts = `${plural(served.num_items, "file")}, ${plural(found.num_rejects, "reject")}`;
  const news = changed.num_items
    ? `${plural(changed.num_items, "picture or video", "pictures and videos")} new or embedded again.`
    : "The last refresh embedded nothing.";
  const showAll = `Show all ${changed.num_items.toLocaleString("en")}`;
  body.replaceChildren(
    h("h2", { class: "display" }, "This archive"),
    h("p", { class: "lead" }, `Last refreshed ${date(served.published_at)}: ${facts}.`),
    section(
      "What changed last",
      h("p", { class: "muted" }, news),
      h("ul", { class: "near wide" }, ...changed.items.map(small)),
      changed.num_items > SHOWN_CHANGES
        ? h("button", { type: "button", class: "button", onclick: all }, showAll)
        : null,
    ),
    section("Rejects", ...rejectGroups(found)),
    section("Publications", h("ul", { class: "publications" }, ...versions.map(publication))),
  );
}

/** @param {string} title @param {...(Node|null)} content */
function section(title, ...content) {
  return h("section", {}, h("h3", {}, title), ...content);
}

/** @param {import("./api.js").Hit} hit */
function small(hit) {
  const name = hit.caption || baseName(hit.item_id);
  const go = { item: hit.item_id, at: hit.segment };
  const open = (/** @type {MouseEvent} */ event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    update(go);
  };
  return h(
    "li",
    {},
    h(
      "a",
      { href: write({ ...now(), ...go }), title: hit.item_id, onclick: open },
      thumbnail({ src: imageUrl(hit.item_id, hit.segment, 160), alt: name }),
    ),
  );
}

/** Rejects by their reason, the most frequent first. @param {any} found */
function rejectGroups({ num_rejects: total, rejects: listed }) {
  if (!total) return [h("p", { class: "muted" }, "Every file could be embedded.")];
  const groups = grouped(listed);
  const sorted = [...groups].sort(([, one], [, other]) => other.length - one.length);
  return [
    total > listed.length ? h(
      "p",
      { class: "muted" },
      `The first ${listed.length} of ${total.toLocaleString("en")}; \`embedder rejects\` lists all.`,
    ) : null,
    ...sorted.map(([reason, each]) =>
      h(
        "details",
        { class: "folded", open: sorted.length === 1 },
        h("summary", {}, `${reason} (${each.length})`),
        h("ul", { class: "rejects" }, ...each.map(reject)),
      ),
    ),
  ];
}

/** @param {any[]} listed */
function grouped(listed) {
  const groups = new Map();
  for (const each of listed) groups.set(reasonOf(each), [...(groups.get(reasonOf(each)) ?? []), each]);
  return groups;
}

/** @param {any} each */
function reasonOf({ error_type: kind, error }) {
  return error && error.length < 90 ? error : (kind ?? "no reason is known");
}

/** @param {any} each */
function reject({ item_id: id, error, has_picture: isFound }) {
  const name = isFound ? h(
    "a",
    {
      href: write({ ...now(), item: id }),
      onclick: (/** @type {Event} */ event) => (event.preventDefault(), update({ item: id })),
    },
    id,
  ) : h("b", {}, id);
  return h("li", {}, name, error && error.length >= 90 ? h("span", { class: "muted small" }, error) : null);
}

/** @param {any} each */
function publication(
  { run_id: run, published_at: at, kind, num_items: files, num_rejected: rejected, model, is_current: isCurrent },
) {
  const facts = [kind, plural(files, "file"), plural(rejected, "reject"), modelName(model)].join(" · ");
  const compare = () => update({ page: "", vs: run, q: now().q });
  return h(
    "li",
    {},
    h("span", {}, `${date(at)}${isCurrent ? ", served now" : ""}`),
    h("span", { class: "muted small" }, facts),
    isCurrent ? null : h("button", { type: "button", class: "link", onclick: compare }, "Compare with now"),
  );
}

/** @param {number} fold */
async function drawDuplicates(fold) {
  const output = h("output", {}, fold.toFixed(2));
  const slider = h("input", {
    type: "range",
    min: "0.8",
    max: "1",
    step: "0.01",
    value: String(fold),
    oninput: (/** @type {any} */ event) => (output.textContent = Number(event.target.value).toFixed(2)),
    onchange: (/** @type {any} */ event) => update({ fold: Number(event.target.value) }),
  });
  const lines = h(
    "div",
    { class: "groups", "aria-busy": "true" },
    h("p", { class: "muted" }, "Comparing all pictures with each other…"),
  );
  body.replaceChildren(
    h("h2", { class: "display" }, "Duplicates"),
    h(
      "p",
      { class: "lead" },
      "Groups that look nearly the same, the oldest file first. Select what you don't need, and export its paths.",
    ),
    h("label", { class: "choice" }, h("span", {}, "From a likeness of"), slider, output),
    lines,
  );
  const { groups, num_groups: total } = await duplicates({ fold, where: compose(now()) }, stop.signal);
  lines.removeAttribute("aria-busy");
  const of = total > groups.length ? `The largest ${groups.length} of ` : "";
  const text = `${of}${plural(total, "group")}`;
  lines.replaceChildren(
    h("p", { class: "muted" }, total ? `${text}.` : "No two pictures are that alike."),
    ...groups.map(group),
  );
  announce(text);
}

/** @param {import("./api.js").Hit[]} hits */
function group(hits) {
  const rest = new Map(hits.slice(1).map((hit) => [hit.item_id, ""]));
  return h(
    "section",
    { class: "group" },
    h("ul", { class: "near wide" }, ...hits.map(chooser)),
    h(
      "button",
      { type: "button", class: "button", onclick: () => chooseAll(rest) },
      rest.size > 1 ? `Select all ${rest.size} but the first` : "Select the second",
    ),
  );
}

/** @param {import("./api.js").Hit} hit */
function chooser(hit) {
  const image = thumbnail({ src: imageUrl(hit.item_id, hit.segment, 160), alt: "" });
  const box = h(
    "input",
    {
      type: "checkbox",
      checked: isChosen(hit.item_id),
      "data-id": hit.item_id,
      onchange: () => choose(hit.item_id, ""),
    },
  );
  return h(
    "li",
    {},
    h(
      "label",
      { class: "pick", title: hit.item_id },
      image,
      h("span", { class: "pick-name" }, box, h("span", { class: "words" }, baseName(hit.item_id))),
    ),
  );
}

onChosen(() => {
  for (
    const box of body.querySelectorAll("input[data-id]")
  ) /** @type {any} */ (box).checked = isChosen(box.dataset.id);
});
