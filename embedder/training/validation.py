"""Recall on held-out items: their captions as queries for their images."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from embedder.training.batches import Pair
from embedder.training.sampler import Keys
from shards.training.batch import TrainBatch
from shards.training.forward import caption_features, image_features
from shards.training.metrics import retrieval_at
from shards.training.trainer import Trainer

ROWS = 256  # that the towers take at a time


@dataclass(frozen=True)
class ValidationRecall:
    """R@k, text to image; `num_pictures` is a key of metrics.jsonl."""

    r_at_1: float
    r_at_5: float
    r_at_10: float
    num_queries: int
    num_pictures: int


class Validation:
    """Held-out images, decoded once, and their captions, each text once for each concept."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        """Keep pairs; at least one."""
        texts = {(pair.concept, tuple(caption)): caption for pair in pairs for caption in pair.example.captions}
        pixels = [pair.example.pixels for pair in pairs if pair.example.pixels is not None]
        self.batch = TrainBatch(
            pixels=torch.from_numpy(np.stack(pixels)),
            image_concepts=torch.tensor([pair.concept for pair in pairs]),
            token_ids=torch.from_numpy(np.concatenate(list(texts.values()))),
            token_lengths=torch.tensor([len(caption) for caption in texts.values()]),
            caption_concepts=torch.tensor([concept for concept, _ in texts]),
        )
        self._features: tuple[torch.Tensor, torch.Tensor] | None = None

    def measure(self, trainer: Trainer) -> ValidationRecall:
        """R@k with the averaged weights, which are the ones that are exported."""
        images, captions = (
            self._projected(trainer) if trainer.settings.what == "projections" else self._encoded(trainer)
        )
        queries, targets = _numbers(self.batch.caption_concepts), _numbers(self.batch.image_concepts)
        found = retrieval_at(captions.numpy(), queries, images.numpy(), targets)
        return ValidationRecall(found[1], found[5], found[10], len(queries), len(targets))

    def _encoded(self, trainer: Trainer) -> tuple[torch.Tensor, torch.Tensor]:
        captions = trainer.encode_captions(self.batch.token_ids, self.batch.token_lengths)
        return trainer.encode_images(self.batch.pixels), captions

    @torch.inference_mode()
    def _projected(self, trainer: Trainer) -> tuple[torch.Tensor, torch.Tensor]:
        """Frozen towers run once; only the projections differ from one measurement to the next."""
        if self._features is None:
            self._features = self._run_towers(trainer)
        heads = trainer.averaged.vision_head, trainer.averaged.text_head
        images, captions = (
            functional.normalize(head(features), dim=-1).cpu()
            for head, features in zip(heads, self._features, strict=True)
        )
        return images, captions

    def _run_towers(self, trainer: Trainer) -> tuple[torch.Tensor, torch.Tensor]:
        towers, tokens = trainer.averaged, self.batch.token_ids
        images = [image_features(towers, rows) for rows in torch.split(self.batch.pixels, ROWS)]
        captions = []
        for lengths in torch.split(self.batch.token_lengths, ROWS):
            num_tokens = int(lengths.sum())
            captions.append(caption_features(towers, tokens[:num_tokens], lengths))
            tokens = tokens[num_tokens:]
        return torch.cat(images), torch.cat(captions)


def _numbers(concepts: torch.Tensor) -> Keys:
    return np.asarray(concepts.numpy(), np.int64)
