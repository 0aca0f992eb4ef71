"""Means over the items: the workload that a cut is balanced for."""

from dataclasses import dataclass
from math import isfinite

from shards.errors import ModelError
from shards.ranges import STRICT


@dataclass(frozen=True)
class DataMix:
    """Means over the items of a run.

    Attributes:
        images_per_item: images and video frames that an item holds.
        captions_per_item: captions that an item holds.
        caption_tokens: tokens of a caption, [CLS] and [SEP] included.

    Raises:
        ModelError: a mean is negative or no number, all items are empty, or captions have no token.
    """

    __pydantic_config__ = STRICT

    images_per_item: float = 1.0
    captions_per_item: float = 1.0
    caption_tokens: int = 16

    def __post_init__(self) -> None:
        for name in ("images_per_item", "captions_per_item"):
            value = getattr(self, name)
            if not (isfinite(value) and value >= 0):
                raise ModelError(f"mix: {name} is {value}; it is a mean, so give a number from 0 up")
        if self.images_per_item == 0 and self.captions_per_item == 0:
            raise ModelError("mix: items hold neither images nor captions; give one of the two a mean above 0")
        if self.caption_tokens < 1:
            raise ModelError(f"mix: caption_tokens is {self.caption_tokens}; a caption has at least one token")
