"""Projection heads: from a tower's pooled tokens to one unit vector per row of the common space. All in float32.

Legend: `F` frames or captions, `R` rows, `D` width of the tower, `E` embedding size.
"""

import torch
from torch import nn

from shards.config import ModelConfig


class ProjectionHead(nn.Module):
    """Optional pooler (dense + tanh) and the projection into the common space.

    Args:
        width: width of the tower, D.
        embedding_dim: size of the common space, E.
        pooler: whether there is one.
        bias: whether the projection has one.
    """

    def __init__(self, width: int, embedding_dim: int, *, pooler: bool, bias: bool) -> None:
        super().__init__()
        self.pooler = nn.Linear(width, width) if pooler else None
        self.projection = nn.Linear(width, embedding_dim, bias=bias)

    def forward(self, x_FD: torch.Tensor) -> torch.Tensor:
        """Project pooled tokens, (F, D) to (F, E), not normalised."""
        if self.pooler is not None:
            x_FD = torch.tanh(self.pooler(x_FD))
        projected: torch.Tensor = self.projection(x_FD)
        return projected


def build_head(config: ModelConfig, side: str) -> ProjectionHead:
    """Build the projection head of one tower."""
    tower = config.towers[side]
    return ProjectionHead(tower.dim, config.embedding_dim, pooler=tower.has_head_pooler, bias=config.projection_bias)


def unit_rows(projected_FE: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Average the projections of each row (the frames of a video segment), then normalise to length 1.

    Args:
        projected_FE: projections, row after row.
        lengths: int64 (R,), on the CPU: number of projections of each row, 1 or more.

    Returns:
        float32 (R, E).
    """
    rows_RE = projected_FE.float()
    if int(lengths.max()) > 1:
        rows_RE = torch.stack([row_FE.mean(0) for row_FE in torch.split(rows_RE, lengths.tolist())])
    return nn.functional.normalize(rows_RE, dim=-1)
