/** Words to the reader: a quiet banner, what a screen reader is told, and errors shown kindly. */

import { find, h, icon } from "./dom.js";

/**
 * Shows a banner until it is taken away; one of each kind.
 * @param {string} kind
 * @param {string} text
 * @param {{label: string, run: () => void}} [action]
 */
export function showBanner(kind, text, action) {
  hideBanner(kind);
  const button = action && h("button", { type: "button", class: "link", onclick: action.run }, action.label);
  find("#banners").append(h("p", { class: "banner", "data-kind": kind }, icon("info"), h("span", {}, text), button));
}

/** @param {string} kind */
export function hideBanner(kind) {
  for (const banner of document.querySelectorAll(`.banner[data-kind="${kind}"]`)) banner.remove();
}

/**
 * Tells a screen reader.
 * @param {string} text
 */
export function announce(text) {
  find("#live").textContent = text;
}

/**
 * Shows a short message that goes by itself.
 * @param {string} text
 */
export function toast(text) {
  const message = h("p", { class: "toast", role: "status" }, text);
  (document.querySelector("dialog[open]") ?? document.body).append(message);
  setTimeout(() => message.remove(), 4000);
}

/**
 * Makes the card of an error that the server explained.
 * @param {import("./api.js").ApiError} error
 * @param {() => void} [retry]
 */
export function errorCard(error, retry) {
  const { where, what, rule, cure } = error.problem;
  return h(
    "div",
    { class: "message", role: "alert" },
    icon("alert"),
    h("h2", {}, "That did not work"),
    h("p", {}, what),
    rule && h("p", { class: "muted" }, `The rule: ${rule}`),
    cure && h("p", {}, `What helps: ${cure}`),
    where && h("p", { class: "muted small" }, `at ${where}`),
    retry && h("button", { type: "button", class: "button", onclick: retry }, "Try again"),
  );
}

/**
 * Makes the card of an empty answer.
 * @param {string} title
 * @param {string} text
 * @param {HTMLElement|null} [action]
 */
export function emptyCard(title, text, action) {
  return h("div", { class: "message" }, icon("empty"), h("h2", {}, title), h("p", {}, text), action);
}
