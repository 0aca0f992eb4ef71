"""Behind the towers: projection into the common space, one vector a row, length 1. All in float32.

Legend: `F` frames or captions, `R` rows, `D` width of the tower, `E` embedding size.
"""

import torch
from torch import nn

from shards.config import ModelConfig


class ProjectionHead(nn.Module):
    """An optional pooler (dense + tanh) and the projection into the common space."""

    def __init__(self, width: int, embedding_dim: int, *, pooler: bool, bias: bool) -> None:
        super().__init__()
        self.pooler = nn.Linear(width, width) if pooler else None
        self.projection = nn.Linear(width, embedding_dim, bias=bias)

    def forward(self, x_FD: torch.Tensor) -> torch.Tensor:
        """Project pooled tokens; (F, E), of any length."""
        if self.pooler is not None:
            x_FD = torch.tanh(self.pooler(x_FD))
        projected: torch.Tensor = self.projection(x_FD)
        return projected


def build_vision_head(config: ModelConfig) -> ProjectionHead:
    """Build what stands behind the ViT."""
    pooler = config.vision.pooler == "tanh"
    return ProjectionHead(config.vision.width, config.embedding_dim, pooler=pooler, bias=config.projection_bias)


def build_text_head(config: ModelConfig) -> ProjectionHead:
    """Build what stands behind the ALBERT, whose pooler is its own."""
    return ProjectionHead(config.text.hidden_size, config.embedding_dim, pooler=False, bias=config.projection_bias)


def unit_rows(projected_FE: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Average the projections of each row (the frames of a video segment), then bring each to length 1.

    Args:
        projected_FE: projections, row after row.
        lengths: int64 (R,), on the CPU: how many each row has, 1 or more.

    Returns:
        float32 (R, E).
    """
    rows_RE = projected_FE.float()
    if int(lengths.max()) > 1:
        rows_RE = torch.stack([row_FE.mean(0) for row_FE in torch.split(rows_RE, lengths.tolist())])
    return nn.functional.normalize(rows_RE, dim=-1)
