"""Inputs of further models, made by decode besides those of the main one: each distinct one once per item.

They are plain values, filled in by the description of a run (`embedder.models.further_models`).
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.batch_schema import BESIDE_IMAGES, IMAGE_GRID, NEEDED, REASON, TENSOR, VECTOR, model_column
from embedder.media.patches import pixel_columns
from embedder.media.resize import ResizeSpec
from embedder.steps.caption_encoder import CaptionEncoder, note_cut
from embedder.store.tables.arrow_lookup import replace_column

MAIN_INPUTS = {"pixels": "image_embedding", "token_ids": "text_embedding"}
"""Inputs of the main model, and the output that its last stage makes of each."""
GRID = "_grid"
"""Suffix of the column with the sizes of images or patches, int32 (3,), next to that with their pixels."""

Values = dict[str, Any]
Make = Literal["pixels", "image", "token_ids", "text", "bytes"]


@dataclass(frozen=True)
class FurtherInput:
    """Input of further models, made from an item's image or caption.

    `column` is shared with the main model if that takes the same input. `models` need it, for themselves or for one
    that takes what they return. `make` is `pixels` of one size or as patches, an `image` of its own proportions (both
    by the rule `resize`), or what a caption or a file gives. For `token_ids`, captions stand behind the
    `prompt`, and are cut at `max_tokens` and after the token `end_id`.
    """

    column: str
    models: frozenset[str]
    make: Make
    resize: ResizeSpec | None = None
    tokenizer_json: str | None = None
    max_tokens: int = 0
    end_id: int | None = None
    prompt: str = ""

    @property
    def is_image(self) -> bool:
        """Return whether it is made from an item's image."""
        return self.make in ("pixels", "image", "bytes")

    @property
    def has_grid(self) -> bool:
        """Return whether it has a column of sizes."""
        return self.make == "image" or (self.resize is not None and self.resize.mode == "patches")

    @property
    def grid_column(self) -> str:
        """Return the name of the column of sizes."""
        return IMAGE_GRID.name if self.column == "pixels" else self.column + GRID

    @property
    def fields(self) -> list[pa.Field]:
        """Return its columns."""
        kind = {"text": pa.string(), "bytes": pa.large_binary()}.get(self.make, TENSOR)
        grid = [pa.field(self.grid_column, TENSOR)] if self.has_grid else []
        return [pa.field(self.column, kind), *grid]

    def of_frames(self, frames_FHWC: Any) -> Values:
        """Return the columns of decoded frames, uint8 [0, 255]; an image of its own proportions is the middle one."""
        if self.resize is None:
            return {}
        if self.make == "image":
            frames_FHWC = frames_FHWC[len(frames_FHWC) // 2][None]
            grid = np.array([1, *frames_FHWC.shape[1:3]], np.int32)
            return {self.column: frames_FHWC, self.grid_column: grid}
        found = pixel_columns(frames_FHWC, self.resize)
        names = {"pixels": self.column, IMAGE_GRID.name: self.grid_column}
        return {names[name]: value for name, value in found.items()}


class FurtherInputs:
    """Makes the further models' inputs in a decode task."""

    def __init__(self, inputs: Collection[FurtherInput]) -> None:
        """Read the tokenisers."""
        self.inputs = tuple(inputs)
        self._captions = {
            each: CaptionEncoder(each.tokenizer_json, each.max_tokens, each.end_id, each.prompt)
            for each in inputs
            if each.tokenizer_json is not None
        }

    def list_needed(self, models: Collection[str]) -> list[FurtherInput]:
        """Return the inputs that some models need."""
        return [each for each in self.inputs if not each.models.isdisjoint(models)]

    def of_caption(self, caption: str | None, models: Collection[str]) -> Values:
        """Return the columns made from a caption."""
        values: Values = {}
        if not caption:
            return values
        for each in self.list_needed(models):
            if each.make == "text":
                values[each.column] = caption
            elif each.make == "token_ids":
                values[each.column], num_read = self._captions[each].read(caption)
                note_cut(values, caption, num_read)
        return values

    def of_file(self, content: bytes | Path | None, models: Collection[str]) -> Values:
        """Return the columns with an image as it is stored."""
        wanted = [each for each in self.list_needed(models) if each.make == "bytes"]
        if content is None or not wanted:
            return {}
        data = content.read_bytes() if isinstance(content, Path) else content
        return {each.column: np.frombuffer(data, np.uint8) for each in wanted}

    def resizes(self, models: Collection[str]) -> dict[ResizeSpec, list[FurtherInput]]:
        """Return the distinct rules for decoding an item's image, each with the inputs it makes."""
        found: dict[ResizeSpec, list[FurtherInput]] = {}
        for each in self.list_needed(models):
            if each.resize is not None:
                found.setdefault(each.resize, []).append(each)
        return found


def is_needed(rows: pa.Table, name: str) -> pa.ChunkedArray | None:
    """Return the mask of the rows for a model; None if all are, as in runs of one model."""
    column = model_column(NEEDED, name)
    if column not in rows.schema.names:
        return None
    mask = pc.fill_null(rows[column], False)
    return None if pc.all(mask).as_py() else mask


def for_main(rows: pa.Table) -> pa.Table:
    """Return rows for the main model's stages: without inputs where a row is not for it."""
    if (mask := is_needed(rows, "")) is None:
        return rows
    for name in (*MAIN_INPUTS, *BESIDE_IMAGES):
        if name in rows.schema.names:
            rows = replace_column(rows, name, pc.if_else(mask, rows[name], pa.scalar(None, rows[name].type)))
    return rows


def select_for_model(listing: pa.Table, name: str = "") -> pa.Table:
    """Select the listed items that are for a model; the main one has the empty name."""
    reason = model_column(REASON, name)
    return listing.filter(pc.is_valid(listing[reason])) if reason in listing.schema.names else listing


def without_vectors(rows: pa.Table) -> pa.Table:
    """Return rows as the last stage would, but without any vector of the main model."""
    for name, output in MAIN_INPUTS.items():
        rows = rows.drop_columns([name]).append_column(output, pa.nulls(rows.num_rows, VECTOR))
    return rows.drop_columns([name for name in BESIDE_IMAGES if name in rows.schema.names])
