"""Training of the projections only: the frozen towers run once over all items, and epochs use their outputs."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from embedder.plugins.train.batches import ExampleCache, ExampleCounts, SamplerConfig, numbered_pairs, pack_batch
from embedder.plugins.train.items import Items, Vector
from embedder.plugins.train.sampler import Keys, drawn_captions, epoch_order, num_batches
from embedder.plugins.train.trainer.batch import FeatureBatch
from embedder.plugins.train.trainer.trainer import Trainer


@dataclass(frozen=True)
class Features:
    """Tower outputs of all whole items: `images`, float32 (N, D), and `captions`, float32 (M, D'), item after item.

    `rows`, int64 (items,), is each item's row in `images`, -1 if it can't be trained on; `starts`, int64 (N + 1,), is
    where each item's captions start.
    """

    rows: Keys
    images: torch.Tensor
    captions: torch.Tensor
    starts: Keys


def run_towers(
    items: Items,
    cache: ExampleCache,
    trainer: Trainer,
    batch_size: int,
    counts: ExampleCounts,
    should_stop: Callable[[], bool],
) -> Features:
    """Encode every image and every caption once, without augmentation; fewer of them when asked to stop.

    `batch_size` is in items of one forward pass; `counts` counts every example.
    """
    rows = np.full(len(items), -1, np.int64)
    sizes = [0]
    images: list[torch.Tensor] = []
    captions: list[torch.Tensor] = []
    numbered = enumerate(numbered_pairs(items, cache, counts))
    while not should_stop() and (group := list(islice(numbered, batch_size))):
        whole = [(position, pair) for position, pair in group if pair.example.is_pair]
        if not whole:
            continue
        pairs = [pair for _, pair in whole]
        all_captions = [(caption, pair.concept) for pair in pairs for caption in pair.example.captions]
        features = trainer.tower_features(pack_batch(pairs, all_captions))
        rows[[position for position, _ in whole]] = np.arange(len(sizes) - 1, len(sizes) - 1 + len(whole))
        images.append(features.image_features.cpu())
        captions.append(features.caption_features.cpu())
        sizes.extend(len(pair.example.captions) for pair in pairs)
    width = trainer.config.required_vision.pooled_dim, trainer.config.required_text.pooled_dim
    return Features(
        rows,
        torch.cat(images) if images else torch.empty(0, width[0]),
        torch.cat(captions) if captions else torch.empty(0, width[1]),
        np.cumsum(sizes),
    )


def feature_batches(
    items: Items, features: Features, sampler: SamplerConfig, *, epoch: int, first: int = 0
) -> Generator[tuple[int, FeatureBatch | None], None, None]:
    """Batches of `epoch_batches`, with tower outputs instead of pixels and token ids."""
    order = epoch_order(items.keys, sampler.seed, epoch)
    for number in range(first, num_batches(len(items), sampler.batch_size)):
        positions = order[number * sampler.batch_size : (number + 1) * sampler.batch_size]
        whole = positions[features.rows[positions] >= 0]
        yield number, _feature_batch(items, features, whole, sampler, epoch) if len(whole) else None


def _feature_batch(
    items: Items, features: Features, positions: Keys, sampler: SamplerConfig, epoch: int
) -> FeatureBatch:
    captions: list[int] = []
    caption_concepts: list[int] = []
    taught: list[Vector] = []
    of_items = iter(items.teacher.take(positions) if items.teacher is not None else ())
    images: list[Vector] = []
    for position in positions:
        row = features.rows[position]
        start, stop = int(features.starts[row]), int(features.starts[row + 1])
        key, num_drawn = int(items.keys[position]), sampler.captions_per_image
        drawn = drawn_captions(key, stop - start, num_drawn, sampler.seed, epoch)
        captions.extend(start + number for number in drawn)
        caption_concepts.extend([items.concepts[position]] * len(drawn))
        if (teacher := next(of_items, None)) is not None:
            images.append(teacher.image)
            taught.extend(teacher.of_caption(number) for number in drawn)
    return FeatureBatch(
        image_features=features.images[torch.from_numpy(features.rows[positions])],
        image_concepts=torch.from_numpy(items.concepts[positions]),
        caption_features=features.captions[torch.tensor(captions)],
        caption_concepts=torch.tensor(caption_concepts),
        teacher_images=torch.from_numpy(np.stack(images)) if images else None,
        teacher_captions=torch.from_numpy(np.stack(taught)) if images else None,
    )
