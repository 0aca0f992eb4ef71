/** The grid of hits: justified rows that fill as their images come, and the keyboard's way through them. */

import { imageUrl } from "./api.js";
import { baseName, clock, h, icon } from "./dom.js";
import { GAP, justify, targetHeight } from "./layout.js";
import { choose, hasChosen, isChosen, onChosen } from "./select.js";
import { now, write } from "./state.js";

/** @typedef {import("./api.js").Hit} Hit */
/** @typedef {{hit: Hit, root: HTMLElement, link: HTMLAnchorElement, image: HTMLImageElement, mark: HTMLElement,
 *   ratio: number}} Tile ratio is 0 until it is known */

const SIZES = [160, 320, 640];
const SHAPE_WAIT_MS = 900; // after it a late image is cut to a square, and what follows is shown
const RETRY_MS = 1500; // a busy server has an image a little later
const SKELETON_TILES = 18;

/** @type {Map<string, number>} shapes of images that were shown before, so that they stand where they will stay */
const shapes = new Map();

export class Grid {
  /**
   * @param {HTMLElement} root a list
   * @param {{open: (hit: Hit) => void, more: (hit: Hit) => void, version: () => string, side: string}} hooks
   */
  constructor(root, hooks) {
    this.root = root;
    this.hooks = hooks;
    /** @type {Tile[]} */
    this.tiles = [];
    this.current = 0;
    this.frame = 0;
    this.near = new IntersectionObserver((entries) => this.#load(entries), { rootMargin: "600px" });
    new ResizeObserver(() => this.#layOutSoon()).observe(root);
    root.addEventListener("keydown", (event) => this.#key(event));
    onChosen(() => this.#showChosen());
  }

  /** @returns {Hit[]} */
  get hits() {
    return this.tiles.map((tile) => tile.hit);
  }

  clear() {
    this.near.disconnect();
    this.tiles = [];
    this.current = 0;
    this.root.replaceChildren();
  }

  /** Shows grey boxes where results will be. */
  showSkeleton() {
    this.clear();
    const side = targetHeight(this.root.clientWidth);
    for (let n = 0; n < SKELETON_TILES; n += 1) {
      const box = h("li", { class: "tile skeleton", "aria-hidden": "true" }, h("span", { class: "frame" }));
      box.style.width = `${side * [1, 1.4, 0.8, 1.2][n % 4]}px`;
      box.style.setProperty("--height", `${side}px`);
      this.root.append(box);
    }
  }

  /** @param {Hit[]} hits */
  append(hits) {
    if (!this.tiles.length) this.root.replaceChildren();
    for (const hit of hits) {
      const tile = this.#make(hit, this.tiles.length);
      this.tiles.push(tile);
      this.root.append(tile.root);
      this.near.observe(tile.root);
    }
    this.#layOut();
  }

  /**
   * Says on each tile how it differs from the other side.
   * @param {Map<string, {text: string, kind: string}>} marks by item id
   */
  mark(marks) {
    for (const { hit, mark } of this.tiles) {
      const { text, kind } = marks.get(hit.item_id) ?? { text: "", kind: "" };
      mark.textContent = text;
      mark.hidden = !text;
      mark.dataset.kind = kind;
    }
  }

  /** @param {number} index @returns {boolean} whether there is such a tile */
  focus(index) {
    const tile = this.tiles[index];
    if (!tile) return false;
    this.#setCurrent(index);
    tile.link.focus();
    tile.root.scrollIntoView({ block: "nearest" });
    return true;
  }

  /** @param {Hit} hit @param {number} index @returns {Tile} */
  #make(hit, index) {
    const name = hit.caption || baseName(hit.item_id);
    const image = h("img", { alt: "", decoding: "async" });
    const mark = h("span", { class: "mark", hidden: true });
    const first = hit.probability === null ? hit.score?.toFixed(2) : `${Math.round(hit.probability * 100)} %`;
    const score = first && hit.rerank_score !== null ? `${hit.rerank_score.toFixed(2)}, first ${first}` : first;
    const badges = [
      hit.since ? h("span", { class: "badge" }, `${hit.since} since`) : null,
      hit.start_s === null ? null : h("span", { class: "badge" }, icon("play"), clock(hit.start_s)),
      hit.segments.length ? h("span", { class: "badge" }, `+${hit.segments.length} moments`) : null,
      hit.duplicates.length ? h("span", { class: "badge" }, icon("stack"), `${hit.duplicates.length} alike`) : null,
    ];
    const link = h(
      "a",
      {
        class: "tile-link",
        href: write({ ...now(), item: hit.item_id, side: this.hooks.side, at: hit.segment }),
        tabIndex: index === this.current ? 0 : -1,
        onclick: (/** @type {MouseEvent} */ event) => {
          if (hasChosen() || event.shiftKey) {
            event.preventDefault();
            choose(hit.item_id, this.hooks.version(), event.shiftKey);
            return;
          }
          if (event.ctrlKey || event.metaKey) return;
          event.preventDefault();
          this.hooks.open(hit);
        },
        onfocus: () => this.#setCurrent(index),
      },
      h("span", { class: "frame" }, image, h("span", { class: "badges" }, mark, ...badges)),
      h(
        "span",
        { class: "caption" },
        h("span", { class: "words", title: hit.item_id }, name),
        score ? h("span", { class: "score", title: why(hit) }, score) : null,
      ),
    );
    const more = h(
      "button",
      {
        type: "button",
        class: "tile-more",
        tabIndex: -1,
        title: "More like this (m)",
        "aria-label": `More like ${name}`,
        onclick: () => this.hooks.more(hit),
      },
      icon("more"),
    );
    const select = h(
      "button",
      {
        type: "button",
        class: "tile-choose",
        tabIndex: -1,
        title: "Select (x)",
        "aria-label": `Select ${name}`,
        "aria-pressed": String(isChosen(hit.item_id)),
        onclick: (/** @type {MouseEvent} */ event) => choose(hit.item_id, this.hooks.version(), event.shiftKey),
      },
      icon("check"),
    );
    const root = h("li", { class: "tile" }, link, select, more);
    root.classList.toggle("chosen", isChosen(hit.item_id));
    return {
      hit,
      root,
      link,
      image,
      mark,
      ratio: shapes.get(shapeKey(hit)) ?? 0,
    };
  }

  /** Loads the images that come near the screen. @param {IntersectionObserverEntry[]} entries */
  #load(entries) {
    for (const entry of entries) {
      const tile = this.tiles.find((each) => each.root === entry.target);
      if (!entry.isIntersecting || !tile) continue;
      this.near.unobserve(tile.root);
      const { hit, image } = tile;
      if (hit.since === "changed") {
        tile.ratio ||= 1; // its file shows something else now
        image.replaceWith(h("span", { class: "broken" }, icon("broken"), "changed since"));
        tile.root.classList.add("loaded");
        this.#layOutSoon();
        continue;
      }
      const settle = (ratio) => {
        if (!tile.ratio) this.#layOutSoon();
        tile.ratio ||= ratio;
      };
      const late = setTimeout(() => settle(1), SHAPE_WAIT_MS);
      image.addEventListener("load", () => {
        clearTimeout(late);
        const ratio = image.naturalWidth / image.naturalHeight || 1;
        shapes.set(shapeKey(hit), ratio);
        settle(ratio);
        tile.root.classList.add("loaded");
      });
      const url = (size) => imageUrl(hit.item_id, hit.segment, size, this.hooks.version());
      const ask = () => {
        image.sizes = `${Math.round(targetHeight(this.root.clientWidth))}px`;
        image.srcset = SIZES.map((size) => `${url(size)} ${size}w`).join(", ");
        image.src = url(320);
      };
      const giveUp = () => {
        clearTimeout(late);
        settle(1);
        image.replaceWith(h("span", { class: "broken" }, icon("broken"), "no image"));
        tile.root.classList.add("loaded");
      };
      const retry = () => {
        image.addEventListener("error", giveUp, { once: true });
        setTimeout(ask, RETRY_MS);
      };
      image.addEventListener("error", retry, { once: true });
      ask();
    }
  }

  #layOutSoon() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.#layOut());
  }

  /** Places the tiles; a row shows its images once its shape and all shapes above are known. */
  #layOut() {
    const width = this.root.clientWidth;
    if (!width || !this.tiles.length) return;
    const boxes = justify(
      this.tiles.map((tile) => tile.ratio),
      width,
      targetHeight(width),
    );
    const unknown = this.tiles.findIndex((tile) => !tile.ratio);
    const settledRows = unknown < 0 ? Infinity : boxes[unknown].row;
    this.tiles.forEach(({ root }, index) => {
      root.style.width = `${boxes[index].width}px`;
      root.style.setProperty("--height", `${boxes[index].height}px`);
      root.classList.toggle("settled", boxes[index].row < settledRows);
    });
    this.root.style.gap = `${GAP}px`;
  }

  /** @param {number} index */
  #setCurrent(index) {
    if (this.tiles[this.current]) this.tiles[this.current].link.tabIndex = -1;
    this.tiles[index].link.tabIndex = 0;
    this.current = index;
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.tiles.length) return;
    const last = this.tiles.length - 1;
    /** @type {Record<string, () => number>} */
    const targets = {
      ArrowRight: () => Math.min(last, this.current + 1),
      ArrowLeft: () => Math.max(0, this.current - 1),
      ArrowDown: () => this.#beside(1),
      ArrowUp: () => this.#beside(-1),
      Home: () => 0,
      End: () => last,
    };
    if (event.key === "m") this.hooks.more(this.tiles[this.current].hit);
    else if (event.key === "x") choose(this.tiles[this.current].hit.item_id, this.hooks.version());
    else if (event.key in targets) this.focus(targets[event.key]());
    else return;
    event.preventDefault();
  }

  #showChosen() {
    for (const { hit, root } of this.tiles) {
      const is = isChosen(hit.item_id);
      root.classList.toggle("chosen", is);
      root.querySelector(".tile-choose").setAttribute("aria-pressed", String(is));
    }
  }

  /** Tile of the row below or above that stands nearest. @param {1|-1} direction */
  #beside(direction) {
    const here = this.tiles[this.current].root.getBoundingClientRect();
    const middle = here.left + here.width / 2;
    let [best, distance] = [this.current, Infinity];
    for (let index = this.current + direction, row = NaN; this.tiles[index]; index += direction) {
      const box = this.tiles[index].root.getBoundingClientRect();
      if (Math.abs(box.top - here.top) < 2) continue;
      if (Number.isNaN(row)) row = box.top;
      if (Math.abs(box.top - row) > 2) break;
      const away = Math.abs(box.left + box.width / 2 - middle);
      if (away < distance) [best, distance] = [index, away];
    }
    return best;
  }
}

/** Says why a search found a hit. @param {Hit} hit */
export function why({ rerank_score: second, ...hit }) {
  const first = whyFound(hit);
  return first && second !== null ? `Scored ${second.toFixed(3)} by the re-ranker. ${first}` : first;
}

/** @param {Omit<Hit, "rerank_score">} hit */
function whyFound({ score, rank_score: fused, words_rank: words, vector_rank: vector }) {
  if (score === null) return "";
  const cosine = `a likeness of ${score.toFixed(3)}`;
  if (fused === null) return `Found by what it shows, with ${cosine}`;
  const byWords = words ? `${ordinal(words)} by the words of its caption` : "its caption has none of the words";
  const byLooks = vector ? `${ordinal(vector)} by what it shows` : "not among the first by what it shows";
  return `${byWords}; ${byLooks}, with ${cosine}`;
}

/** @param {number} rank */
function ordinal(rank) {
  const ending = { one: "st", two: "nd", few: "rd" }[new Intl.PluralRules("en", { type: "ordinal" }).select(rank)];
  return `${rank}${ending ?? "th"}`;
}

/** @param {Hit} hit */
function shapeKey({ item_id: id, segment }) {
  return `${segment}/${id}`;
}
