"""Examples in a given order, decoded or kept in memory from the epoch before, and the batches made from them.

Batches are cut by position in an epoch's order: a rejected item makes its batch smaller and changes no other.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch

from embedder.batch_schema import LEFT_OUT
from embedder.plugins.train.examples import Tokens, TrainExample, examples_of
from embedder.plugins.train.items import Items, TeacherRow
from embedder.plugins.train.sampler import drawn_captions, epoch_order, num_batches
from embedder.plugins.train.train_config import TrainConfig
from embedder.plugins.train.trainer.batch import TrainBatch

Decode = Callable[[pa.Table], Generator[pa.Table, None, None]]
"""Turns listed items into tables of `EXAMPLES`, one row for each item, in the items' order."""
STALE = ("teacher", "StaleVector", "the teacher's vector is of another content")
Rejects = dict[str, tuple[str, str, str]]
"""Step, error type and error by item_id."""


@dataclass
class ExampleCounts:
    """Counts of the items seen so far: rejected, unpaired, with other content than the teacher's, all."""

    num_items: int
    num_seen: int = 0
    rejects: Rejects = field(default_factory=dict)
    unpaired: set[str] = field(default_factory=set)
    stale: set[str] = field(default_factory=set)

    def count(self, example: TrainExample) -> None:
        """Count one example; each item once."""
        self.num_seen = min(self.num_items, self.num_seen + 1)
        if example.problem == STALE:
            self.stale.add(example.item_id)
        elif example.problem is not None and example.problem[1] not in LEFT_OUT:
            self.rejects[example.item_id] = example.problem
        elif not example.is_pair:
            self.unpaired.add(example.item_id)

    def add(self, other: "ExampleCounts") -> None:
        """Add the counts of some of the same items."""
        self.num_seen = min(self.num_items, self.num_seen + other.num_seen)
        self.rejects |= other.rejects
        self.unpaired |= other.unpaired
        self.stale |= other.stale

    @property
    def reject_fraction(self) -> float:
        """Rejected items over those seen."""
        return len(self.rejects) / max(1, self.num_seen)


@dataclass
class ExampleCache:
    """Source of examples, in the order asked for.

    Decoded examples stay in memory up to `cache_bytes`, so that a small set is decoded once; what doesn't fit is
    decoded again in each epoch. The examples are the same either way.
    """

    decode: Decode
    image_size: int
    cache_bytes: int
    cached_bytes: int = 0
    _cache: dict[str, TrainExample] = field(default_factory=dict)

    @property
    def num_cached(self) -> int:
        """Number of examples in memory."""
        return len(self._cache)

    def examples(self, items: Items) -> Generator[TrainExample, None, None]:
        """Yield an example for each item, in order; RuntimeError if the engine gave other items or another order."""
        ids = items.listing["item_id"].to_pylist()
        missing = [number for number, item_id in enumerate(ids) if item_id not in self._cache]
        with closing(self._decode(items.listing, missing)) as decoded:
            for item_id in ids:
                example = self._cache.get(item_id) or next(decoded, None)
                if example is None or example.item_id != item_id:
                    raise RuntimeError(f"decoding gave {example and example.item_id!r} where {item_id!r} was due")
                if item_id not in self._cache and self.cached_bytes + example.num_bytes <= self.cache_bytes:
                    self._cache[item_id] = example
                    self.cached_bytes += example.num_bytes
                yield example

    def _decode(self, listing: pa.Table, missing: list[int]) -> Generator[TrainExample, None, None]:
        if missing:
            tables = self.decode(listing.take(pa.array(missing)).combine_chunks())
            with closing(tables):
                for table in tables:
                    yield from examples_of(table, self.image_size)


class Pair(NamedTuple):
    """An example with its item's numbers."""

    example: TrainExample
    key: int
    concept: int
    teacher: TeacherRow | None = None


@dataclass(frozen=True)
class SamplerConfig:
    """Settings that decide an epoch's batches, besides the items."""

    batch_size: int
    captions_per_image: int
    seed: int


def sampler_of(config: TrainConfig) -> SamplerConfig:
    """Settings of a run that decide its batches."""
    return SamplerConfig(config.batch_size, config.captions_per_picture, config.train.seed)


def epoch_batches(
    items: Items, cache: ExampleCache, sampler: SamplerConfig, counts: ExampleCounts, *, epoch: int, first: int = 0
) -> Generator[tuple[int, TrainBatch | None], None, None]:
    """Yield the batches of one epoch with their numbers; a batch is None if none of its items can be trained on.

    `first` is the number of the first batch wanted; those before it are neither decoded nor counted. `counts` counts
    every example.
    """
    total = num_batches(len(items), sampler.batch_size)
    order = epoch_order(items.keys, sampler.seed, epoch)[: total * sampler.batch_size]
    chosen = items.take(order[first * sampler.batch_size :])
    with closing(numbered_pairs(chosen, cache, counts)) as pairs:
        for number in range(first, total):
            group = islice(pairs, sampler.batch_size)
            yield number, make_batch([pair for pair in group if pair.example.is_pair], sampler, epoch)


def numbered_pairs(items: Items, cache: ExampleCache, counts: ExampleCounts) -> Generator[Pair, None, None]:
    """Yield examples of the items with their numbers, in the items' order, and count each."""
    teacher = iter(items.teacher or ())
    with closing(cache.examples(items)) as examples:
        for example, key, concept in zip(examples, items.keys.tolist(), items.concepts.tolist(), strict=True):
            pair = checked_pair(example, key, concept, next(teacher, None))
            counts.count(pair.example)
            yield pair


def checked_pair(example: TrainExample, key: int, concept: int, teacher: TeacherRow | None) -> Pair:
    """Pair of an example; if the teacher's vectors are of other content, one that can't be trained on."""
    if teacher is not None and example.problem is None and example.version != teacher.version:
        example = replace(example, problem=STALE)
    return Pair(example, key, concept, teacher)


def make_batch(pairs: Sequence[Pair], sampler: SamplerConfig, epoch: int) -> TrainBatch | None:
    """Batch of images, and of the captions drawn for each; None if there are no pairs."""
    if not pairs:
        return None
    captions, taught = [], []
    for example, key, concept, teacher in pairs:
        for number in drawn_captions(key, len(example.captions), sampler.captions_per_image, sampler.seed, epoch):
            captions.append((example.captions[number], concept))
            if teacher is not None:
                taught.append(teacher.of_caption(number))
    batch = pack_batch(pairs, captions, epoch)
    images = [pair.teacher.image for pair in pairs if pair.teacher is not None]
    if not images:
        return batch
    of_images, of_captions = (torch.from_numpy(np.stack(vectors)) for vectors in (images, taught))
    return replace(batch, teacher_images=of_images, teacher_captions=of_captions)


def pack_batch(pairs: Sequence[Pair], captions: Sequence[tuple[Tokens, int]], epoch: int = 0) -> TrainBatch:
    """Batch of the images of some pairs, and of captions."""
    return TrainBatch(
        pixels=torch.from_numpy(np.stack([pair.example.pixels for pair in pairs if pair.example.pixels is not None])),
        image_concepts=torch.tensor([pair.concept for pair in pairs]),
        token_ids=torch.from_numpy(np.concatenate([tokens for tokens, _ in captions])),
        token_lengths=torch.tensor([len(tokens) for tokens, _ in captions]),
        caption_concepts=torch.tensor([concept for _, concept in captions]),
        image_keys=torch.tensor([pair.key for pair in pairs]),
        epoch=epoch,
    )
