"""Loss of one batch's embeddings, and the parameters that are trained next to the towers.

A concept may have several images and several captions. Losses are in float32, whatever the compute dtype.

Legend: `N` images, `M` captions, `C` concepts, `E` embedding size.
"""

import math

import torch
from torch import nn
from torch.nn import functional

from embedder.plugins.train.trainer.batch import FeatureBatch, TrainBatch
from embedder.plugins.train.trainer.train_settings import TrainSettings
from shards.fresh import INITIAL_LOGIT_SCALE
from shards.model_errors import ModelError

# SigLIP starts by taking all pairs for negatives. Source: Zhai et al. 2023, section 3.
INITIAL_SIGLIP_BIAS = -10.0


class Objective(nn.Module):
    """Loss with its own parameters: the temperature, SigLIP's bias, the concepts' prototypes."""

    def __init__(self, settings: TrainSettings, embedding_dim: int) -> None:
        super().__init__()
        self.settings = settings
        self.logit_scale = nn.Parameter(torch.tensor(INITIAL_LOGIT_SCALE))
        self.logit_bias = nn.Parameter(torch.tensor(INITIAL_SIGLIP_BIAS)) if settings.loss == "siglip" else None
        if settings.loss == "concepts":
            generator = torch.Generator().manual_seed(settings.seed)
            # About unit length: AdamW's steps have the size of the learning rate, so longer rows would hardly turn.
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
        """Compute the loss of unit embeddings, float32 (N, E) and (M, E); None for a side that the batch lacks.

        Raises `ModelError` if a pair loss got only one side.
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
        if self.logit_bias is not None:
            return siglip_loss(logits + self.logit_bias, positives)
        return clip_loss(logits, positives)

    def _concepts(
        self,
        images_NE: torch.Tensor | None,
        captions_ME: torch.Tensor | None,
        batch: TrainBatch | FeatureBatch,
        scale: torch.Tensor,
    ) -> torch.Tensor:
        """Sum the losses of the batch's sides, each against the prototypes."""
        prototypes = functional.normalize(self.prototypes, dim=-1)
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


def positives_of(row_concepts: torch.Tensor, column_concepts: torch.Tensor) -> torch.Tensor:
    """Compare the concepts of all pairs, (N,) and (M,); bool (N, M)."""
    return row_concepts[:, None] == column_concepts[None]


def clip_loss(logits_NM: torch.Tensor, positives_NM: torch.Tensor) -> torch.Tensor:
    """Compute CLIP's loss: softmax over captions for each image and over images for each caption; mean of both.

    A row's target is spread evenly over its positives. A row without positives has no target and doesn't count.

    Source: Radford et al. 2021 (CLIP); several positives as in Khosla et al. 2020, `L_out`.
    """
    return (_spread_softmax(logits_NM, positives_NM) + _spread_softmax(logits_NM.T, positives_NM.T)) / 2


def _spread_softmax(logits: torch.Tensor, positives: torch.Tensor) -> torch.Tensor:
    log_shares = functional.log_softmax(logits.float(), dim=1)
    num_positives = positives.sum(1)
    of_rows = -(log_shares * positives).sum(1) / num_positives.clamp(min=1)
    return of_rows.sum() / (num_positives > 0).sum().clamp(min=1)


def siglip_loss(logits_NM: torch.Tensor, positives_NM: torch.Tensor) -> torch.Tensor:
    """Compute SigLIP's loss: a sigmoid for each pair, whether it is of one concept; summed over an image's captions.

    Source: Zhai et al. 2023 (SigLIP), algorithm 1: the sum over all pairs, divided by the number of images.
    """
    signs = positives_NM.float() * 2 - 1
    return -functional.logsigmoid(signs * logits_NM.float()).sum() / max(1, len(logits_NM))


def concept_loss(
    logits_NC: torch.Tensor, concepts: torch.Tensor, positives_NC: torch.Tensor | None = None, smoothing: float = 0.0
) -> torch.Tensor:
    """Compute the softmax loss over all concepts' prototypes.

    `concepts` are the correct ones, int64 (N,). Where several are correct, `positives_NC` is bool (the target is spread
    evenly over them) or float32 (the share of each, summing to 1). `smoothing` is the share of the target that is
    spread over all concepts.
    """
    if positives_NC is None:
        return functional.cross_entropy(logits_NC.float(), concepts, label_smoothing=smoothing)
    targets = positives_NC.float() / positives_NC.sum(1, keepdim=True).clamp(min=1)
    return functional.cross_entropy(logits_NC.float(), targets, label_smoothing=smoothing)


def alignment_loss(
    captions_ME: torch.Tensor, prototypes_CE: torch.Tensor, concepts: torch.Tensor, positives_MC: torch.Tensor | None
) -> torch.Tensor:
    """Compute one minus the cosine to the mean of the correct prototypes; the mean over captions.

    A softmax only asks that the correct prototype is nearer than all others, however far it is. But captions far from
    the mean of their images find images of another style badly. Captions and prototypes are unit rows. `concepts` are
    the correct ones, int64 (M,). Where several are correct, `positives_MC` is bool (M, C), or float32 with the weight
    of each; else None.
    """
    if positives_MC is None:
        targets = prototypes_CE[concepts]
    else:
        targets = functional.normalize(positives_MC.float() @ prototypes_CE, dim=-1)
    return (1 - (captions_ME * targets).sum(-1)).mean()
