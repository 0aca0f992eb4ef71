/**
 * The server's HTTP interface. A call waits while the server restarts, is repeated where it is asked to come later,
 * and asks for the token once.
 *
 * @typedef {{start_s: number, end_s: number, score: number, segment?: number}} Moment
 * @typedef {Object} Hit
 * @property {string} item_id
 * @property {number} segment
 * @property {number|null} score
 * @property {number|null} rank_score
 * @property {number|null} probability
 * @property {string} modality
 * @property {string|null} uri
 * @property {string|null} caption
 * @property {number|null} start_s
 * @property {number|null} end_s
 * @property {Moment[]} segments
 * @property {{item_id: string, score: number}[]} duplicates
 * @property {Record<string, any>} carryover
 * @property {number|null} words_rank
 * @property {number|null} vector_rank
 * @property {number|null} rerank_score
 * @property {"changed"|"removed"|null} since what became of it since an earlier publication
 * @typedef {{version: string, publication: string, model: string, took_ms: number,
 *   answers: {hits: Hit[], cursor: string|null, note: string, warnings: string[]}[]}} Answer
 * @typedef {{name: string, type: "text"|"number"|"time"|"boolean", num_null: number,
 *   values: {value: any, count: number}[]|null, min: any, max: any}} Facet
 */

import { find, keep, recall } from "./dom.js";
import { hideBanner, showBanner } from "./notices.js";

const ROOT = new URL(".", document.baseURI);
const MAX_REPEATS = 3;
const MAX_WAIT_S = 15;

/** An answer of the server that is none: what was wrong, and what helps. */
export class ApiError extends Error {
  /**
   * @param {number} status
   * @param {{where?: string, what: string, rule?: string, cure?: string}} problem
   */
  constructor(status, problem) {
    super(problem.what);
    this.status = status;
    this.problem = problem;
  }
}

/** @type {Promise<void>|null} */
let waiting = null;
/** @type {Promise<void>|null} */
let asking = null;

/**
 * Searches.
 * @param {Record<string, any>} request body of POST /search
 * @param {Blob|null} [image] the part that a query names `image`
 * @param {AbortSignal} [signal]
 * @returns {Promise<Answer>}
 */
export function search(request, image, signal) {
  const text = JSON.stringify(request);
  if (!image) return call("search", { method: "POST", body: text, signal }, "application/json");
  const form = new FormData();
  form.append("request", new Blob([text], { type: "application/json" }));
  form.append("image", image, "image");
  return call("search", { method: "POST", body: form, signal });
}

/** @param {string|null} [where] @returns {Promise<{version: string, num_rows: number, columns: Facet[]}>} */
export function facets(where) {
  return call(`facets${where ? `?where=${encodeURIComponent(where)}` : ""}`);
}

/**
 * Lists items in an order, without a search.
 * @param {{where?: string|null, sort?: string, seed?: number, start?: number, k?: number, version?: string}} asked
 * @param {AbortSignal} [signal]
 * @returns {Promise<{version: string, num_items: number, items: Hit[], next: number|null}>}
 */
export function items(asked, signal) {
  return call(`items?${parameters(asked)}`, { signal });
}

/** @param {{k?: number}} asked */
export function rejects(asked) {
  return call(`rejects?${parameters(asked)}`);
}

/** @param {{fold: number, where?: string|null}} asked @param {AbortSignal} [signal] */
export function duplicates(asked, signal) {
  return call(`duplicates?${parameters(asked)}`, { signal });
}

/**
 * Has the server write items as a file.
 * @param {string[]} ids
 * @param {string} format
 * @param {string} version
 * @returns {Promise<{content: Blob, name: string}>}
 */
export async function exported(ids, format, version) {
  const body = JSON.stringify({ items: ids, format, version: version || null });
  const response = await call("export", { method: "POST", body }, "application/json", true);
  const name = /filename="(.+)"/.exec(response.headers.get("Content-Disposition") ?? "")?.[1] ?? "items";
  return { content: await response.blob(), name };
}

/** @param {Record<string, any>} asked what is null or empty is left out */
function parameters(asked) {
  const given = Object.entries(asked).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return new URLSearchParams(given.map(([name, value]) => [name, String(value)]));
}

/** @returns {Promise<Record<string, any>>} */
export function status() {
  return call("status");
}

/** @returns {Promise<Record<string, any>[]>} */
export async function versions() {
  const answer = await call("versions");
  return Array.isArray(answer) ? answer : answer.versions;
}

/**
 * Reads an item.
 * @param {string} id
 * @param {{segment: number, version: string}} of
 * @param {AbortSignal} [signal]
 */
export function item(id, { segment, version }, signal) {
  const params = new URLSearchParams({ segment: String(segment), neighbours: "12" });
  if (version) params.set("version", version);
  return call(`items/${encodeURIComponent(id)}?${params}`, { signal });
}

/**
 * Address of an item's image, or of a video's frame in the middle of a segment.
 * @param {string} id
 * @param {number} segment
 * @param {number} size
 * @param {string} [version]
 */
export function imageUrl(id, segment, size, version) {
  const params = new URLSearchParams({ size: String(size) });
  if (segment) params.set("segment", String(segment));
  if (version) params.set("version", version);
  return new URL(`items/${encodeURIComponent(id)}/image?${params}`, ROOT).href;
}

/**
 * Address of a video's bytes.
 * @param {string} id
 * @param {number} segment
 * @param {string} [version]
 */
export function clipUrl(id, segment, version) {
  const params = new URLSearchParams({ segment: String(segment) });
  if (version) params.set("version", version);
  return new URL(`items/${encodeURIComponent(id)}/clip?${params}`, ROOT).href;
}

/**
 * Address of an item's own file.
 * @param {string} id
 * @param {{download?: boolean, version?: string}} [how]
 */
export function fileUrl(id, { download = false, version = "" } = {}) {
  const params = parameters({ download: download || null, version });
  return new URL(`items/${encodeURIComponent(id)}/file${params.size ? `?${params}` : ""}`, ROOT).href;
}

/** Takes the kept token to the server again, so that images have their cookie. */
export async function resumeSession() {
  if (recall(sessionStorage, "token")) await call("session", { method: "POST" });
}

/**
 * @param {string} path
 * @param {RequestInit} [init]
 * @param {string} [type] of the body
 * @param {boolean} [isFile] whether the answer is no JSON
 * @returns {Promise<any>}
 */
async function call(path, init = {}, type, isFile = false) {
  for (let repeats = 0; ; repeats += 1) {
    const response = await send(path, init, type);
    if (response === null) {
      await (waiting ??= whenBack());
    } else if (response.status === 401) {
      const { problem } = await asError(response);
      await (asking ??= askForToken(problem.cure ?? problem.what).finally(() => (asking = null)));
    } else if ((response.status === 503 || response.status === 429) && repeats < MAX_REPEATS) {
      await pause(Math.min(Number(response.headers.get("Retry-After")) || 1, MAX_WAIT_S));
    } else if (!response.ok) {
      throw await asError(response);
    } else {
      return isFile ? response : response.status === 204 ? null : response.json();
    }
    init.signal?.throwIfAborted();
  }
}

/** Sends a request; null where the server does not answer at all. */
async function send(path, init, type) {
  const headers = new Headers(type ? { "Content-Type": type } : {});
  const token = recall(sessionStorage, "token");
  if (token) headers.set("Authorization", `Bearer ${token}`);
  try {
    return await fetch(new URL(path, ROOT), { ...init, headers });
  } catch (error) {
    if (error instanceof TypeError) return null;
    throw error;
  }
}

/** @param {Response} response */
async function asError(response) {
  const body = await response.json().catch(() => null);
  const unexplained = { what: `The server answered ${response.status} ${response.statusText}` };
  return new ApiError(response.status, body?.error ?? unexplained);
}

/** Waits until the server answers again, under a quiet banner; one that can encode no text is never ready. */
async function whenBack() {
  showBanner("offline", "The server does not answer. Trying again…");
  for (let wait = 0.5; ; wait = Math.min(wait * 1.6, MAX_WAIT_S)) {
    await pause(wait);
    const response = await send("healthz", { cache: "no-store" });
    if (response?.ok) break;
  }
  hideBanner("offline");
  waiting = null;
}

/**
 * Asks for the token until the server takes one.
 * @param {string} why
 */
async function askForToken(why) {
  const dialog = find("#token");
  const [input, message] = [dialog.querySelector("input"), dialog.querySelector(".why")];
  message.textContent = why;
  for (;;) {
    input.value = "";
    dialog.showModal();
    await new Promise((done) => dialog.addEventListener("close", done, { once: true }));
    if (!input.value) continue;
    keep(sessionStorage, "token", input.value);
    const response = await send("session", { method: "POST" });
    if (response?.ok) return;
    keep(sessionStorage, "token", null);
    message.textContent = response ? (await asError(response)).problem.what : "The server does not answer.";
  }
}

/** @param {number} seconds */
function pause(seconds) {
  return new Promise((done) => setTimeout(done, seconds * 1000));
}
