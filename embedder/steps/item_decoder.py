"""Decoding of one item to its rows: an image, the segments of a video, a caption, a pair; or the problem."""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from embedder.batch_schema import DECODED, IMAGE_GRID
from embedder.config import WebConfig
from embedder.media.errors import STILL_IMAGE, DecodeError
from embedder.media.limits import DecodeLimits
from embedder.media.patches import pixel_columns
from embedder.media.resize import ResizeSpec
from embedder.media.sandbox import SandboxedDecoder
from embedder.steps.captions import CaptionEncoder

NO_TOWER = "NoTower"  # error type of an item that holds only what the model has no tower for

Values = dict[str, Any]
"""Values of one row by column; columns that are left out are null."""


@dataclass(frozen=True)
class DecodeSpec:
    """Configuration of a decode task; plain values, so that equal specs share one decoder in a process.

    `caption_end_id` is the text tower's `end_id`. Without `resize` (a model without a vision tower) no image is
    decoded, without `tokenizer_json` (a model without a text tower) no caption becomes token ids. `web` limits what is
    fetched from addresses of the web. `animations` says whether animated images are `clip`s.
    """

    resize: ResizeSpec | None
    limits: DecodeLimits
    tokenizer_json: str | None
    max_caption_tokens: int
    segment_s: float
    frames_per_segment: int
    rows_per_batch: int
    caption_end_id: int | None = None
    web: WebConfig = field(default_factory=WebConfig)
    animations: str = "first_frame"

    @property
    def columns(self) -> list[pa.Field]:
        """Columns that decoding adds to a listing, but for the trace."""
        has_grids = self.resize is not None and self.resize.mode == "patches"
        return [column for column in DECODED if column.name != "trace"] + ([IMAGE_GRID] if has_grids else [])


@dataclass(frozen=True)
class ItemProblem:
    """Reason why an item, or one side of it, could not be embedded."""

    step: str
    error_type: str
    error: str
    transient: bool = False


@dataclass(frozen=True)
class ItemContent:
    """Content of an item: an image or video, a caption, or both; and a problem found while reading it.

    Of kind `animation` is an image that may be animated, and is then embedded as a video.
    """

    kind: str | None = None
    media: bytes | Path | None = None
    caption: str | None = None
    problem: ItemProblem | None = None


class ItemDecoder:
    """Decoder of items: pixels from the sandbox, token ids from the tokeniser."""

    def __init__(self, spec: DecodeSpec) -> None:
        self.spec = spec
        self.sandbox = SandboxedDecoder(spec.limits)
        self.captions = (
            CaptionEncoder(spec.tokenizer_json, spec.max_caption_tokens, spec.caption_end_id)
            if spec.tokenizer_json is not None
            else None
        )

    def cpu_s(self) -> float:
        """CPU seconds of this thread and of the sandbox process."""
        return time.thread_time() + self.sandbox.child_cpu_s()

    def rows(self, content: ItemContent) -> Iterator[Values]:
        """Item's rows in order; the last one has `num_vectors` and the problem, if any."""
        if content.kind in ("video", "animation") and content.media is not None and self.spec.resize is not None:
            return self._video_rows(content, content.media, self.spec.resize)
        return iter([self._image_row(content)])

    def _image_row(self, content: ItemContent) -> Values:
        row = self._caption_values(content.caption)
        problem = content.problem
        if content.kind == "image" and content.media is not None and self.spec.resize is not None:
            try:
                row |= pixel_columns(self.sandbox.image(content.media, self.spec.resize)[None], self.spec.resize)
            except DecodeError as error:
                problem = _decode_problem(error)
        modality = _modality(content)
        has_vector = "pixels" in row or "token_ids" in row
        if has_vector:
            row |= {"segment": 0, "modality": modality}
        elif problem is None:
            problem = self._nothing_to_embed(content)
        return row | {"num_vectors": int(has_vector)} | _problem_values(problem)

    def _nothing_to_embed(self, content: ItemContent) -> ItemProblem:
        """Reason for an item that gives no vector, though nothing about it is broken."""
        if content.caption:
            return ItemProblem("read", NO_TOWER, "a caption without an image, and the model has no text tower")
        if content.media is not None:
            return ItemProblem("read", NO_TOWER, f"{content.kind} without a caption, and the model has no vision tower")
        return ItemProblem("read", "Empty", "the item has neither an image nor a caption")

    def _video_rows(self, content: ItemContent, media: bytes | Path, resize: ResizeSpec) -> Iterator[Values]:
        """One row per segment; the first has the caption's tokens."""
        caption = self._caption_values(content.caption)
        num_vectors, last_row, problem = 0, None, content.problem
        try:
            for segment in self.sandbox.video(
                media,
                resize,
                segment_s=self.spec.segment_s,
                frames_per_segment=self.spec.frames_per_segment,
            ):
                if last_row is not None:
                    yield last_row
                last_row = caption if num_vectors == 0 else {"caption": content.caption}
                last_row = last_row | vars(segment) | pixel_columns(segment.pixels, resize) | {"modality": "video"}
                num_vectors += 1
        except DecodeError as error:
            if content.kind == "animation" and error.error_type == STILL_IMAGE:
                yield self._image_row(replace(content, kind="image"))
                return
            problem = _decode_problem(error)
        if last_row is None and "token_ids" in caption:
            last_row, num_vectors = caption | {"segment": 0, "modality": "video"}, 1
        yield (last_row or {}) | {"num_vectors": num_vectors} | _problem_values(problem)

    def _caption_values(self, caption: str | None) -> Values:
        if not caption:
            return {}
        if self.captions is None:
            return {"caption": caption}
        return {"caption": caption, "token_ids": self.captions.encode(caption)}


def _modality(content: ItemContent) -> str:
    if content.kind == "image":
        return "pair" if content.caption else "image"
    return "video" if content.kind in ("video", "animation") else "text"


def _decode_problem(error: DecodeError) -> ItemProblem:
    return ItemProblem("decode", error.error_type, error.message, error.transient)


def _problem_values(problem: ItemProblem | None) -> Values:
    return asdict(problem) if problem else {}
