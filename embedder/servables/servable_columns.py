"""Declared columns of servables: what a row of an input or output holds; read from a configuration, without Arrow.

Shapes are those of one row: `[]` one value, `[768]` a vector, `["any", 4]` any number of boxes.
"""

import json
from abc import abstractmethod
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from embedder.config_toml.sections import ConfigSection
from embedder.media.resize import ResizeSpec
from shards.fingerprint import short_hash
from shards.preprocess import PreprocessConfig

if TYPE_CHECKING:
    import pyarrow as pa

ValueType = Literal["float32", "float64", "int64", "int32", "uint8", "bool", "string", "binary"]
Shape = tuple[Annotated[int, Field(ge=1)] | Literal["any"], ...]

COLUMN_NAME = r"[A-Za-z_][A-Za-z0-9_-]*"
COLUMN_NAME_RULE = Annotated[str, Field(pattern=f"^{COLUMN_NAME}$")]
ADDRESS = rf"^({COLUMN_NAME}\.)?{COLUMN_NAME}$"
"""Name of a column of the dataset, or of a servable's output as SERVABLE.COLUMN."""


class OutputColumn(ConfigSection):
    """Column that a servable returns."""

    type: ValueType = Field("float32", description="type of each value")
    shape: Shape = Field((), description='sizes of one row\'s value; "any" where rows differ')
    nullable: bool = Field(False, description="whether it may be null in a row that has all inputs")
    of: tuple[str, ...] | None = Field(
        None, description="inputs without which it is null; left out: all that aren't optional"
    )

    def arrow_type(self) -> "pa.DataType":
        """Arrow type of the column: nested lists, one level for each size of the shape."""
        return arrow_type(self.type, self.shape)


def arrow_type(value_type: ValueType, shape: Shape) -> "pa.DataType":
    """Return the Arrow type of values of a shape."""
    import pyarrow as pa

    scalars = {"float32": pa.float32(), "float64": pa.float64(), "bool": pa.bool_(), "binary": pa.large_binary()}
    found = scalars.get(value_type) or getattr(pa, value_type)()
    for _ in shape:
        found = pa.list_(found)
    return found


class BaseInput(ConfigSection):
    """Input of a servable: what each of its rows is made from."""

    of: str | None = Field(
        None,
        pattern=ADDRESS,
        description="column that it is made from: SERVABLE.COLUMN, or one of the dataset; left out: the item's own "
        "image or caption",
    )
    optional: bool = Field(
        False, description="whether rows without it are computed, too; of several optional ones each row has one"
    )

    def decode_key(self) -> str:
        """Name of the column that decode makes for it; identically made inputs share one."""
        return str(getattr(self, "make", ""))

    def arrow_type(self) -> "pa.DataType | None":
        """Required Arrow type of the source column, if it is another servable's output; None means any."""
        return arrow_type("string", ())


class ResizedInput(BaseInput):
    """Base of image inputs, which are resized while they are decoded."""

    @property
    @abstractmethod
    def resize(self) -> ResizeSpec:
        """Rule of the resize."""

    def decode_key(self) -> str:
        """Name of the column; it doesn't depend on normalisation, which comes after decoding."""
        return f"pixels-{_hash(asdict(self.resize))}"

    def arrow_type(self) -> "pa.DataType | None":
        """Encoded images, as another servable may return them."""
        return arrow_type("binary", ())


class PixelsInput(ResizedInput):
    """Images of one size; arrive as an Arrow tensor, uint8 (H, W, 3), RGB. Of a video's segment, its middle frame.

    Graphs (ONNX, .pt2, TorchScript) get a batch of `values` in the order `layout`, computed from that where they run.
    """

    make: Literal["pixels"] = "pixels"
    preprocess: PreprocessConfig = Field(PreprocessConfig(), description="size, resize, mean and deviation")
    values: Literal["normalised", "unit", "uint8"] = Field(
        "normalised", description="of a graph: by mean and deviation, in [0, 1], or as they are"
    )
    layout: Literal["nchw", "nhwc"] = Field("nchw", description="of a graph: order of its axes")

    @model_validator(mode="after")
    def _square(self) -> Self:
        if self.preprocess.resize == "patches":
            raise ValueError('resize is "patches", which only the kind towers takes; write another')
        return self

    @property
    def resize(self) -> ResizeSpec:
        """Rule of the resize."""
        return ResizeSpec.of(self.preprocess)


class ImageInput(ResizedInput):
    """Images of their own proportions; arrive as structs of `pixels` (binary, uint8 H x W x 3), `height`, `width`."""

    make: Literal["image"] = "image"
    max_side_px: int = Field(1333, ge=1, le=8192, description="images with a longer side are reduced to it")

    @property
    def resize(self) -> ResizeSpec:
        """Rule of the resize."""
        return ResizeSpec(image_size=self.max_side_px, mode="fit", interpolation="bicubic")


class TowerPixelsInput(ResizedInput):
    """Images, frames of videos or patches as the cuttable towers take them; arrive packed, one binary per row.

    Patches have a second column, NAME_grid: binary int32 (3,), frames, patch rows and patch columns.
    """

    make: Literal["tower_pixels"] = "tower_pixels"
    rule: ResizeSpec

    @property
    def resize(self) -> ResizeSpec:
        """Rule of the resize."""
        return self.rule


class TokensInput(BaseInput):
    """Token ids of captions; arrive as lists of int32, without padding unless the tokeniser pads to a fixed length."""

    make: Literal["token_ids"] = "token_ids"
    tokenizer: str = Field(description="a tokenizer.json, or the folder that holds it")
    max_tokens: int = Field(64, ge=2, description="longer captions are cut; counts special tokens")
    end_id: int | None = Field(None, description="token after which a caption is cut; left out: none")
    prompt: str = Field("", description="text that captions are put behind")
    padding_id: int = Field(0, ge=0, description="of a graph: value after the end of the shorter captions of a batch")
    pad_to: int | None = Field(
        None, ge=1, description="of a graph with one length: tokens of each caption; left out: of the longest"
    )
    type: Literal["int64", "int32"] = Field("int64", description="of a graph: type of the ids and the mask")
    mask: str | None = Field(None, description="of a graph: input that gets 1 for each token and 0 for padding")

    def decode_key(self) -> str:
        """Name of the column; it doesn't depend on padding, which comes after decoding."""
        return f"token_ids-{_hash([self.tokenizer, self.max_tokens, self.end_id, *filter(None, [self.prompt])])}"

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        if self.pad_to is not None and self.pad_to < self.max_tokens:
            raise ValueError(f"pad_to ({self.pad_to}) is below max_tokens ({self.max_tokens}); make it no smaller")
        return self


class TextInput(BaseInput):
    """Texts, as strings."""

    make: Literal["text"] = "text"


class BytesInput(BaseInput):
    """Encoded files, as they are stored."""

    make: Literal["bytes"] = "bytes"

    def arrow_type(self) -> "pa.DataType | None":
        """Binary values."""
        return arrow_type("binary", ())


class ColumnInput(BaseInput):
    """Unchanged values of a column of another servable or of the dataset."""

    make: Literal["column"] = "column"
    of: str = Field(pattern=ADDRESS, description="column: SERVABLE.COLUMN, or one of the dataset")
    type: ValueType = Field("float32", description="type of each value")
    shape: Shape = Field((), description='sizes of one row\'s value; "any" where rows differ')

    def arrow_type(self) -> "pa.DataType | None":
        """The declared type."""
        return arrow_type(self.type, self.shape)


AnyInput = PixelsInput | ImageInput | TokensInput | TextInput | BytesInput | ColumnInput
DeclaredInput = Annotated[AnyInput, Field(discriminator="make")]
InputColumn = AnyInput | TowerPixelsInput


def _hash(value: object) -> str:
    return short_hash([json.dumps(value, sort_keys=True).encode()])


IMAGES = (ResizedInput, BytesInput)
"""Inputs made from an item's image; the others are made from its caption, or from a column."""
