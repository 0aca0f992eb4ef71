"""Contrastive losses in which a concept may have several images and several captions.

Legend: `N` images, `M` captions, `C` concepts, `E` embedding size. All in float32, whatever the compute dtype.
"""

import torch
from torch.nn import functional

# SigLIP starts with all pairs taken for negatives. Source: Zhai et al. 2023, section 3.
INITIAL_SIGLIP_BIAS = -10.0


def positives_of(row_concepts: torch.Tensor, column_concepts: torch.Tensor) -> torch.Tensor:
    """Compare the concepts of all pairs, (N,) and (M,); bool (N, M)."""
    return row_concepts[:, None] == column_concepts[None]


def clip_loss(logits_NM: torch.Tensor, positives_NM: torch.Tensor) -> torch.Tensor:
    """Compute CLIP's loss: softmax over captions for each image and over images for each caption; mean of both.

    A row's target is spread evenly over its positives; with one positive a row this is CLIP's loss. A row without a
    positive has no target and doesn't count.

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

    Args:
        logits_NC: scores against each prototype.
        concepts: int64 (N,), the correct ones.
        positives_NC: bool (N, C), where several are correct; the target is spread evenly over them.
        smoothing: share of the target that is spread over all concepts.
    """
    if positives_NC is None:
        return functional.cross_entropy(logits_NC.float(), concepts, label_smoothing=smoothing)
    targets = positives_NC.float() / positives_NC.sum(1, keepdim=True).clamp(min=1)
    return functional.cross_entropy(logits_NC.float(), targets, label_smoothing=smoothing)


def alignment_loss(
    captions_ME: torch.Tensor, prototypes_CE: torch.Tensor, concepts: torch.Tensor, positives_MC: torch.Tensor | None
) -> torch.Tensor:
    """Compute one minus the cosine to the mean of the correct prototypes; the mean over captions.

    A softmax only asks that the correct prototype is nearer than all others, however far it is; captions far from the
    mean of their images find images of another style badly.

    Args:
        captions_ME: float32 (M, E), unit rows.
        prototypes_CE: float32 (C, E), unit rows.
        concepts: int64 (M,), the correct ones.
        positives_MC: bool (M, C), where several are correct; else None.
    """
    if positives_MC is None:
        targets = prototypes_CE[concepts]
    else:
        targets = functional.normalize(positives_MC.float() @ prototypes_CE, dim=-1)
    return (1 - (captions_ME * targets).sum(-1)).mean()
