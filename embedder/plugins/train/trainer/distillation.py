"""Losses by which a student learns from a teacher's vectors, and the map between spaces of different width.

The teacher itself is not run: each row of a batch carries the teacher's vector, or NaN where there is none. Vectors are
compared one by one, and by each row's similarities to the other rows of the batch, which need no common space.

Sources: Hinton et al. 2015 for softened targets; Wu et al. 2023 (TinyCLIP) and Yang et al. 2024 (CLIP-KD) for both
losses on twin towers.

Legend: `N` images, `M` captions, `R` rows, `C` columns, `E` embedding size of the student, `F` of the teacher.
"""

import json
import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from embedder.plugins.train.trainer.batch import FeatureBatch, TrainBatch
from embedder.plugins.train.trainer.train_settings import DistillSettings

LEAST_ROWS = 2  # in a similarity matrix: a softmax over one column says nothing


class Distillation(nn.Module):
    """Losses of a batch's embeddings against the teacher's, besides the run's own loss.

    Where the widths differ, one linear map leads from the student's space into the teacher's. Both towers share it and
    it learns with them; it belongs to the training, not to the model.
    """

    def __init__(self, settings: DistillSettings, teacher_dim: int, embedding_dim: int, seed: int) -> None:
        super().__init__()
        self.settings, self.teacher_dim = settings, teacher_dim
        self.teacher_map: nn.Parameter | None = None
        if embedding_dim != teacher_dim:
            generator = torch.Generator().manual_seed(seed)
            rows = torch.randn(teacher_dim, embedding_dim, generator=generator) / math.sqrt(embedding_dim)
            self.teacher_map = nn.Parameter(rows)

    @property
    def identity(self) -> str:
        """Values that a run and its resumption must have in common."""
        return json.dumps({**self.settings.model_dump(), "teacher_dim": self.teacher_dim})

    def forward(
        self,
        images_NE: torch.Tensor | None,
        captions_ME: torch.Tensor | None,
        batch: TrainBatch | FeatureBatch,
        compare_pairs: Callable[[], torch.Tensor],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute the weighted sum of the losses, and each before its weight; a loss without weight is not computed.

        Embeddings are float32 unit rows, (N, E) and (M, E), or None for a side that the batch lacks. `compare_pairs`
        computes the run's own loss.
        """
        weights = self.settings
        sides = [
            known_rows(student, teacher)
            for student, teacher in ((images_NE, batch.teacher_images), (captions_ME, batch.teacher_captions))
            if student is not None and teacher is not None
        ]
        losses: dict[str, torch.Tensor] = {}
        if weights.vectors:
            found = [vector_loss(self._map(student), teacher) for student, teacher in sides if len(student)]
            losses["vector_loss"] = _mean(found, sides)
        if weights.similarities:
            losses["similarity_loss"] = _mean(similarity_losses(sides, weights.temperature), sides)
        if weights.pairs:
            losses["pair_loss"] = compare_pairs()
        by_name = {"vector_loss": weights.vectors, "similarity_loss": weights.similarities, "pair_loss": weights.pairs}
        return torch.stack([by_name[name] * loss for name, loss in losses.items()]).sum(), losses

    def _map(self, student_RE: torch.Tensor) -> torch.Tensor:
        """Student's vectors in the teacher's space, (R, F)."""
        if self.teacher_map is None:
            return student_RE
        return functional.normalize(student_RE @ self.teacher_map.T, dim=-1)


def _mean(losses: list[torch.Tensor], sides: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Mean of losses; if no row can be compared, a zero that still has a gradient."""
    if losses:
        return torch.stack(losses).mean()
    return torch.stack([student.sum() * 0 for student, _ in sides]).sum() if sides else torch.zeros(())


def known_rows(student_RE: torch.Tensor, teacher_RF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the rows of both for which the teacher has a vector; the teacher's are moved to the student's device."""
    teacher = teacher_RF.to(student_RE.device)
    is_known = ~teacher.isnan().any(1)
    return student_RE[is_known], teacher[is_known]


def vector_loss(student_RF: torch.Tensor, teacher_RF: torch.Tensor) -> torch.Tensor:
    """Compute the mean over rows of one minus the cosine of unit rows (half their squared distance); 0 for no rows."""
    return (1 - (student_RF * teacher_RF).sum(-1)).sum() / max(1, len(student_RF))


def similarity_losses(sides: list[tuple[torch.Tensor, torch.Tensor]], temperature: float) -> list[torch.Tensor]:
    """Compute the losses, in nats, of all similarity matrices of a batch that are large enough.

    They are between images and captions, both ways, and within each side, where a row's similarity to itself is left
    out. Each of the `sides` (images, captions) has the student's vectors, (R, E), and the teacher's, (R, F). Cosines
    are divided by `temperature`.
    """
    losses = []
    for place, (student, teacher) in enumerate(sides):
        for other, (student_columns, teacher_columns) in enumerate(sides):
            found, wanted = student @ student_columns.T, teacher @ teacher_columns.T
            if place == other:
                found, wanted = without_diagonal(found), without_diagonal(wanted)
            if len(found) and found.shape[1] >= LEAST_ROWS:
                losses.append(row_divergence(found / temperature, wanted / temperature))
    return losses


def without_diagonal(square_RR: torch.Tensor) -> torch.Tensor:
    """Leave out the similarity of each row to itself; (R, R) to (R, R - 1)."""
    size = len(square_RR)
    if size < LEAST_ROWS:
        return square_RR[:, :0]
    return square_RR.flatten()[1:].view(size - 1, size + 1)[:, :-1].reshape(size, size - 1)


def row_divergence(student_RC: torch.Tensor, teacher_RC: torch.Tensor) -> torch.Tensor:
    """Compute the Kullback-Leibler divergence of each row's softmax from the teacher's; mean over rows."""
    found, wanted = functional.log_softmax(student_RC, dim=1), functional.log_softmax(teacher_RC, dim=1)
    return functional.kl_div(found, wanted, reduction="batchmean", log_target=True)
