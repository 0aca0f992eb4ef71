/** One list of results: a search, its pages as one scrolls, and what stands there while, if none, or on an error. */

import { ApiError, items, search } from "./api.js";
import { h, plural } from "./dom.js";
import { Grid } from "./grid.js";
import { announce, emptyCard, errorCard, hideBanner, sentence, showBanner } from "./notices.js";

const PAGE = 40;
const SKELETON_AFTER_MS = 120; // a quicker answer is not announced by grey boxes
const REMEMBERED = 12; // lists that back and forward show at once
const GONE = 410;

/** @typedef {import("./api.js").Hit} Hit */
/** @typedef {{hits: Hit[], cursor: any, note: string, warnings: string[], version: string, model: string,
 *   total: number|null, scroll: number}} Page */

export class Results {
  /**
   * @param {HTMLElement} root
   * @param {{open: (hit: Hit) => void, more: (hit: Hit) => void, changed: () => void,
   *   empty: () => HTMLElement|null, cure: (error: ApiError) => {label: string, run: () => void}|null,
   *   side: string}} hooks
   */
  constructor(root, hooks) {
    this.hooks = hooks;
    this.list = h("ul", { class: "grid", "aria-label": "Results" });
    this.message = h("div", { class: "state" });
    this.end = h("div", { class: "end", "aria-hidden": "true" });
    root.replaceChildren(this.list, this.message, this.end);
    this.grid = new Grid(this.list, { ...hooks, version: () => this.askedVersion });
    /** @type {Map<string, Page>} */
    this.remembered = new Map();
    /** @type {Page|null} */
    this.page = null;
    this.key = "";
    this.askedVersion = "";
    this.stop = new AbortController();
    const whenNear = (entries) => entries.at(-1).isIntersecting && this.more();
    this.nearEnd = new IntersectionObserver(whenNear, { rootMargin: "600px" });
  }

  /** Forgets the lists that back and forward would show: another publication is served. */
  forget() {
    this.remembered.clear();
    this.key = "";
  }

  /**
   * Searches, or lists, and shows.
   * @param {string} key names the search
   * @param {Record<string, any>} request without cursor and version; without queries it is one for a list
   * @param {Blob|null} image
   * @param {string} version to ask; empty for the latest
   */
  async show(key, request, image, version) {
    if (key === this.key) return;
    if (this.page) this.page.scroll = scrollY;
    this.stop.abort();
    this.stop = new AbortController();
    Object.assign(this, { key, request, image, askedVersion: version });
    const remembered = this.remembered.get(key);
    if (remembered) {
      this.#fill(remembered);
      scrollTo(0, remembered.scroll);
      return;
    }
    this.list.setAttribute("aria-busy", "true");
    const slow = setTimeout(() => this.#wait(), this.grid.tiles.length ? SKELETON_AFTER_MS * 5 : SKELETON_AFTER_MS);
    try {
      const page = await this.#ask(null);
      performance.mark("embedder:answer");
      this.#remember(key, page);
      this.#fill(page);
      if (scrollY) scrollTo(0, 0);
      requestAnimationFrame(() => setTimeout(() => performance.mark("embedder:painted")));
    } catch (error) {
      if (!this.#isAborted(error)) this.#fail(error);
    } finally {
      clearTimeout(slow);
      if (key === this.key) this.list.removeAttribute("aria-busy");
    }
  }

  /** Loads the next page, if the end is near and there is one. */
  async more() {
    const { page, key } = this;
    if (!page?.cursor || this.loading) return;
    this.loading = true;
    try {
      const next = await this.#ask(page.cursor);
      if (key !== this.key) return;
      Object.assign(page, { cursor: next.cursor, hits: [...page.hits, ...next.hits] });
      this.grid.append(next.hits);
      announce(`${plural(page.hits.length, "result")} loaded`);
    } catch (error) {
      if (this.#isAborted(error)) return;
      page.cursor = null;
      if (!(error instanceof ApiError) || error.status !== GONE) this.message.replaceChildren(errorCard(asApi(error)));
    } finally {
      this.loading = false;
      if (key === this.key) this.hooks.changed();
      this.#watchEnd();
    }
  }

  /** Searches again what is shown. */
  again() {
    const { key, request, image, askedVersion } = this;
    this.remembered.delete(key);
    this.key = "";
    return this.show(key, request, image, askedVersion);
  }

  /** Shows nothing. */
  clear() {
    this.stop.abort();
    this.key = "";
    this.page = null;
    this.grid.clear();
    this.message.replaceChildren();
    this.#warn([]);
  }

  /** @param {string|null} cursor @returns {Promise<Page>} */
  async #ask(cursor) {
    const version = this.askedVersion || (cursor ? this.page?.version : null); // continues in the one that it began in
    const request = { k: PAGE, ...this.request, cursor, version };
    if (!request.queries) {
      const { cursor: start, ...asked } = request;
      const listed = await items({ ...asked, start }, this.stop.signal);
      const { items: hits, next, num_items: total, version: answered } = listed;
      return { hits, cursor: next, total, note: "", warnings: [], version: answered, model: "", scroll: 0 };
    }
    const { answers, publication, model } = await search(request, this.image, this.stop.signal);
    return { ...answers[0], version: publication, model, total: null, scroll: 0 };
  }

  /** @param {string} key @param {Page} page */
  #remember(key, page) {
    this.remembered.set(key, page);
    const [oldest] = this.remembered.keys();
    if (this.remembered.size > REMEMBERED) this.remembered.delete(oldest);
  }

  /** @param {Page} page */
  #fill(page) {
    this.page = page;
    this.grid.clear();
    this.message.replaceChildren();
    this.#warn(page.warnings);
    if (page.hits.length) this.grid.append(page.hits);
    else this.message.replaceChildren(emptyCard("Nothing found", reason(page.note), this.hooks.empty()));
    announce(
      page.hits.length ? `${plural(page.hits.length, "result")}${page.cursor ? ", more below" : ""}` : "Nothing found",
    );
    this.hooks.changed();
    this.#watchEnd();
  }

  /** Looks again whether the end is near: it may be, still. */
  #watchEnd() {
    this.nearEnd.unobserve(this.end);
    if (this.page?.cursor) this.nearEnd.observe(this.end);
  }

  /** @param {string[]} lines */
  #warn(lines) {
    const kind = `warning ${this.hooks.side}`;
    if (lines.length) showBanner(kind, lines.map(sentence).join(" "));
    else hideBanner(kind);
  }

  #wait() {
    this.page = null;
    this.#warn([]);
    this.message.replaceChildren();
    this.grid.showSkeleton();
    announce("Searching");
  }

  /** @param {unknown} error */
  #fail(error) {
    this.page = null;
    this.#warn([]);
    this.grid.clear();
    const problem = asApi(error);
    const again = { label: "Try again", run: () => this.again() };
    this.message.replaceChildren(errorCard(problem, this.hooks.cure(problem) ?? again));
    this.hooks.changed();
  }

  /** @param {unknown} error */
  #isAborted(error) {
    return error instanceof DOMException && error.name === "AbortError";
  }
}

/** @param {unknown} error @returns {ApiError} */
function asApi(error) {
  return error instanceof ApiError ? error : new ApiError(0, { what: String(error), cure: "reload the page" });
}

/** @param {string} note */
function reason(note) {
  const isOfCondition = !note || note.includes("fulfils the condition"); // which the page has made
  return isOfCondition ? "Nothing in this archive fits. Try other words or fewer filters." : sentence(note);
}
