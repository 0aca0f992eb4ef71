"""transformers' DistilBertModel, which has no pooler and no token types.

Source: transformers 5.23, `DistilBertModel.forward`, whose steps these methods follow. Its norms have a fixed epsilon.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from shards.towers.base import Shapes, linear_shapes, norm_shapes
from shards.towers.text_encoder import TextActivation, TextEncoderTower, TokenPoolings, encoder_import

# transformers' names of fields, where they differ from BERT's.
_THEIR_KEYS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
}


class DistilBertTower(TextEncoderTower):
    """A DistilBERT as transformers builds it; its fields have BERT's names."""

    label = "DistilBERT"
    library_class = "DistilBertModel"
    layer_prefix = "transformer.layer."

    family: Literal["distilbert"] = "distilbert"
    vocab_size: int = Field(30522, ge=1)
    hidden_size: int = Field(768, ge=1)
    num_hidden_layers: int = Field(6, ge=1, description="layers")
    num_attention_heads: int = Field(12, ge=1)
    intermediate_size: int = Field(3072, ge=1)
    hidden_act: TextActivation = "gelu"
    max_position_embeddings: int = Field(512, ge=1, description="longest caption, in tokens")
    pad_token_id: int = Field(0, ge=0)
    pool: TokenPoolings = Field("mean", description="of the tokens")

    def front_shapes(self) -> Shapes:
        """Return the shapes of the embeddings."""
        tables = {"word": self.vocab_size, "position": self.max_position_embeddings}
        shapes: Shapes = {
            f"embeddings.{name}_embeddings.weight": (num, self.hidden_size) for name, num in tables.items()
        }
        return shapes | norm_shapes("embeddings.LayerNorm", self.hidden_size)

    def block_shapes(self) -> Shapes:
        """Return the shapes of a layer."""
        width = self.hidden_size
        shapes: Shapes = {}
        for part in ("q_lin", "k_lin", "v_lin", "out_lin"):
            shapes |= linear_shapes(f"attention.{part}", width, width)
        return (
            shapes
            | norm_shapes("sa_layer_norm", width)
            | linear_shapes("ffn.lin1", width, self.intermediate_size)
            | linear_shapes("ffn.lin2", self.intermediate_size, width)
            | norm_shapes("output_layer_norm", width)
        )

    def library_settings(self) -> dict[str, Any]:
        """Return the settings of transformers' configuration, by its names."""
        return {_THEIR_KEYS.get(key, key): value for key, value in super().library_settings().items()}


TOWERS = (DistilBertTower,)
IMPORTS = {
    "distilbert": encoder_import(
        DistilBertTower,
        "DistilBertConfig",
        pool="mean",
        their_keys=_THEIR_KEYS,
        ignored=("vocab_", "pre_classifier."),
        has_pooled_output=False,
    )
}
