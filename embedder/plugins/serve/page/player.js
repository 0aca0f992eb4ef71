/** A video at a moment, with a strip of its other moments. */

import { clipUrl, imageUrl } from "./api.js";
import { clock, h } from "./dom.js";

/** @typedef {{segment: number, start_s: number, end_s: number}} Segment */

/**
 * Makes the player.
 * @param {{id: string, segment: number, segments: Segment[], found: Map<number, number>, name: string,
 *   version: string}} of
 *   found: score by the start of a moment that the search found
 * @param {(segment: number) => void} onMoment
 */
export function player({ id, segment, segments, found, name, version }, onMoment) {
  const video = h("video", {
    controls: true,
    playsinline: true,
    muted: true,
    preload: "metadata",
    poster: imageUrl(id, segment, 640, version),
    "aria-label": name,
  });
  const source = h(
    "p",
    { class: "muted small", hidden: true },
    "This browser can't play the video; its moments are below.",
  );
  video.addEventListener("error", () => (source.hidden = false));
  const start = segments.find((each) => each.segment === segment)?.start_s ?? 0;
  video.addEventListener("loadedmetadata", () => (video.currentTime = start), { once: true });
  video.src = clipUrl(id, segment, version);

  const buttons = segments.map((each) => {
    const score = found.get(each.start_s);
    const label = `Moment at ${clock(each.start_s)}${score === undefined ? "" : `, found with ${score.toFixed(2)}`}`;
    const jump = () => {
      video.currentTime = each.start_s;
      video.play().catch(() => {}); // it may not play: the strip's image stays
      for (const button of buttons) button.removeAttribute("aria-current");
      buttonOf(each.segment).setAttribute("aria-current", "true");
      onMoment(each.segment);
    };
    return h(
      "button",
      {
        type: "button",
        class: score === undefined ? "moment" : "moment found",
        "aria-label": label,
        "aria-current": each.segment === segment ? "true" : null,
        onclick: jump,
      },
      h("img", { src: imageUrl(id, each.segment, 160, version), alt: "", loading: "lazy" }),
      h("span", {}, clock(each.start_s)),
    );
  });
  const buttonOf = (number) => buttons[segments.findIndex((each) => each.segment === number)];
  const strip = h("div", { class: "strip", role: "group", "aria-label": "Moments of this video" }, ...buttons);
  return h("div", { class: "player" }, video, source, strip);
}
