/** What stands there before the first search: what the archive holds, and ways in. */

import { allFacets, useful } from "./facets.js";
import { imageUrl, search } from "./api.js";
import { find, h, plural, recall } from "./dom.js";
import { update } from "./state.js";
import { compose } from "./where.js";

const TOPICS = 8;
const SAMPLES = 4;

let isDrawn = false;

/** @param {boolean} isShown */
export async function showWelcome(isShown) {
  find("#welcome").hidden = !isShown;
  if (!isShown || isDrawn) return;
  isDrawn = true;
  drawRecent();
  const { num_rows, columns } = await allFacets().catch(() => ({ num_rows: 0, columns: [] }));
  if (!num_rows) return;
  find("#welcome-count").textContent = `${plural(num_rows, "image")} and moments to search by what they show.`;
  const topic = useful(columns).find(
    ({ name, type, values }) => type === "text" && name !== "modality" && (values?.length ?? 0) > 2,
  );
  if (topic) await drawTopics(topic);
}

/** Takes the samples away: another publication is served. */
export function forgetWelcome() {
  isDrawn = false;
}

/** @param {import("./api.js").Facet} topic */
async function drawTopics({ name, values }) {
  const names = (values ?? [])
    .map(({ value }) => String(value))
    .filter((value) => value.trim())
    .slice(0, TOPICS);
  const filterOf = (value) => ({ [name]: { values: [value], min: "", max: "" } });
  const answers = await Promise.all(
    names.map((text) =>
      search({ queries: [{ text }], k: SAMPLES, where: compose({ filters: filterOf(text), where: "" }) }),
    ),
  );
  const cards = names.map((value, index) => {
    const images = answers[index].answers[0].hits.map((hit) =>
      h("img", { src: imageUrl(hit.item_id, hit.segment, 160), alt: "", loading: "lazy" }),
    );
    const open = () => update({ filters: filterOf(value) });
    return h(
      "button",
      { type: "button", class: "topic", onclick: open },
      h("span", { class: "mosaic" }, ...images),
      h("span", {}, value),
    );
  });
  find("#topics").replaceChildren(...cards);
  find("#topics").setAttribute("aria-label", `Topics, by ${name.replaceAll("_", " ")}`);
}

function drawRecent() {
  const recent = recall(localStorage, "history");
  const words = Array.isArray(recent) ? recent.slice(0, 6).map(String) : [];
  find("#recent").replaceChildren(
    ...words.map((each) => h("button", { type: "button", class: "chip", onclick: () => update({ q: each }) }, each)),
  );
}
