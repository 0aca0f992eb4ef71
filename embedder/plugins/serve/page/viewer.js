/** The original on the whole screen: fitted, or larger and moved about. */

import { fileUrl, imageUrl } from "./api.js";
import { find } from "./dom.js";

const STEP = 1.5;
const MOST = 16;

const dialog = find("#viewer");
const stage = find("#viewer-stage");
const image = find("#viewer-image");
let scale = 1;

/**
 * Opens the viewer.
 * @param {string} id
 * @param {string} name
 * @param {string} version
 */
export function view(id, name, version) {
  image.alt = name;
  image.onerror = () => {
    image.onerror = null;
    image.src = imageUrl(id, 0, 1280, version); // what the browser can't read, the server has made
  };
  image.src = fileUrl(id, { version });
  dialog.showModal();
  zoom(1);
}

/** @param {number} to 1 fits the screen @param {{x: number, y: number}} [at] place of the stage that stays */
function zoom(to, at = { x: stage.clientWidth / 2, y: stage.clientHeight / 2 }) {
  const before = scale;
  scale = Math.min(MOST, Math.max(1, to));
  const [x, y] = [stage.scrollLeft + at.x, stage.scrollTop + at.y];
  image.style.width = image.style.height = `${100 * scale}%`;
  stage.scrollLeft = (x * scale) / before - at.x;
  stage.scrollTop = (y * scale) / before - at.y;
  find("#viewer-scale").textContent = scale === 1 ? "fitted" : `${scale.toFixed(1)} ×`;
}

export function startViewer() {
  find("#viewer-in").addEventListener("click", () => zoom(scale * STEP));
  find("#viewer-out").addEventListener("click", () => zoom(scale / STEP));
  find("#viewer-full").addEventListener("click", fill);
  find("#viewer-close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => {
    image.removeAttribute("src");
    if (document.fullscreenElement) document.exitFullscreen();
  });
  stage.addEventListener("dblclick", (event) => zoom(scale > 1 ? 1 : 3, { x: event.offsetX, y: event.offsetY }));
  stage.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      zoom(scale * (event.deltaY < 0 ? STEP : 1 / STEP));
    },
    { passive: false },
  );
  stage.addEventListener("pointermove", (event) => {
    if (!(event.buttons & 1) || event.pointerType === "touch") return;
    stage.scrollBy(-event.movementX, -event.movementY);
  });
  dialog.addEventListener("keydown", (event) => {
    const actions = {
      "+": () => zoom(scale * STEP),
      "=": () => zoom(scale * STEP),
      "-": () => zoom(scale / STEP),
      0: () => zoom(1),
      f: fill,
    };
    if (event.ctrlKey || event.metaKey || !(event.key in actions)) return;
    event.preventDefault();
    event.stopPropagation();
    actions[event.key]();
  });
}

function fill() {
  if (document.fullscreenElement) document.exitFullscreen();
  else find("#viewer-frame").requestFullscreen?.();
}
