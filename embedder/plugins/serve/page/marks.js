/** Marks on a picture, where the words of the query stand in it; of models that give `words`, `lines` and `boxes`. */

import { h } from "./dom.js";

const OF_WORDS = ["lines", "boxes", "scores"];

/** Names of the columns that only marks are made of. @param {Record<string, any>} row @returns {string[]} */
export function marking(row) {
  return readers(row).flatMap((model) => OF_WORDS.map((column) => `${model}.${column}`));
}

/** Models that read words in the picture. @param {Record<string, any>} row @returns {string[]} */
function readers(row) {
  const models = Object.keys(row).filter((name) => name.endsWith(".words")).map((name) => name.slice(0, -6));
  return models.filter((model) => Array.isArray(row[`${model}.boxes`]) && Array.isArray(row[`${model}.lines`]));
}

/**
 * Puts marks on an image; returns what holds both.
 * @param {HTMLImageElement} image
 * @param {Record<string, any>} row
 * @param {string} query
 * @returns {HTMLElement}
 */
export function markWords(image, row, query) {
  const words = query.toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? [];
  const has = (line) => words.some((word) => line.toLowerCase().split(/[^\p{L}\p{N}]+/u).includes(word) || isDense(word, line));
  const found = readers(row).flatMap((model) =>
    row[`${model}.lines`].flatMap((line, number) => (has(line) ? [[line, row[`${model}.boxes`][number]]] : [])),
  );
  if (!found.length) return image;
  const layer = h("div", { class: "word-marks" }, ...found.map(([line, box]) => mark(line, box)));
  const place = () => fit(layer, image);
  image.addEventListener("load", place);
  new ResizeObserver(place).observe(image);
  return h("div", { class: "with-marks" }, image, layer);
}

/** Whether a script without spaces has the word within. @param {string} word @param {string} line */
function isDense(word, line) {
  return /[\p{sc=Han}\p{sc=Hiragana}\p{sc=Katakana}\p{sc=Thai}]/u.test(word) && line.includes(word);
}

/** @param {string} line @param {number[]} box left, top, right and bottom as parts of the sides */
function mark(line, [left, top, right, bottom]) {
  const element = h("div", { class: "word-mark", title: line });
  const [width, height] = [right - left, bottom - top];
  Object.entries({ left, top, width, height }).forEach(([side, part]) => (element.style[side] = `${100 * part}%`));
  return element;
}

/** Lays the marks over the part of its box that the image fills. @param {HTMLElement} layer @param {HTMLImageElement} image */
function fit(layer, image) {
  if (!image.naturalWidth) return;
  const scale = Math.min(image.clientWidth / image.naturalWidth, image.clientHeight / image.naturalHeight);
  const [width, height] = [image.naturalWidth * scale, image.naturalHeight * scale];
  layer.style.width = `${width}px`;
  layer.style.height = `${height}px`;
  layer.style.left = `${image.offsetLeft + (image.clientWidth - width) / 2}px`;
  layer.style.top = `${image.offsetTop + (image.clientHeight - height) / 2}px`;
}
