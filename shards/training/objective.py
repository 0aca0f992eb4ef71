"""Loss of one batch's embeddings, and the parameters that are trained beside the towers.

Legend: `N` images, `M` captions, `C` concepts, `E` embedding size.
"""

import math

import torch
from torch import nn

from shards.errors import ModelError
from shards.towers import INITIAL_LOGIT_SCALE
from shards.training.batch import FeatureBatch, TrainBatch
from shards.training.losses import (
    INITIAL_SIGLIP_BIAS,
    alignment_loss,
    clip_loss,
    concept_loss,
    positives_of,
    siglip_loss,
)
from shards.training.settings import TrainSettings


class Objective(nn.Module):
    """Loss with its own parameters: the temperature, SigLIP's bias, the concepts' prototypes."""

    def __init__(self, settings: TrainSettings, embedding_dim: int) -> None:
        super().__init__()
        self.settings = settings
        self.logit_scale = nn.Parameter(torch.tensor(INITIAL_LOGIT_SCALE))
        if settings.loss == "siglip":
            self.logit_bias = nn.Parameter(torch.tensor(INITIAL_SIGLIP_BIAS))
        if settings.loss == "concepts":
            generator = torch.Generator().manual_seed(settings.seed)
            # About unit length: AdamW's steps are of the learning rate's size, so longer rows would hardly turn.
            rows = torch.randn(settings.num_concepts, embedding_dim, generator=generator) / math.sqrt(embedding_dim)
            self.prototypes = nn.Parameter(rows)

    def set_prototypes(self, prototypes_CE: torch.Tensor) -> None:
        """Replace the prototypes; (C, E), of any norm."""
        with torch.no_grad():
            self.prototypes.copy_(prototypes_CE)

    def clip_scale(self) -> None:
        """Clip the inverse temperature, as CLIP does."""
        with torch.no_grad():
            self.logit_scale.clamp_(max=math.log(self.settings.max_logit_scale))

    def forward(
        self, images_NE: torch.Tensor | None, captions_ME: torch.Tensor | None, batch: TrainBatch | FeatureBatch
    ) -> torch.Tensor:
        """Compute the loss of unit embeddings.

        Args:
            images_NE: float32 (N, E); None where the batch has no images.
            captions_ME: float32 (M, E); None where it has no captions.
            batch: the concepts of both.

        Raises:
            ModelError: a pair loss got one side only.
        """
        scale = self.logit_scale.exp()
        if self.settings.loss == "concepts":
            return self._concepts(images_NE, captions_ME, batch, scale)
        if images_NE is None or captions_ME is None:
            raise ModelError(
                f'a batch without {"images" if images_NE is None else "captions"}: loss "{self.settings.loss}" '
                "compares both; give batches with both"
            )
        device = images_NE.device
        positives = positives_of(batch.image_concepts.to(device), batch.caption_concepts.to(device))
        logits = images_NE @ captions_ME.T * scale
        if self.settings.loss == "siglip":
            return siglip_loss(logits + self.logit_bias, positives)
        return clip_loss(logits, positives)

    def _concepts(
        self,
        images_NE: torch.Tensor | None,
        captions_ME: torch.Tensor | None,
        batch: TrainBatch | FeatureBatch,
        scale: torch.Tensor,
    ) -> torch.Tensor:
        """Sum of the losses of the sides that the batch has, each against the prototypes."""
        prototypes = nn.functional.normalize(self.prototypes, dim=-1)
        smoothing, losses = self.settings.label_smoothing, []
        if images_NE is not None:
            concepts = batch.image_concepts.to(images_NE.device)
            losses.append(concept_loss(images_NE @ prototypes.T * scale, concepts, None, smoothing))
        if captions_ME is not None:
            positives = batch.caption_positives if isinstance(batch, TrainBatch) else None
            positives = None if positives is None else positives.to(captions_ME.device)
            concepts = batch.caption_concepts.to(captions_ME.device)
            losses.append(concept_loss(captions_ME @ prototypes.T * scale, concepts, positives, smoothing))
            if self.settings.alignment:
                aligned = alignment_loss(captions_ME, prototypes, concepts, positives)
                losses.append(self.settings.alignment * aligned)
        if not losses:
            raise ModelError("a batch without images and captions; give batches with at least one side")
        return torch.stack(losses).sum()
