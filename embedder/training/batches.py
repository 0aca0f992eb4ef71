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
    """What became of the items so far."""

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
        """Count what another tally, of some of the same items, has counted."""
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
    """What decides an epoch's batches, beside the items."""

    batch_size: int
    captions_per_picture: int
    seed: int


def epoch_batches(
    items: Items, feed: ExampleCache, draw: SamplerConfig, tally: ExampleCounts, *, epoch: int, first: int = 0
) -> Generator[tuple[int, TrainBatch | None], None, None]:
    """Batches of one epoch with their numbers.

    Args:
        items: all that is trained on.
        feed: decodes them.
        draw: what decides the batches.
        tally: is told of every example.
        epoch: passes over the data so far.
        first: number of the first batch wanted; those before it are neither decoded nor counted.

    Yields:
        The batch's number, and the batch; None where none of its items can be trained on.
    """
    total = num_batches(len(items), draw.batch_size)
    order = epoch_order(items.keys, draw.seed, epoch)[: total * draw.batch_size]
    chosen = items.take(order[first * draw.batch_size :])
    with closing(numbered_pairs(chosen, feed, tally)) as pairs:
        for number in range(first, total):
            group = islice(pairs, draw.batch_size)
            yield number, make_batch([pair for pair in group if pair.example.is_pair], draw, epoch)


def numbered_pairs(items: Items, feed: ExampleCache, tally: ExampleCounts) -> Generator[Pair, None, None]:
    """Items as examples with their numbers, in the items' order, each counted."""
    with closing(feed.examples(items)) as examples:
        for example, key, concept in zip(examples, items.keys.tolist(), items.concepts.tolist(), strict=True):
            tally.count(example)
            yield Pair(example, key, concept)


def make_batch(pairs: Sequence[Pair], draw: SamplerConfig, epoch: int) -> TrainBatch | None:
    """Pictures, and the captions drawn for each."""
    if not pairs:
        return None
    tokens, caption_concepts = [], []
    for example, key, concept in pairs:
        for number in drawn_captions(key, len(example.captions), draw.captions_per_picture, draw.seed, epoch):
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
