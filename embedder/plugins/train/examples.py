"""Decode step of training: the pipeline's own decoder, and all captions of an item as token ids.

One row is one item: `item_id`, `pixels` (uint8, H x W x 3), `captions` (a list of token ids for each caption),
`content_version` (hash of its content), and, if something is wrong with it, `step`, `error_type` and `error`. Arrow in,
Arrow out, so that it runs in this process or in tasks of Ray Data.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from embedder.batch_schema import CARRIED, TENSOR
from embedder.steps.caption_encoder import CaptionEncoder
from embedder.steps.decode import ItemReader
from embedder.steps.item_decoder import DecodeSpec

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
Tokens = np.ndarray[Any, np.dtype[np.int32]]

EXAMPLES = pa.schema(
    {
        "item_id": pa.string(),
        "pixels": TENSOR,
        "captions": pa.list_(pa.list_(pa.int32())),
        "step": pa.string(),
        "error_type": pa.string(),
        "error": pa.string(),
        "content_version": pa.string(),
    }
)
TAG_SEPARATOR = ", "
NO_CLIPS = ("decode", "NotAPicture", "training takes images; clips are embedded, not trained on")


@dataclass(frozen=True)
class ExampleSpec:
    """Settings of a decode task of training.

    `texts` are columns with further captions, `tag_sets` are columns with lists of tags; each list is one caption.
    """

    decode: DecodeSpec
    texts: tuple[str, ...] = ()
    tag_sets: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrainExample:
    """One item as the batches take it.

    Pixels are uint8 (H, W, 3), None if it has no image; captions are int32 token ids. `problem` is the step, type and
    message if it can't be trained on; `version` is the hash of its content.
    """

    item_id: str
    pixels: Pixels | None
    captions: tuple[Tokens, ...]
    problem: tuple[str, str, str] | None = None
    version: str | None = None

    @property
    def is_pair(self) -> bool:
        """Whether it has an image and a caption."""
        return self.problem is None and self.pixels is not None and len(self.captions) > 0

    @property
    def num_bytes(self) -> int:
        """Memory of its arrays."""
        pixels = 0 if self.pixels is None else self.pixels.nbytes
        return pixels + sum(caption.nbytes for caption in self.captions)


@lru_cache(maxsize=1)
def _tools_for(spec: ExampleSpec) -> tuple[ItemReader, CaptionEncoder]:
    """Decoder of this process: consecutive tasks in one worker share its sandbox and tokeniser."""
    if spec.decode.tokenizer_json is None:
        raise ValueError("training needs a text tower; `check_trainable` comes before")
    return ItemReader(spec.decode), CaptionEncoder(
        spec.decode.tokenizer_json,
        spec.decode.max_caption_tokens,
        spec.decode.caption_end_id,
        spec.decode.caption_prompt,
    )


def decode_examples(listing: pa.Table, *, spec: ExampleSpec) -> Iterator[pa.Table]:
    """Decode listed items, in their order, into tables of EXAMPLES."""
    reader, encoder = _tools_for(spec)
    for table in reader.decode(listing, lambda: False):
        rows = [_example_row(row, encoder, spec) for row in table.drop_columns(["trace"]).to_pylist()]
        yield pa.Table.from_pylist([row for row in rows if row is not None], EXAMPLES)


def _example_row(row: dict[str, Any], encoder: CaptionEncoder, spec: ExampleSpec) -> dict[str, Any] | None:
    """Example of an item, made from its last row, which carries its problem; only a clip has other rows."""
    if row["num_vectors"] is None:
        return None
    is_clip = row["start_s"] is not None or row["num_vectors"] > 1
    step, error_type, error = NO_CLIPS if is_clip else (row["step"], row["error_type"], row["error"])
    texts = [text for column in spec.texts for text in as_texts(row[CARRIED + column])]
    texts += [TAG_SEPARATOR.join(as_texts(row[CARRIED + column])) for column in spec.tag_sets]
    own = [] if row["token_ids"] is None else [np.frombuffer(row["token_ids"], np.int32)]
    return {
        "item_id": row["item_id"],
        "pixels": None if is_clip else row["pixels"],
        "captions": [*own, *(encoder.encode(text) for text in dict.fromkeys(texts) if text)],
        "step": step,
        "error_type": error_type,
        "error": error,
        "content_version": row["content_version"],
    }


def as_texts(value: Any) -> list[str]:
    """Texts of a value: one for a string, several for a list, none for an empty one or NaN."""
    values = value if isinstance(value, list) else [value]
    return [text for each in values if each is not None and each == each and (text := str(each).strip())]  # noqa: PLR0124


def examples_of(table: pa.Table, image_size: int) -> Iterator[TrainExample]:
    """Rows of EXAMPLES as arrays; identical captions count once."""
    for row in table.to_pylist():
        pixels = row["pixels"]
        captions = dict.fromkeys(tuple(caption) for caption in row["captions"])
        problem = None if row["error_type"] is None else (row["step"], row["error_type"], row["error"])
        yield TrainExample(
            item_id=row["item_id"],
            pixels=None if pixels is None else np.frombuffer(pixels, np.uint8).reshape(image_size, image_size, 3),
            captions=tuple(np.array(caption, np.int32) for caption in captions),
            problem=problem,
            version=row["content_version"],
        )
