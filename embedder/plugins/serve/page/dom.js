/** Making of elements. Data only ever becomes text: nothing here parses markup. */

const SVG = "http://www.w3.org/2000/svg";
const PROPERTIES = new Set(["checked", "value", "disabled", "hidden", "indeterminate", "tabIndex"]);
export const DAY = /^\d{4}-\d\d-\d\d$/;

/**
 * Makes an element.
 * @param {string} tag
 * @param {Record<string, any>} [attributes] `on...` are listeners; null and false are left out
 * @param {...(Node|string|number|null|undefined)} children numbers and strings become text
 * @returns {any}
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (PROPERTIES.has(name)) element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) if (child !== null && child !== undefined) element.append(child);
  return element;
}

/**
 * Makes an icon of the sprite in index.html.
 * @param {string} name
 * @returns {SVGElement}
 */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#i-${name}`);
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  svg.append(use);
  return svg;
}

/**
 * Finds an element that index.html has.
 * @param {string} selector
 * @returns {any}
 */
export function find(selector) {
  const found = document.querySelector(selector);
  if (!found) throw new Error(`index.html has no ${selector}`);
  return found;
}

/**
 * Reads a value that the browser keeps; null where storage is switched off or the value is damaged.
 * @param {Storage} storage
 * @param {string} name
 */
export function recall(storage, name) {
  try {
    return JSON.parse(storage.getItem(`embedder.${name}`) ?? "null");
  } catch {
    return null;
  }
}

/**
 * Keeps a value in the browser, or says that it could not be kept.
 * @param {Storage} storage
 * @param {string} name
 * @param {any} value null forgets it
 * @returns {boolean}
 */
export function keep(storage, name, value) {
  try {
    if (value === null) storage.removeItem(`embedder.${name}`);
    else storage.setItem(`embedder.${name}`, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

/**
 * Makes a small image that says in words where it can't be shown.
 * @param {Record<string, any>} attributes
 */
export function thumbnail(attributes) {
  const image = h("img", { loading: "lazy", ...attributes });
  image.addEventListener("error", () => {
    const label = attributes.alt ? `no image of ${attributes.alt}` : "";
    image.replaceWith(
      h("span", { class: "broken", title: label }, icon("broken"), h("span", { class: "hidden-text" }, label)),
    );
  });
  return image;
}

/** @param {number} count @param {string} noun @param {string} [several] */
export function plural(count, noun, several = `${noun}s`) {
  return `${count.toLocaleString("en")} ${count === 1 ? noun : several}`;
}

/**
 * Writes seconds as a clock shows them.
 * @param {number} seconds
 */
export function clock(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const tail = `${String(rest).padStart(2, "0")}`;
  return hours ? `${hours}:${String(minutes).padStart(2, "0")}:${tail}` : `${minutes}:${tail}`;
}

/**
 * Writes a time as the reader's country does.
 * @param {string} time ISO 8601; one with a zone is written in the reader's
 */
export function date(time) {
  const isDay = DAY.test(time); // of no zone, where the language takes it for midnight in UTC
  const parsed = new Date(isDay ? `${time}T00:00` : time);
  /** @type {Intl.DateTimeFormatOptions} */
  const style = isDay ? { dateStyle: "medium" } : { dateStyle: "medium", timeStyle: "short" };
  return Number.isNaN(parsed.getTime()) ? time : parsed.toLocaleString(undefined, style);
}

/** Writes a size as people do. @param {number} bytes */
export function size(bytes) {
  const unit = Math.min(4, Math.floor(Math.log10(Math.max(1, bytes)) / 3));
  const shown = (bytes / 1000 ** unit).toLocaleString("en", { maximumFractionDigits: unit ? 1 : 0 });
  return `${shown} ${["B", "kB", "MB", "GB", "TB"][unit]}`;
}

/** Name of a file, the last part of its path. @param {string} path */
export function baseName(path) {
  return path.slice(path.lastIndexOf("/") + 1) || path;
}
