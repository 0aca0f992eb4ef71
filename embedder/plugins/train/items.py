"""Items to train on and items to measure on: listing, concepts, and the split between the two."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.batch_schema import CARRIED
from embedder.errors import SourceError
from embedder.plugins.train.sampler import Keys, epoch_order, is_held_out
from embedder.plugins.train.train_config import TrainConfig
from embedder.plugins.train.trainer.batch import item_key
from embedder.quantities import plural
from embedder.sources.listing import list_sources
from embedder.sources.selection import LeftOut

Vector = np.ndarray[tuple[int], np.dtype[np.float32]]
Vectors = np.ndarray[Any, np.dtype[np.float32]]

LOG = logging.getLogger(__name__)
VALIDATION_EPOCH = -1
OWN_COLUMNS = ("item_id", "caption")  # of every listing; concepts that need no carried column


class TeacherRow(NamedTuple):
    """A teacher's vectors of one item, float32 (F,), NaN where it has none, and the content that they are of."""

    image: Vector
    caption: Vector
    version: str

    def of_caption(self, number: int) -> Vector:
        """Vector of one of the item's captions: the teacher knows only its own, which comes first."""
        return np.full_like(self.caption, np.nan) if number else self.caption


@dataclass(frozen=True)
class TeacherVectors:
    """A teacher's vectors, float32 (T, F), unit rows or NaN where there is none; `rows` is each item's row."""

    images: Vectors
    captions: Vectors
    versions: pa.Array
    rows: Keys

    @property
    def dim(self) -> int:
        """Size of the teacher's space, F."""
        return int(self.images.shape[1])

    def take(self, positions: Keys) -> "TeacherVectors":
        """Vectors of the items at these positions."""
        return replace(self, rows=self.rows[positions])

    def __iter__(self) -> Iterator[TeacherRow]:
        versions = self.versions.take(pa.array(self.rows)).to_pylist()
        for row, version in zip(self.rows.tolist(), versions, strict=True):
            yield TeacherRow(self.images[row], self.captions[row], version)


@dataclass(frozen=True)
class Items:
    """Listed items, with carried columns of concepts and texts, and numbers: `keys` from item_id, equal `concepts`.

    Both are int64 (items,). `teacher` has vectors to learn from; None without a teacher.
    """

    listing: pa.Table
    keys: Keys
    concepts: Keys
    teacher: TeacherVectors | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, positions: Keys) -> "Items":
        """The items at these positions, in this order."""
        teacher = None if self.teacher is None else self.teacher.take(positions)
        return Items(self.listing.take(pa.array(positions)), self.keys[positions], self.concepts[positions], teacher)


def list_items(config: TrainConfig) -> Items:
    """List all items of all sources; SourceError if one can't be listed or lacks a column, or there are no items."""
    columns = {*config.texts, *config.tag_sets, *({config.concept} - set(OWN_COLUMNS))}
    own = (str(Path(config.out).expanduser().absolute()),)
    sources = [
        source.model_copy(update={"carryover": (*source.carryover, *sorted(columns - set(source.carryover)))})
        for source in config.source
    ]
    left_out = LeftOut()
    tables = list(list_sources(sources, own=own, left_out=left_out))
    for line in left_out.lines():
        LOG.info(line)
    if not any(table.num_rows for table in tables):
        paths = ", ".join(source.path for source in config.source)
        raise SourceError(f"source {paths}: nothing is in it; check the path, or whether a disk is mounted")
    listing = pa.concat_tables(tables).combine_chunks()
    return Items(listing, _keys(listing["item_id"].to_pylist()), _keys(_concepts(listing, config.concept)))


def _concepts(listing: pa.Table, column: str) -> list[str]:
    """Each item's concept; an item without one is its own concept."""
    ids = [f"item:{item_id}" for item_id in listing["item_id"].to_pylist()]
    if column == "item_id":
        return ids
    if column == "caption" and listing["caption_uri"].null_count < len(listing):
        raise SourceError('concept "caption": some captions are separate files; name a column, or leave `concept` out')
    values = listing[column if column in OWN_COLUMNS else CARRIED + column]
    try:
        texts = pc.cast(values, pa.string()).to_pylist()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        found = f"concept column {column!r} is {values.type}"
        raise SourceError(f"{found}; name one with a single value in each row, text or number") from None
    lacks = pc.is_null(values, nan_is_null=True).to_pylist()
    return [
        own if no or not text.strip() else f"concept:{text}" for own, no, text in zip(ids, lacks, texts, strict=True)
    ]


def _keys(texts: Iterable[str]) -> Keys:
    return np.array([item_key(text) for text in texts], np.int64)


def split_items(items: Items, config: TrainConfig) -> tuple[Items, Items]:
    """Split into items to train on (SourceError if none is left), and at most `validation.max_items` to measure on."""
    held_out = _held_out(items, config)
    train, validation = items.take(np.flatnonzero(~held_out)), items.take(np.flatnonzero(held_out))
    if len(train) < 2:
        raise SourceError(
            f"{plural(len(items), 'item')} listed, {len(validation):,} held out: too few are left to train on; "
            "lower validation.fraction, or add a source"
        )
    order = epoch_order(validation.keys, config.train.seed, VALIDATION_EPOCH)[: config.validation.max_items]
    return train, validation.take(order)


def _held_out(items: Items, config: TrainConfig) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    if config.validation.source is None:
        return is_held_out(items.concepts, config.validation.fraction, config.train.seed)
    is_source = pc.equal(items.listing["source"], config.validation.source)
    return np.asarray(is_source.to_numpy(zero_copy_only=False), np.bool_)
