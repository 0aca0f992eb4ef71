"""Preparation of a servable's inputs from images, texts and other servables' columns.

What is made from an image or a text travels packed, one binary per row (`arrow_tensors`). `bind` lays it out as
`embedder.servables.servable_columns` declares it, without a copy if possible.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from embedder.media.limits import DecodeLimits
from embedder.media.media_errors import DecodeError
from embedder.media.patches import pixel_columns
from embedder.media.resize import Colour
from embedder.media.sandbox import SandboxedDecoder
from embedder.servables.declared_servables import find_tokenizer
from embedder.servables.servable_columns import (
    BaseInput,
    BytesInput,
    ImageInput,
    InputColumn,
    PixelsInput,
    ResizedInput,
    TokensInput,
    TowerPixelsInput,
)
from embedder.steps.caption_encoder import CaptionEncoder
from embedder.store.tables.arrow_tensors import pack, unpack

GRID = "_grid"
"""Suffix of the column with the sizes of images or patches, int32 (3,), next to the column of their pixels."""
CHANNELS = 3


@dataclass(frozen=True)
class PreparedInput:
    """Values of one input, one per row."""

    column: pa.Array
    grid: pa.Array | None = None
    problems: dict[int, str] = field(default_factory=dict)
    """Why a row has no value, by its number; rows without any source value are not listed."""


class InputPreparer:
    """Maker of inputs: pixels from the sandbox, token ids from tokenisers."""

    def __init__(self, limits: DecodeLimits | None = None, colour: Colour = "srgb") -> None:
        """Start nothing; the sandbox starts with the first image."""
        self.limits, self._colour = limits or DecodeLimits(), colour
        self._captions: dict[str, CaptionEncoder] = {}

    @cached_property
    def _sandbox(self) -> SandboxedDecoder:
        return SandboxedDecoder(self.limits)

    def close(self) -> None:
        """End the sandbox process, if there is one."""
        if "_sandbox" in vars(self):
            self._sandbox.close()

    def make(self, declared: InputColumn, values: Sequence[Any]) -> PreparedInput:
        """Make an input (not a `column`) from `values`: encoded images (bytes) or texts, None for a row without one.

        Raises `ServableError` if its tokeniser is missing.
        """
        if isinstance(declared, ResizedInput):
            return self._pixels(declared, values)
        expected = bytes if isinstance(declared, BytesInput) else str
        problems = {
            number: f"found {type(value).__name__}, expected {'a text' if expected is str else 'an encoded image'}"
            for number, value in enumerate(values)
            if value is not None and not isinstance(value, expected)
        }
        kept: list[Any] = [value if isinstance(value, expected) and value else None for value in values]
        if isinstance(declared, TokensInput):
            encoder = self._encoder(declared)
            return PreparedInput(pack([encoder.encode(text) if text else None for text in kept]), problems=problems)
        return PreparedInput(pa.array(kept, declared.arrow_type()), problems=problems)

    def _encoder(self, declared: TokensInput) -> CaptionEncoder:
        key = declared.decode_key()
        if key not in self._captions:
            self._captions[key] = caption_encoder(declared)
        return self._captions[key]

    def _pixels(self, declared: ResizedInput, images: Sequence[bytes | None]) -> PreparedInput:
        pixels: list[Any] = []
        grids: list[Any] = []
        problems: dict[int, str] = {}
        for number, image in enumerate(images):
            found: dict[str, Any] = {}
            if image:
                try:
                    resize = replace(declared.resize, colour=self._colour)
                    found = _columns(declared, self._sandbox.image(image, resize))
                except DecodeError as error:
                    problems[number] = f"{error.error_type}: {error.message}"
            pixels.append(found.get("pixels"))
            grids.append(found.get("image_grid"))
        return PreparedInput(pack(pixels), pack(grids) if has_grid(declared) else None, problems)


def caption_encoder(declared: TokensInput) -> CaptionEncoder:
    """Return the tokeniser of an input; a ServableError if it is missing."""
    text = find_tokenizer("the tokeniser of an input", declared.tokenizer).read_text(encoding="utf-8")
    return CaptionEncoder(text, declared.max_tokens, declared.end_id, declared.prompt)


def has_grid(declared: BaseInput) -> bool:
    """Return whether an input has a column of sizes next to that of its pixels."""
    return isinstance(declared, ImageInput) or (
        isinstance(declared, TowerPixelsInput) and declared.resize.mode == "patches"
    )


def _columns(declared: ResizedInput, pixels_HWC: Any) -> dict[str, Any]:
    found = dict(pixel_columns(pixels_HWC[None], declared.resize))
    if isinstance(declared, ImageInput):
        found["image_grid"] = np.array([1, *pixels_HWC.shape[:2]], np.int32)
    return found


def bind(name: str, declared: InputColumn, column: pa.Array, grid: pa.Array | None) -> dict[str, pa.Array]:
    """Lay out an input as the servable sees it, under its own name."""
    match declared:
        case TokensInput():
            flat, sizes_bytes = unpack(column)
            offsets = np.concatenate([[0], np.cumsum(sizes_bytes // 4)]).astype(np.int32)
            mask = column.is_null() if column.null_count else None
            return {name: pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat.view(np.int32)), mask=mask)}
        case PixelsInput():
            return {name: _tensor(column, declared.preprocess.image_size)}
        case ImageInput() if grid is not None:
            return {name: _structs(column, grid)}
        case TowerPixelsInput() if grid is not None:
            return {name: column, name + GRID: grid}
        case _:
            return {name: column}


def _tensor(column: pa.Array, side_px: int) -> pa.Array:
    """Lay out packed pixels as a tensor, uint8 (B, H, W, 3): the middle one of several frames; zeros for a null."""
    flat, sizes_bytes = unpack(column)
    frame_bytes = side_px * side_px * CHANNELS
    if (sizes_bytes == frame_bytes).all():
        x_BHWC = flat.reshape(-1, side_px, side_px, CHANNELS)
    else:
        starts = np.cumsum(sizes_bytes) - sizes_bytes + sizes_bytes // frame_bytes // 2 * frame_bytes
        x_BHWC = np.zeros((len(column), side_px, side_px, CHANNELS), np.uint8)
        for row in np.nonzero(sizes_bytes)[0]:
            x_BHWC[row] = flat[starts[row] : starts[row] + frame_bytes].reshape(x_BHWC.shape[1:])
    tensor = pa.FixedShapeTensorArray.from_numpy_ndarray(x_BHWC)
    if not column.null_count:
        return tensor
    storage = pa.FixedSizeListArray.from_arrays(pa.array(x_BHWC.reshape(-1)), frame_bytes, mask=column.is_null())
    return pa.ExtensionArray.from_storage(tensor.type, storage)


def _structs(column: pa.Array, grid: pa.Array) -> pa.Array:
    sizes = np.zeros((len(column), 3), np.int32)
    flat, sizes_bytes = unpack(grid)
    sizes[sizes_bytes > 0] = flat.view(np.int32).reshape(-1, 3)
    height, width = (pa.array(sizes[:, axis]) for axis in (1, 2))
    names = ["pixels", "height", "width"]
    mask = column.is_null() if column.null_count else None
    return pa.StructArray.from_arrays([column, height, width], names, mask=mask)
