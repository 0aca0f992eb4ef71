"""Encodes queries with torch, from a model folder, in this process and without Ray."""

from typing import TYPE_CHECKING, Any

import numpy as np

from embedder.compat.locked_property import locked_cached_property
from embedder.encoders.encode_queries import BaseQueryEncoder, Columns, Floats, Ids
from embedder.installation import require
from embedder.media.resize import Colour
from embedder.models.model_folder import Model

if TYPE_CHECKING:
    from shards.activations import Batch
    from shards.shard import Shard
    from shards.shard_specs import ShardSpec


class QueryEncoder(BaseQueryEncoder):
    """Encoder of texts and images with the towers of a model folder."""

    kind = "torch"

    def __init__(self, model: Model, colour: Colour = "srgb") -> None:
        require("embed", f"model {model.folder}: encoding queries with it, as the store has no query towers")
        super().__init__(model, colour)

    def _embed_ids(self, ids: list[Ids]) -> Floats:
        import torch

        with torch.inference_mode():
            return self._embedding(self._text_tower(text_batch(ids)).text)

    def _embed_pixels(self, columns: list[Columns]) -> Floats:
        import torch

        with torch.inference_mode():
            return self._embedding(self._vision_tower(image_batch(columns)).vision)

    def _embedding(self, state: Any) -> Floats:
        return np.asarray(state.values.numpy(), np.float32)

    def _read_sigmoid(self) -> tuple[float, float] | None:
        from shards.loading import read_sigmoid

        return read_sigmoid(self.model.folder)

    @locked_cached_property
    def _text_tower(self) -> "Shard":
        from shards.shard_specs import text_only

        return self._load(text_only(self.model.config))

    @locked_cached_property
    def _vision_tower(self) -> "Shard":
        from shards.shard_specs import vision_only

        return self._load(vision_only(self.model.config))

    def _load(self, spec: "ShardSpec") -> "Shard":
        from shards.shard import load_shard

        return load_shard(self.model.folder, spec)


def text_batch(ids: list[Ids]) -> "Batch":
    """Pack the token ids of texts, each int32 (T,)."""
    import torch

    from shards.activations import Batch, TowerState

    lengths = torch.tensor([len(each) for each in ids])
    return Batch(vision=None, text=TowerState(torch.from_numpy(np.concatenate(ids)), lengths))


def image_batch(columns: list[Columns]) -> "Batch":
    """Pack images."""
    import torch

    from shards.activations import Batch, TowerState

    values = torch.from_numpy(np.concatenate([each["pixels"] for each in columns]))
    lengths = torch.tensor([len(each["pixels"]) for each in columns])
    has_grids = "image_grid" in columns[0]
    grids = torch.from_numpy(np.stack([each["image_grid"] for each in columns])) if has_grids else None
    return Batch(vision=TowerState(values, lengths, grids), text=None)
