/** Words to the reader: a quiet banner, what a screen reader says, and errors shown kindly. */

import { find, h, icon } from "./dom.js";
import { now } from "./state.js";

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
 * Has a screen reader say something.
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
 * Says what was wrong in a sentence, and what helps, as the command line does: without what the page made of it.
 * @param {import("./api.js").ApiError} error
 * @returns {{what: string, cure: string}}
 */
export function explain({ status, problem: { where = "", what, rule = "", cure = "" } }) {
  if (status === 404 && where === "item") {
    const gone = "This picture is no longer in the archive, or never was.";
    return { what: gone, cure: "It may have been renamed or deleted: search for its name, or for what it shows." };
  }
  if (where === "version") {
    return { what: "This publication is not there any more.", cure: "Its files were cleaned up, or it never was." };
  }
  if (where === "body.model") return { what: sentence(what), cure: "Choose another model above." };
  if (what.includes('at or near ")"') && !now().where.includes(")")) {
    return { what: "The condition is not complete.", cure: sentence(cure) };
  }
  const [first, ...rest] = what.replace(/^where ('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"): /s, "").split("; ");
  const field = where.split(".").at(-1);
  const isBare = first.startsWith("found ") && field && !rest.length;
  return {
    what: sentence(isBare ? `${field?.replaceAll("_", " ")}: ${first}, but it has to be ${rule}` : first),
    // The filters list the columns, and without their types.
    cure: [...rest, cure].map((each) => sentence(each.replace(/\s*Columns are .*$/s, ""))).filter(Boolean).join(" "),
  };
}

/** Writes a clause as a sentence. @param {string} text */
export function sentence(text) {
  const whole = text.trim();
  return whole && `${whole[0].toUpperCase()}${whole.slice(1)}${/[.?!…]$/.test(whole) ? "" : "."}`;
}

/**
 * Makes the card of an error that the server explained.
 * @param {import("./api.js").ApiError} error
 * @param {{label: string, run: () => void}|null} [action] what may be done about it
 */
export function errorCard(error, action) {
  const { what, cure } = explain(error);
  return h(
    "div",
    { class: "message", role: "alert" },
    icon("alert"),
    h("h2", {}, what),
    cure && h("p", {}, cure),
    action && h("button", { type: "button", class: "button", onclick: action.run }, action.label),
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
