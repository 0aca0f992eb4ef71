"""Projection heads: from a tower's pooled tokens to one unit vector per row of the common space, in float32.

Legend: `F` frames or captions, `R` rows, `D` width of the tower, `E` embedding size.
"""

import torch
from torch import nn

from shards.layouts import RowMeans
from shards.model_config import ModelConfig, Projection
from shards.tensor_shapes import mlp_projection_width

ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "gelu": nn.GELU}


class ProjectionHead(nn.Module):
    """Optional pooler (dense + tanh) and projection from the tower's width D to E (with "none", unprojected).

    `kept` is how many of the first values are kept; None for all.
    """

    def __init__(
        self,
        width: int,
        embedding_dim: int,
        projection: Projection,
        *,
        pooler: bool,
        bias: bool,
        kept: int | None = None,
    ) -> None:
        super().__init__()
        self.kept = kept
        self.pooler = nn.Linear(width, width) if pooler else None
        if projection in ("mlp", "wide_mlp"):
            is_wide = projection == "wide_mlp"
            hidden = 2 * embedding_dim if is_wide else mlp_projection_width(width, embedding_dim)
            second = nn.Linear(hidden, embedding_dim, bias=is_wide and bias)
            self.projection: nn.Module = nn.Sequential(nn.Linear(width, hidden, bias=is_wide), nn.GELU(), second)
        else:
            self.projection = nn.Identity() if projection == "none" else nn.Linear(width, embedding_dim, bias=bias)
        self.activation = ACTIVATIONS.get(projection, nn.Identity)()

    def forward(self, x_FD: torch.Tensor) -> torch.Tensor:
        """Project pooled tokens, (F, D) to (F, E), not normalised."""
        if self.pooler is not None:
            x_FD = torch.tanh(self.pooler(x_FD))
        projected: torch.Tensor = self.activation(self.projection(x_FD))
        return projected if self.kept is None else projected[..., : self.kept]


def build_head(config: ModelConfig, side: str) -> ProjectionHead:
    """Build the projection head of one tower."""
    tower = config.towers[side]
    projection, pooler = config.projections[side], tower.has_head_pooler
    return ProjectionHead(
        tower.pooled_dim,
        config.embedding_dim,
        projection,
        pooler=pooler,
        bias=config.projection_bias,
        kept=config.dimensions,
    )


def unit_rows(projected_FE: torch.Tensor, means: RowMeans) -> torch.Tensor:
    """Average the projections of each row (the frames of a video segment), then normalise: float32 (R, E)."""
    return nn.functional.normalize(means(projected_FE.float()), dim=-1)
