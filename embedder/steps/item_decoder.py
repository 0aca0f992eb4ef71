"""Decodes one item to its rows: an image, the segments of a video, a caption, a pair; or the problem."""

import struct
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from embedder.batch_schema import DECODED, IMAGE_GRID, IMAGE_TEXT, NEEDED, model_column
from embedder.config_toml.run_sections import WebConfig
from embedder.media.limits import DecodeLimits
from embedder.media.media_errors import STILL_IMAGE, TRUNCATED_IMAGE, DecodeError
from embedder.media.resize import Colour, ResizeSpec
from embedder.media.sandbox import DecodedImage, SandboxedDecoder
from embedder.sources.captions import SIDECAR_ALONE
from embedder.steps.caption_encoder import CaptionEncoder, note_cut
from embedder.steps.clip_encoder import ClipEncoder
from embedder.steps.further_inputs import FurtherInput, FurtherInputs
from shards.clip_sequence import ClipForm

BMP_HEAD_BYTES = 54
NO_TOWER = "NoTower"  # error type of an item that the model has no tower for

NUM_FRAMES, NUM_DECODED = "num_frames", "num_decoded"
"""Values of a video's row, only for the measurement: frames that it has, and that were decoded for it."""

CLIP_TEXT = "clip_text"
"""Value of a segment's row for `image_text`, if the model takes its frames as one sequence."""

_NOT_COLUMNS = ("pixels", "medium", "times_s")
"""Fields of a segment that are made into others of its row."""

CAPTION_PLACE = "caption_place"
"""Value of an item's last row, only for the measurement: where its caption was found."""

STEP_IMAGE = "step_image"
"""A row's image for the user's own steps: uint8 (1, H, W, 3), with its own proportions."""

MAIN_ALONE = frozenset({""})
"""Names of the models that an item is for if there is only the main one."""

Values = dict[str, Any]
"""Values of one row by column; missing columns are null."""


@dataclass(frozen=True)
class DecodeSpec:
    """Configuration of a decode task; plain values, so that equal specs share one decoder in a process.

    `caption_end_id` is the text tower's `end_id`, `caption_prompt` stands before each caption. Without `resize` (no
    vision tower) no image is decoded, without `tokenizer_json` (no text tower) no caption becomes token ids. `web`
    limits what is fetched from web addresses. `animations` says whether animated images are `clip`s, `colour` how pixel
    values are read. `models` are the names of the run's models, `further` is what further ones take. `steps` are the
    user's own. `medium_columns` are filled from what files say of themselves. `caption_places` are those of
    `[captions] from`, `caption_languages` what is wanted of XMP's alternatives. `num_end_tokens` is set for a model
    that embeds a picture with its caption: the tokens that the tokeniser puts behind a caption. `clips` is set for one
    that takes a segment's frames as one sequence. `frames_from_start` is as in `embedder.media.segments.SegmentRule`.
    """

    resize: ResizeSpec | None
    limits: DecodeLimits
    tokenizer_json: str | None
    max_caption_tokens: int
    segment_s: float
    frames_per_segment: int
    rows_per_batch: int
    frames_from_start: bool = False
    caption_end_id: int | None = None
    web: WebConfig = field(default_factory=WebConfig)
    animations: str = "first_frame"
    colour: Colour = "srgb"
    further: tuple[FurtherInput, ...] = ()
    caption_prompt: str = ""
    models: tuple[str, ...] = ("",)
    steps: "RowSteps | None" = None
    medium_columns: tuple[str, ...] = ()
    caption_places: tuple[str, ...] = SIDECAR_ALONE
    caption_languages: tuple[str, ...] = ()
    num_end_tokens: int | None = None
    clips: ClipForm | None = None

    @property
    def has_several_models(self) -> bool:
        """Return whether rows say which models they are for."""
        return len(self.models) > 1

    @property
    def columns(self) -> list[pa.Field]:
        """Return the columns that decoding adds to a listing, without the trace."""
        has_grids = self.resize is not None and self.resize.mode == "patches"
        own = [column for column in DECODED if column.name != "trace"] + ([IMAGE_GRID] if has_grids else [])
        own += [IMAGE_TEXT] if self.num_end_tokens is not None or self.clips is not None else []
        own += [pa.field(model_column(NEEDED, name), pa.bool_()) for name in self.models if self.has_several_models]
        names = {column.name for column in own}
        own += [field for each in self.further for field in each.fields if field.name not in names]
        return own + (self.steps.columns if self.steps is not None else [])

    @property
    def image_inputs(self) -> tuple[FurtherInput, ...]:
        """Return the inputs of all models, including the main one's pixels."""
        if self.resize is None:
            return self.further
        return (FurtherInput("pixels", MAIN_ALONE, "pixels", self.resize), *self.further)

    @property
    def step_inputs(self) -> tuple[FurtherInput, ...]:
        """Return the image that the user's own steps take, if they take one and a model does."""
        side_px = self.steps.max_side_px if self.steps is not None else None
        if side_px is None or not any(each.is_image for each in self.image_inputs):
            return ()
        resize = ResizeSpec(side_px, "fit", "bicubic", colour=self.colour)
        return (FurtherInput(STEP_IMAGE, frozenset(self.models), "image", resize),)


class RowSteps(Protocol):
    """The user's own steps between decoding and the model (`embedder.user_steps`); hashable plain values."""

    @property
    def columns(self) -> list[pa.Field]:
        """Return the columns that they add."""

    @property
    def carried(self) -> tuple[str, ...]:
        """Return the listing columns that they take, which count as content."""

    @property
    def max_side_px(self) -> int | None:
        """Return the longest side of the images that they take; None if they take no image."""

    def open(self, decoder: "ItemDecoder") -> Callable[[pa.Table, Iterator[tuple[int, Values]]], Iterator[Any]]:
        """Return a function that applies them to a listing and its rows, each with the number of its item."""


@dataclass(frozen=True)
class ItemProblem:
    """Reason why an item, or its image or caption, could not be embedded."""

    step: str
    error_type: str
    error: str
    transient: bool = False


@dataclass(frozen=True)
class ItemContent:
    """Content of an item: an image or video, a caption, or both; and a problem found while reading it.

    Kind `animation` is an image that may be animated; it is then embedded as a video. `beside` has values of the
    medium's columns from files next to it, `place` is where its caption was found.
    """

    kind: str | None = None
    media: bytes | Path | None = None
    caption: str | None = None
    problem: ItemProblem | None = None
    beside: Mapping[str, Any] = field(default_factory=dict)
    place: str | None = None


Rules = Mapping[ResizeSpec, Collection[FurtherInput]]
"""Distinct rules for decoding an image, each with the inputs it makes."""


class ItemDecoder:
    """Decodes items: pixels from the sandbox, token ids from the tokeniser."""

    def __init__(self, spec: DecodeSpec) -> None:
        self.spec = spec
        self.sandbox = SandboxedDecoder(spec.limits, spec.medium_columns)
        self.captions = (
            CaptionEncoder(spec.tokenizer_json, spec.max_caption_tokens, spec.caption_end_id, spec.caption_prompt)
            if spec.tokenizer_json is not None
            else None
        )
        self._joined = (
            CaptionEncoder(spec.tokenizer_json, spec.max_caption_tokens, spec.caption_end_id)
            if spec.tokenizer_json is not None and spec.num_end_tokens is not None
            else None
        )
        self._clips = (
            ClipEncoder(spec.clips, spec.tokenizer_json, spec.caption_prompt)
            if spec.tokenizer_json is not None and spec.clips is not None
            else None
        )
        self._inputs = FurtherInputs((*spec.image_inputs, *spec.step_inputs))
        self._beside: list[SandboxedDecoder] = []  # a video is decoded by all rules in parallel

        captions = [each for each in spec.further if each.make in ("text", "token_ids")]
        own = {"token_ids"} if self.captions is not None else set()
        own |= {IMAGE_TEXT.name} if self._joined is not None else set()
        self.caption_columns = own | _columns_of(captions)
        self.image_columns = _columns_of(each for each in spec.image_inputs if each.is_image)
        self._of_steps: SandboxedDecoder | None = None  # separate, as the main one may be in the middle of a video

    def warm_up(self) -> None:
        """Bring the sandbox to its state in a long run, for measurements."""
        for each in self.spec.image_inputs:
            if each.resize is not None:
                self.sandbox.warm_up(each.resize)

    def cpu_s(self) -> float:
        """Return the CPU seconds of this thread and of the sandbox process."""
        return time.thread_time() + sum(each.child_cpu_s() for each in (self.sandbox, *self._beside))

    def rows(self, content: ItemContent, models: Collection[str] = MAIN_ALONE) -> Iterator[Values]:
        """Yield the item's rows in order; the last one has `num_vectors` and the problem, if any."""
        rules = self._inputs.resizes(models)
        if content.kind in ("video", "animation") and content.media is not None and rules:
            return self._video_rows(content, content.media, rules, models)
        return self.image_rows([(content, models)])

    def image_rows(self, contents: Sequence[tuple[ItemContent, Collection[str]]]) -> Iterator[Values]:
        """Yield the row of each of several non-video items, decoded in batches in the sandbox.

        Each item comes with the models that it is for.
        """
        rules = [self._inputs.resizes(models) if has_image(content) else {} for content, models in contents]
        requests = [(content.media, rule) for (content, _), each in zip(contents, rules, strict=True) for rule in each]
        decoded = self.sandbox.images(requests)  # type: ignore[arg-type]  # `has_image`: their media are not None
        for (content, models), each in zip(contents, rules, strict=True):
            yield self._image_row(content, each, models, {rule: next(decoded) for rule in each})

    def of_pixels(self, pixels_HWC: NDArray[np.uint8], models: Collection[str]) -> Values:
        """Make the inputs of an image (uint8 [0, 255], RGB) returned by a user's step, as from a file with it.

        Raises a DecodeError if it is too large.
        """
        self._of_steps = self._of_steps or SandboxedDecoder(self.spec.limits)
        encoded, values = bmp(pixels_HWC), Values()
        for rule, inputs in FurtherInputs(self.spec.image_inputs).resizes(models).items():
            pixels_FHWC = self._of_steps.image(encoded, rule)[None]
            for each in inputs:
                values |= each.of_frames(pixels_FHWC)
        return values | self._inputs.of_file(encoded, models)

    def of_caption(self, caption: str | None, models: Collection[str]) -> Values:
        """Make the inputs of a caption."""
        return self._caption_values(caption, models)

    def _image_row(
        self,
        content: ItemContent,
        rules: Rules,
        models: Collection[str],
        decoded: Mapping[ResizeSpec, DecodedImage | DecodeError],
    ) -> Values:
        row, problem, medium = self._caption_values(content.caption, models), content.problem, None
        if has_image(content):
            for rule, inputs in rules.items():
                image = decoded[rule]
                if isinstance(image, DecodeError):
                    problem = _decode_problem(image)
                    break
                if image.note is not None and (problem is None or not problem.transient):
                    problem = ItemProblem("decode", TRUNCATED_IMAGE, image.note)
                medium = medium or image.medium
                for each in inputs:
                    row |= each.of_frames(image.pixels[None])
            else:
                row |= self._inputs.of_file(content.media, models)
        modality = _modality(content)
        has_vector = row.keys() - {"caption"}
        if has_vector:
            row |= {"segment": 0, "modality": modality, "medium": medium}
        elif problem is None:
            problem = self._nothing_to_embed(content)
        return row | {"num_vectors": int(bool(has_vector))} | _problem_values(problem)

    def _nothing_to_embed(self, content: ItemContent) -> ItemProblem:
        """Return why an item gives no vector, though nothing about it is broken."""
        if content.caption:
            return ItemProblem("read", NO_TOWER, "a caption without an image, and the model has no text tower")
        if content.media is not None:
            return ItemProblem("read", NO_TOWER, f"{content.kind} without a caption, and the model has no vision tower")
        return ItemProblem("read", "Empty", "the item has neither an image nor a caption")

    def _video_rows(
        self, content: ItemContent, media: bytes | Path, rules: Rules, models: Collection[str]
    ) -> Iterator[Values]:
        """Yield one row per segment; the first has what is made of the caption."""
        caption = self._caption_values(content.caption, models)
        num_vectors, last_row, problem = 0, None, content.problem
        try:
            for segment in self._segments(media, rules):
                if last_row is not None:
                    yield last_row
                last_row = caption if num_vectors == 0 else {"caption": content.caption}
                last_row = last_row | segment | {"modality": "video"}
                num_vectors += 1
        except DecodeError as error:
            if content.kind == "animation" and error.error_type == STILL_IMAGE:
                yield from self.image_rows([(replace(content, kind="image"), models)])
                return
            problem = _decode_problem(error)
        if last_row is None and caption.keys() - {"caption"}:
            last_row, num_vectors = caption | {"segment": 0, "modality": "video"}, 1
        yield (last_row or {}) | {"num_vectors": num_vectors} | _problem_values(problem)

    def _segments(self, media: bytes | Path, rules: Rules) -> Iterator[Values]:
        """Yield the columns of each segment, made by all rules; each rule decodes in its own sandbox."""
        while len(self._beside) < len(rules) - 1:
            self._beside.append(SandboxedDecoder(self.spec.limits))
        seconds, frames = self.spec.segment_s, self.spec.frames_per_segment
        videos = [
            sandbox.video(
                media,
                rule,
                segment_s=seconds,
                frames_per_segment=frames,
                from_start=self.spec.frames_from_start,
            )
            for rule, sandbox in zip(rules, (self.sandbox, *self._beside), strict=False)
        ]
        while True:
            values: Values = {}
            for video, inputs in zip(videos, rules.values(), strict=True):
                if (segment := next(video, None)) is None:
                    return
                values |= {name: value for name, value in vars(segment).items() if name not in _NOT_COLUMNS}
                values.setdefault("medium", segment.medium)  # only the first rule's sandbox reads it
                values[NUM_FRAMES] = len(segment.pixels)
                for each in inputs:
                    values |= each.of_frames(segment.pixels)
                    if each.column == "pixels" and self._clips is not None:
                        values[CLIP_TEXT] = self._clips.encode(segment.times_s, segment.end_s - segment.start_s)
            yield values

    def _caption_values(self, caption: str | None, models: Collection[str]) -> Values:
        if not caption:
            return {}
        values: Values = {"caption": caption} | self._inputs.of_caption(caption, models)
        if self.captions is not None and "" in models:
            values["token_ids"], num_read = self.captions.read(caption)
            note_cut(values, caption, num_read)
            if self._joined is not None:
                ids, num_end = self._joined.encode(caption), self.spec.num_end_tokens or 0
                num_start = len(self._joined.encode("")) - num_end  # the tokeniser's own, which stand before a picture
                values[IMAGE_TEXT.name] = ids[num_start : len(ids) - num_end]
        return values


def _columns_of(inputs: Iterable[FurtherInput]) -> frozenset[str]:
    return frozenset(column.name for each in inputs for column in each.fields)


def bmp(pixels_HWC: NDArray[np.uint8]) -> bytes:
    """Encode an image (uint8 [0, 255], RGB) losslessly as BMP.

    It has 24 bits a pixel, the top row first, and rows of a multiple of 4 bytes.
    """
    height, width, _ = pixels_HWC.shape
    row_bytes = -(-3 * width // 4) * 4
    rows = np.zeros((height, row_bytes), np.uint8)
    rows[:, : 3 * width] = pixels_HWC[:, :, ::-1].reshape(height, -1)
    head = struct.pack("<2sIHHI", b"BM", BMP_HEAD_BYTES + rows.nbytes, 0, 0, BMP_HEAD_BYTES)
    return head + struct.pack("<IiiHHIIiiII", 40, width, -height, 1, 24, 0, rows.nbytes, 0, 0, 0, 0) + rows.tobytes()


def has_image(content: ItemContent) -> bool:
    """Return whether an item holds a still image."""
    return content.kind == "image" and content.media is not None


def _modality(content: ItemContent) -> str:
    if content.kind == "image":
        return "pair" if content.caption else "image"
    return "video" if content.kind in ("video", "animation") else "text"


def _decode_problem(error: DecodeError) -> ItemProblem:
    return ItemProblem("decode", error.error_type, error.message, error.transient)


def _problem_values(problem: ItemProblem | None) -> Values:
    return asdict(problem) if problem else {}
