"""One item -> its rows: a picture, the segments of a video, a caption, a pair; or what was wrong with it."""

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
    """All that a decode task needs to know; plain values, so that equal specs share one decoder in a process."""

    fit: ResizeSpec
    limits: DecodeLimits
    tokenizer_json: str
    max_caption_tokens: int
    segment_s: float
    frames_per_segment: int
    rows_per_batch: int


@dataclass(frozen=True)
class ItemProblem:
    """Why an item, or one side of it, could not be embedded."""

    step: str
    error_type: str
    error: str
    transient: bool = False


@dataclass(frozen=True)
class ItemContent:
    """What an item holds: a picture or video, a caption, or both; and a problem found while reading it."""

    kind: str | None = None
    media: bytes | Path | None = None
    caption: str | None = None
    problem: ItemProblem | None = None


class ItemDecoder:
    """Pixels through the decoding door, token ids through the tokeniser."""

    def __init__(self, spec: DecodeSpec) -> None:
        self.spec = spec
        self.door = SandboxedDecoder(spec.limits)
        self.captions = CaptionEncoder(spec.tokenizer_json, spec.max_caption_tokens)

    def cpu_s(self) -> float:
        """CPU seconds of this thread and of the decoding child."""
        return time.thread_time() + self.door.child_cpu_s()

    def rows(self, content: ItemContent) -> Iterator[Values]:
        """The item's rows in order; the last one bears `num_vectors` and, where there was one, the problem."""
        if content.kind == "video" and content.media is not None:
            return self._video_rows(content, content.media)
        return iter([self._picture_row(content)])

    def _picture_row(self, content: ItemContent) -> Values:
        row = self._caption_values(content.caption)
        problem = content.problem
        if content.kind == "image" and content.media is not None:
            try:
                row["pixels"] = self.door.picture(content.media, self.spec.fit)
            except DecodeError as error:
                problem = _decode_problem(error)
        modality = _modality(content)
        has_vector = "pixels" in row or "token_ids" in row
        if has_vector:
            row |= {"segment": 0, "modality": modality}
        elif problem is None:
            problem = ItemProblem("read", "Empty", "the item has neither a picture nor a caption")
        return row | {"num_vectors": int(has_vector)} | _problem_values(problem)

    def _video_rows(self, content: ItemContent, media: bytes | Path) -> Iterator[Values]:
        """One row a segment; the caption's tokens stand in the first."""
        caption = self._caption_values(content.caption)
        num_vectors, held, problem = 0, None, content.problem
        try:
            for segment in self._segments(media):
                if held is not None:
                    yield held
                held = (caption if num_vectors == 0 else {"caption": content.caption}) | segment
                num_vectors += 1
        except DecodeError as error:
            problem = _decode_problem(error)
        if held is None and "token_ids" in caption:
            held, num_vectors = caption | {"segment": 0, "modality": "video"}, 1
        yield (held or {}) | {"num_vectors": num_vectors} | _problem_values(problem)

    def _segments(self, media: bytes | Path) -> Iterator[Values]:
        for segment in self.door.video(
            media,
            self.spec.fit,
            segment_s=self.spec.segment_s,
            frames_per_segment=self.spec.frames_per_segment,
        ):
            yield {
                "segment": segment.segment,
                "modality": "video",
                "start_s": segment.start_s,
                "end_s": segment.end_s,
                "pixels": segment.pixels,
            }

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
