"""Recall on held-out items: their captions as queries for their images."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from embedder.plugins.train.batches import Pair, pack_batch
from embedder.plugins.train.trainer.forward import caption_features, image_features
from embedder.plugins.train.trainer.trainer import Trainer
from embedder.retrieval.rank_metrics import retrieval_at

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
        """Keep pairs, of which there must be at least one."""
        texts = {(pair.concept, tuple(caption)): caption for pair in pairs for caption in pair.example.captions}
        self.batch = pack_batch(pairs, [(caption, concept) for (concept, _), caption in texts.items()])
        self._features: tuple[torch.Tensor, torch.Tensor] | None = None

    def measure(self, trainer: Trainer) -> ValidationRecall:
        """Measure R@k with the averaged weights, which are the ones that are exported."""
        if trainer.settings.what == "projections":
            images, captions = self._project(trainer)
        else:
            images = trainer.encode_images(self.batch.pixels)
            captions = trainer.encode_captions(self.batch.token_ids, self.batch.token_lengths)
        queries, targets = self.batch.caption_concepts.numpy(), self.batch.image_concepts.numpy()
        found = retrieval_at(captions.numpy(), queries, images.numpy(), targets)
        return ValidationRecall(found[1], found[5], found[10], len(queries), len(targets))

    @torch.inference_mode()
    def _project(self, trainer: Trainer) -> tuple[torch.Tensor, torch.Tensor]:
        """Project embeddings; frozen towers run only once, since only the projections change between measurements."""
        towers, batch = trainer.averaged, self.batch
        if self._features is None:
            lengths = torch.split(batch.token_lengths, ROWS)
            tokens = torch.split(batch.token_ids, [int(each.sum()) for each in lengths])
            of_images = [image_features(towers, pixels) for pixels in torch.split(batch.pixels, ROWS)]
            of_captions = [caption_features(towers, *each) for each in zip(tokens, lengths, strict=True)]
            self._features = torch.cat(of_images), torch.cat(of_captions)
        heads = towers.vision_head, towers.text_head
        images, captions = (
            functional.normalize(head(features), dim=-1).cpu()
            for head, features in zip(heads, self._features, strict=True)
        )
        return images, captions
