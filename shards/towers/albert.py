"""transformers' AlbertModel.

Legend: `R` captions, `T` tokens of the longest one, `N` tokens of all captions, `D` width.
Source: transformers 5.23, `AlbertModel.forward` and `AlbertTransformer.forward`, whose steps these methods follow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from shards.ranges import LayerRange
from shards.towers.base import Shapes, TowerFlops, attention_flops, linear_shapes, norm_shapes
from shards.towers.text_encoder import TextActivation, TextEncoderTower, TextPooling, encoder_import

if TYPE_CHECKING:
    import torch


class AlbertTower(TextEncoderTower):
    """An ALBERT as transformers builds it; its layers are the applications of shared groups of weights."""

    label = "ALBERT"
    kernels_per_layer = 19
    library_class = "AlbertModel"
    dual_encoder_type = "albert"
    layer_prefix = "encoder.albert_layer_groups."

    family: Literal["albert"] = "albert"
    vocab_size: int = Field(30000, ge=1)
    embedding_size: int = Field(
        128, ge=1, description="width of the token embeddings, before the mapping to hidden_size"
    )
    hidden_size: int = Field(768, ge=1)
    num_hidden_layers: int = Field(12, ge=1, description="layers, counted by application")
    num_hidden_groups: int = Field(1, ge=1, description="sets of weights that the applications share")
    inner_group_num: int = Field(1, ge=1, description="blocks inside one application")
    num_attention_heads: int = Field(12, ge=1)
    intermediate_size: int = Field(3072, ge=1)
    hidden_act: TextActivation = "gelu_new"
    max_position_embeddings: int = Field(512, ge=1, description="longest caption, in tokens")
    type_vocab_size: int = Field(2, ge=1)
    layer_norm_eps: float = Field(1e-12, gt=0)
    pad_token_id: int = Field(0, ge=0)
    pool: TextPooling = Field("pooler", description="dense + tanh on [CLS], or of the tokens")

    @model_validator(mode="after")
    def _applies_every_group(self) -> Self:
        if self.num_hidden_groups > self.num_hidden_layers:
            raise ValueError(
                f"num_hidden_groups ({self.num_hidden_groups}) exceeds num_hidden_layers "
                f"({self.num_hidden_layers}); a group without a layer is never applied"
            )
        return self

    def weights_of(self, layer: int) -> int:
        """Return the number of the group of weights that one application uses.

        Source: transformers 5.23, `AlbertTransformer.forward`; the same float division, so that rounding agrees.
        """
        return int(layer / (self.num_hidden_layers / self.num_hidden_groups))

    def at_depth(self, num_layers: int) -> Self:
        """Copy the tower with another number of layers, and no more sets of weights than layers."""
        groups = min(self.num_hidden_groups, num_layers)
        return super().at_depth(num_layers).model_copy(update={"num_hidden_groups": groups})

    def front_shapes(self) -> Shapes:
        """Return the shapes of the embeddings and of the mapping to the layers' width."""
        tables = {"word": self.vocab_size, "position": self.max_position_embeddings, "token_type": self.type_vocab_size}
        return (
            {f"embeddings.{name}_embeddings.weight": (num, self.embedding_size) for name, num in tables.items()}
            | norm_shapes("embeddings.LayerNorm", self.embedding_size)
            | linear_shapes("encoder.embedding_hidden_mapping_in", self.embedding_size, self.hidden_size)
        )

    def block_shapes(self) -> Shapes:
        """Return the shapes of a group."""
        shapes: Shapes = {}
        for inner in range(self.inner_group_num):
            layer = f"albert_layers.{inner}"
            shapes |= norm_shapes(f"{layer}.full_layer_layer_norm", self.hidden_size)
            for part in ("query", "key", "value", "dense"):
                shapes |= linear_shapes(f"{layer}.attention.{part}", self.hidden_size, self.hidden_size)
            shapes |= norm_shapes(f"{layer}.attention.LayerNorm", self.hidden_size)
            shapes |= linear_shapes(f"{layer}.ffn", self.hidden_size, self.intermediate_size)
            shapes |= linear_shapes(f"{layer}.ffn_output", self.intermediate_size, self.hidden_size)
        return shapes

    def head_shapes(self) -> Shapes:
        """Return the shapes of the pooler."""
        return linear_shapes("pooler", self.hidden_size, self.hidden_size) if self.pool == "pooler" else {}

    def flops(self, num_tokens: int) -> TowerFlops:
        """Count the operations for one caption."""
        return TowerFlops(
            front=2 * num_tokens * self.embedding_size * self.hidden_size,
            layer=self.inner_group_num * attention_flops(num_tokens, self.hidden_size, self.intermediate_size),
            head=2 * self.hidden_size**2 if self.pool == "pooler" else 0,
        )

    def front(self, module: Any, values: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run token, position and type embeddings, then the mapping to the layers' width; (N,) to (R, T, D)."""
        ids_RT = layout.pad(values, fill=self.pad_token_id)
        tokens: torch.Tensor = module.encoder.embedding_hidden_mapping_in(module.embeddings(ids_RT))
        return tokens

    def run(self, module: Any, layers: LayerRange, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Apply a range of layers, each with the weights of its group."""
        for layer in range(layers.start, layers.stop):
            x_FLD = module.encoder.albert_layer_groups[self.weights_of(layer)](x_FLD, layout.mask)
        return x_FLD

    def run_pooler(self, module: Any, first_FD: torch.Tensor) -> torch.Tensor:
        """Run the pooler, dense and tanh, on the first token of each caption."""
        pooled: torch.Tensor = module.pooler_activation(module.pooler(first_FD))
        return pooled


TOWERS = (AlbertTower,)
IMPORTS = {"albert": encoder_import(AlbertTower, "AlbertConfig", ignored=("predictions.", "sop_classifier."))}
