"""Text towers with the layers of a language model: heads of keys for several of queries, gated MLPs, no biases.

Legend: `R` captions, `L` tokens of the longest one, `N` tokens of all captions, `D` width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from shards.towers.base import Shapes, linear_shapes
from shards.towers.text_encoder import TextEncoderTower

if TYPE_CHECKING:
    import torch


class DecoderTextTower(TextEncoderTower):
    """Token table, layers, and what follows them; a shard may own several ranges of its layers."""

    layer_prefix = "layers."
    head_prefixes: ClassVar[tuple[str, ...]] = ("norm.",)
    lookup_prefixes = ("embed_tokens.",)

    def front_shapes(self) -> Shapes:
        """Return the shape of the token table."""
        return {"embed_tokens.weight": (self.vocab_size, self.hidden_size)}

    def linear_layer_shapes(self, queries: int, keys: int) -> Shapes:
        """Return the shapes of a layer's products; `queries` and `keys` are the widths of all its heads."""
        width, hidden = self.hidden_size, self.intermediate_size
        return (
            linear_shapes("self_attn.q_proj", width, queries, bias=False)
            | linear_shapes("self_attn.k_proj", width, keys, bias=False)
            | linear_shapes("self_attn.v_proj", width, keys, bias=False)
            | linear_shapes("self_attn.o_proj", queries, width, bias=False)
            | linear_shapes("mlp.gate_proj", width, hidden, bias=False)
            | linear_shapes("mlp.up_proj", width, hidden, bias=False)
            | linear_shapes("mlp.down_proj", hidden, width, bias=False)
        )

    def front(self, module: Any, values: torch.Tensor, layout: Any) -> torch.Tensor:
        """Look up the tokens; (N,) to (R, L, D)."""
        tokens: torch.Tensor = module.embed_tokens(layout.pad(values, fill=self.pad_token_id))
        return tokens
