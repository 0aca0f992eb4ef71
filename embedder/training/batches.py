"""Batches of one epoch, cut by position in its order: a rejected item leaves its batch smaller and no other changed."""

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from embedder.batch_schema import LEFT_OUT
from embedder.training.example_cache import ExampleCache
from embedder.training.examples import Example
from embedder.training.items import Items
from embedder.training.sampler import drawn_captions, epoch_order, num_batches
from shards.training.batch import TrainBatch

Rejects = dict[str, tuple[str, str, str]]
"""Step, error type and error by item_id."""


@dataclass
class ExampleCounts:
    """Counts of the items seen so far: rejected, unpaired, all."""

    num_items: int
    num_seen: int = 0
    rejects: Rejects = field(default_factory=dict)
    unpaired: set[str] = field(default_factory=set)

    def count(self, example: Example) -> None:
        """Count one example; each item once."""
        self.num_seen = min(self.num_items, self.num_seen + 1)
        if example.problem is not None and example.problem[1] not in LEFT_OUT:
            self.rejects[example.item_id] = example.problem
        elif not example.is_pair:
            self.unpaired.add(example.item_id)

    def add(self, other: "ExampleCounts") -> None:
        """Add the counts of some of the same items."""
        self.num_seen = min(self.num_items, self.num_seen + other.num_seen)
        self.rejects |= other.rejects
        self.unpaired |= other.unpaired

    @property
    def reject_fraction(self) -> float:
        """Rejected items over those seen."""
        return len(self.rejects) / max(1, self.num_seen)


class Pair(NamedTuple):
    """An example with its item's numbers."""

    example: Example
    key: int
    concept: int


@dataclass(frozen=True)
class SamplerConfig:
    """Settings that decide an epoch's batches, beside the items.

    Attributes:
        batch_size: images of a batch.
        captions_per_image: captions drawn for each image.
        seed: of the run.
    """

    batch_size: int
    captions_per_image: int
    seed: int


def epoch_batches(
    items: Items, cache: ExampleCache, sampler: SamplerConfig, counts: ExampleCounts, *, epoch: int, first: int = 0
) -> Generator[tuple[int, TrainBatch | None], None, None]:
    """Batches of one epoch with their numbers.

    Args:
        items: all that is trained on.
        cache: decodes them.
        sampler: decides the batches.
        counts: counts every example.
        epoch: passes over the data so far.
        first: number of the first batch wanted; those before it are neither decoded nor counted.

    Yields:
        The batch's number, and the batch; None where none of its items can be trained on.
    """
    total = num_batches(len(items), sampler.batch_size)
    order = epoch_order(items.keys, sampler.seed, epoch)[: total * sampler.batch_size]
    chosen = items.take(order[first * sampler.batch_size :])
    with closing(numbered_pairs(chosen, cache, counts)) as pairs:
        for number in range(first, total):
            group = islice(pairs, sampler.batch_size)
            yield number, make_batch([pair for pair in group if pair.example.is_pair], sampler, epoch)


def numbered_pairs(items: Items, cache: ExampleCache, counts: ExampleCounts) -> Generator[Pair, None, None]:
    """Examples of the items with their numbers, in the items' order, each counted.

    Args:
        items: in the order wanted.
        cache: decodes them.
        counts: counts every example.
    """
    with closing(cache.examples(items)) as examples:
        for example, key, concept in zip(examples, items.keys.tolist(), items.concepts.tolist(), strict=True):
            counts.count(example)
            yield Pair(example, key, concept)


def make_batch(pairs: Sequence[Pair], sampler: SamplerConfig, epoch: int) -> TrainBatch | None:
    """Batch of images, and of the captions drawn for each; None of no pairs.

    Args:
        pairs: whole examples.
        sampler: decides the captions.
        epoch: passes over the data so far.
    """
    if not pairs:
        return None
    tokens, caption_concepts = [], []
    for example, key, concept in pairs:
        for number in drawn_captions(key, len(example.captions), sampler.captions_per_image, sampler.seed, epoch):
            tokens.append(example.captions[number])
            caption_concepts.append(concept)
    return TrainBatch(
        pixels=torch.from_numpy(np.stack([pair.example.pixels for pair in pairs if pair.example.pixels is not None])),
        image_concepts=torch.tensor([pair.concept for pair in pairs]),
        token_ids=torch.from_numpy(np.concatenate(tokens)),
        token_lengths=torch.tensor([len(each) for each in tokens]),
        caption_concepts=torch.tensor(caption_concepts),
        image_keys=torch.tensor([pair.key for pair in pairs]),
        epoch=epoch,
    )
