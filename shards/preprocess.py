"""Preprocessing of a model: how images become pixels, and captions token ids."""

from typing import Literal, Self

from pydantic import Field, model_validator

from shards.clip_sequence import ClipForm
from shards.file_schema import ModelSection

CROPPED = ("squash", "crop")
"""Ways to resize after which the middle square may be cut out."""
INSTRUCTION_PLACE = "{instruction}"
QUERY_PLACE = "{query}"
"""Mark in a re-ranker's caption_prompt, in the place of the query."""
UNHASHED = {"instruction_form", "costs"}
"""Keys that change no stored vector by themselves, so that no fingerprint counts them."""


class PreprocessConfig(ModelSection):
    """Preprocessing: from images to pixels, from captions to token ids.

    Settings of a side whose tower the model lacks change nothing.
    """

    image_size: int = Field(224, ge=1, description="side of the square image, px")
    resize: Literal["squash", "crop", "pad", "pad_black", "patches"] = Field(
        "crop",
        description="squash: both sides to size; crop: shortest side, then centre; pad: whole image on white; "
        "pad_black: on black, as open_clip does it; patches: no square, but whole patches along both sides, at most "
        "the vision tower's max_patches",
    )
    resize_size: int | None = Field(
        None,
        ge=1,
        description="size of the resize by squash or crop, px, after which the middle square of image_size is kept; "
        "none: image_size",
    )
    interpolation: Literal["bilinear", "bicubic", "lanczos"] = Field("bicubic", description="filter of the resize")
    resampler: Literal["pillow", "torchvision"] = Field(
        "pillow", description="library whose resize gives the values, to the bit"
    )
    mean: tuple[float, float, float] = Field((0.5, 0.5, 0.5), description="of RGB scaled to [0, 1]")
    std: tuple[float, float, float] = Field((0.5, 0.5, 0.5), description="of RGB scaled to [0, 1]")
    reduced_decode: bool = Field(True, description="JPEGs may be decoded at 1/2, 1/4, 1/8 while >= 2x image_size")
    max_caption_tokens: int = Field(64, ge=2, description="longer captions are cut; counts [CLS] and [SEP]")
    caption_prompt: str = Field("", description="text that captions are put behind")
    query_prompt: str = Field("", description="text that queries are put behind")
    instruction_form: str = Field(
        "",
        description=f"both prompts with {INSTRUCTION_PLACE} in the place of the instruction; empty: the prompts say",
    )
    joins_captions: bool = Field(
        False,
        description="a picture's vector is of the picture with its caption, if it has one; for a model whose pictures "
        "pass through the layers of its texts",
    )
    clips: ClipForm | None = Field(
        None, description="a segment's frames as one sequence; none: its vector is the mean of those of its frames"
    )

    @property
    def scores_queries(self) -> bool:
        """Whether the model is a re-ranker, which scores items for a query and has no vectors."""
        return self.caption_prompt.count(QUERY_PLACE) == 1

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if min(self.std) <= 0:
            raise ValueError(f"std is {self.std}; pixels are divided by it, so each must be positive")
        if self.resize_size is not None and (self.resize_size < self.image_size or self.resize not in CROPPED):
            raise ValueError(
                f'resize_size is {self.resize_size} with resize "{self.resize}" and image_size {self.image_size}; it '
                "belongs to squash and crop, and is no smaller than image_size"
            )
        if self.instruction_form and self.instruction_form.count(INSTRUCTION_PLACE) != 1:
            raise ValueError(f"instruction_form is {self.instruction_form!r}; it has {INSTRUCTION_PLACE} once")
        return self
