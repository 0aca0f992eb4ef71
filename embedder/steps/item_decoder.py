"""Decoding of one item to its rows: an image, the segments of a video, a caption, a pair; or the problem."""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from embedder.media.errors import DecodeError
from embedder.media.limits import DecodeLimits
from embedder.media.resize import ResizeSpec
from embedder.media.sandbox import SandboxedDecoder
from embedder.steps.captions import CaptionEncoder

Values = dict[str, Any]
"""Values of one row by column; columns that are left out are null."""


@dataclass(frozen=True)
class DecodeSpec:
    """Configuration of a decode task; plain values, so that equal specs share one decoder in a process."""

    resize: ResizeSpec
    limits: DecodeLimits
    tokenizer_json: str
    max_caption_tokens: int
    segment_s: float
    frames_per_segment: int
    rows_per_batch: int


@dataclass(frozen=True)
class ItemProblem:
    """Reason why an item, or one side of it, could not be embedded."""

    step: str
    error_type: str
    error: str
    transient: bool = False


@dataclass(frozen=True)
class ItemContent:
    """Content of an item: an image or video, a caption, or both; and a problem found while reading it."""

    kind: str | None = None
    media: bytes | Path | None = None
    caption: str | None = None
    problem: ItemProblem | None = None


class ItemDecoder:
    """Decoder of items: pixels from the sandbox, token ids from the tokeniser."""

    def __init__(self, spec: DecodeSpec) -> None:
        self.spec = spec
        self.sandbox = SandboxedDecoder(spec.limits)
        self.captions = CaptionEncoder(spec.tokenizer_json, spec.max_caption_tokens)

    def cpu_s(self) -> float:
        """CPU seconds of this thread and of the sandbox process."""
        return time.thread_time() + self.sandbox.child_cpu_s()

    def rows(self, content: ItemContent) -> Iterator[Values]:
        """Item's rows in order; the last one has `num_vectors` and the problem, if any."""
        if content.kind == "video" and content.media is not None:
            return self._video_rows(content, content.media)
        return iter([self._image_row(content)])

    def _image_row(self, content: ItemContent) -> Values:
        row = self._caption_values(content.caption)
        problem = content.problem
        if content.kind == "image" and content.media is not None:
            try:
                row["pixels"] = self.sandbox.image(content.media, self.spec.resize)
            except DecodeError as error:
                problem = _decode_problem(error)
        modality = _modality(content)
        has_vector = "pixels" in row or "token_ids" in row
        if has_vector:
            row |= {"segment": 0, "modality": modality}
        elif problem is None:
            problem = ItemProblem("read", "Empty", "the item has neither an image nor a caption")
        return row | {"num_vectors": int(has_vector)} | _problem_values(problem)

    def _video_rows(self, content: ItemContent, media: bytes | Path) -> Iterator[Values]:
        """One row per segment; the first has the caption's tokens."""
        caption = self._caption_values(content.caption)
        num_vectors, last_row, problem = 0, None, content.problem
        try:
            for segment in self.sandbox.video(
                media,
                self.spec.resize,
                segment_s=self.spec.segment_s,
                frames_per_segment=self.spec.frames_per_segment,
            ):
                if last_row is not None:
                    yield last_row
                last_row = caption if num_vectors == 0 else {"caption": content.caption}
                last_row = last_row | vars(segment) | {"modality": "video"}
                num_vectors += 1
        except DecodeError as error:
            problem = _decode_problem(error)
        if last_row is None and "token_ids" in caption:
            last_row, num_vectors = caption | {"segment": 0, "modality": "video"}, 1
        yield (last_row or {}) | {"num_vectors": num_vectors} | _problem_values(problem)

    def _caption_values(self, caption: str | None) -> Values:
        if not caption:
            return {}
        return {"caption": caption, "token_ids": self.captions.encode(caption)}


def _modality(content: ItemContent) -> str:
    if content.kind == "image":
        return "pair" if content.caption else "image"
    return "text"


def _decode_problem(error: DecodeError) -> ItemProblem:
    return ItemProblem("decode", error.error_type, error.message, error.transient)


def _problem_values(problem: ItemProblem | None) -> Values:
    return asdict(problem) if problem else {}
