"""Whole, unsplit model: the reference for shards.

`TwinTower` runs the libraries' own forward functions, not the shards' loops over layers, so that it doesn't share their
bugs.

Legend: `F` frames, `N` tokens of all captions, `R` captions, `E` embedding size.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shards.activations import Arranged, Arrangement, Batch, Output, TowerState
from shards.heads import build_head, unit_rows
from shards.layouts import Layout, Normalise
from shards.loading import load_tensors
from shards.model_config import ModelConfig, load_model_config
from shards.ranges import LayerRange
from shards.shard_specs import whole_model


class TwinTower(nn.Module):
    """The towers with their projections, in float32; its state dict has the model folder's names."""

    # Modules of the libraries, by side; missing for a side without a tower.
    vision: Any
    vision_head: Any
    text: Any
    text_head: Any
    dtype = torch.float32

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        for side, tower in config.towers.items():
            setattr(self, side, tower.build())
            setattr(self, f"{side}_head", build_head(config, side))
        if config.vision is not None and config.text is not None:
            config.vision.join(self.vision, self.text)
        self.normalise = Normalise(config.preprocess)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.normalise.mean.device

    def output_of(self, side: str) -> Output | None:
        """Return the kind of output on one side, as for a shard of all layers; None without such a tower."""
        return "embedding" if side in self.config.towers else None

    def pool(self, side: str, rows: TowerState) -> torch.Tensor:
        """Compute pooled features of rows, which all have this side, by the library's own forward function; (F, width).

        Values are uint8 images (F, H, W, 3) | patches (N, P) | token ids (N,).
        """
        values = rows.values
        values = self.normalise(values, torch.float32) if side == "vision" else values.to(self.device)
        pooled: torch.Tensor = self.config.towers[side].reference(getattr(self, side), replace(rows, values=values))
        return pooled

    def project(self, side: str, rows: TowerState) -> torch.Tensor:
        """Project the pooled features; float32 (F, E), not normalised; arguments as for `pool`."""
        projected: torch.Tensor = getattr(self, f"{side}_head")(self.pool(side, rows))
        return projected

    def arrange(self, batch: Batch, costs: object = None) -> Arranged:
        """Take a batch as it is: the libraries' functions arrange it themselves."""
        del costs
        return Arranged(batch, {})

    def compute(self, arranged: Arranged) -> Batch:
        """Embed an arranged batch."""
        return self.forward(arranged.batch)

    def forward(self, batch: Batch) -> Batch:
        """Embed a batch of pixels and token ids, like a shard that holds everything."""
        return Batch(self._embed("vision", batch.vision), self._embed("text", batch.text))

    def _embed(self, side: str, state: TowerState | None) -> TowerState | None:
        if state is None or side not in self.config.towers:
            return state
        if not state.lengths.any():
            return TowerState(torch.empty((0, self.config.vector_dim), device=self.device), state.lengths)
        tower = self.config.towers[side]
        arrangement = Arrangement.of(state, tower, "embedding", LayerRange(0, tower.num_layers))
        return arrangement.run(state, partial(self._embed_group, side))

    def _embed_group(self, side: str, values: torch.Tensor, layout: Layout, own: TowerState) -> torch.Tensor:
        means = layout.move_to(lambda each: each.to(self.device)).means
        return unit_rows(self.project(side, replace(own, values=values)), means)


def load_towers(folder: str | Path, *, device: str = "cpu") -> TwinTower:
    """Load the whole model in float32, in evaluation mode; raises a ModelError for a broken model folder."""
    config, torch_device = load_model_config(folder), torch.device(device)
    with torch.device("meta"):
        towers = TwinTower(config)
    tensors = load_tensors(Path(folder), config, whole_model(config), "float32", torch_device)
    towers.load_state_dict(tensors, strict=True, assign=True)
    for side, tower in config.towers.items():
        tower.fill_buffers(getattr(towers, side), torch_device)
    towers.normalise.to(torch_device)
    return towers.eval()
