"""The decoder of transformers' Qwen3-VL, and what those of its family share.

Legend: `R` captions, `L` tokens, `D` width. Source: transformers 5.23, `Qwen3VLTextModel.forward`, whose steps these
methods follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from pydantic import Field, model_validator

from shards.file_schema import require_multiple
from shards.model_errors import ModelError
from shards.ranges import LayerRange
from shards.towers.base import Shapes, TowerFlops
from shards.towers.decoder_text import DecoderTextTower
from shards.towers.from_transformers import read_settings
from shards.towers.text_encoder import TextActivation

if TYPE_CHECKING:
    import torch

MAX_CAPTION_TOKENS = 8192
"""Longest text of the embedding model's own script; the decoder's positions go far beyond."""


class Qwen3VlTextTower(DecoderTextTower):
    """The decoder; a caption's vector is its last token's."""

    label = "Qwen3-VL decoder"
    kernels_per_layer = 54
    library_class = "Qwen3VLTextModel"

    family: Literal["qwen3_vl_text"] = "qwen3_vl_text"
    vocab_size: int = Field(151936, ge=1)
    hidden_size: int = Field(2048, ge=1)
    num_hidden_layers: int = Field(28, ge=1, description="layers")
    num_attention_heads: int = Field(16, ge=1)
    num_key_value_heads: int = Field(8, ge=1, description="heads of keys and values, each for several of queries")
    head_dim: int = Field(128, ge=2, multiple_of=2, description="width of one head")
    intermediate_size: int = Field(6144, ge=1, description="width of the gated MLP")
    hidden_act: TextActivation = "silu"
    max_position_embeddings: int = Field(8192, ge=1, description="longest caption, in tokens")
    rms_norm_eps: float = Field(1e-6, gt=0)
    rope_theta: float = Field(5e6, gt=0, description="base of rotary positions")
    mrope_section: tuple[int, int, int] = Field(
        (24, 20, 20), description="frequencies of time, rows and columns in rotary positions"
    )
    pad_token_id: int = Field(151643, ge=0)
    pool: Literal["last"] = Field("last", description="of the tokens")

    @model_validator(mode="after")
    def _is_decoder(self) -> Self:
        require_multiple(
            "num_attention_heads", self.num_attention_heads, "num_key_value_heads", self.num_key_value_heads
        )
        if sum(self.mrope_section) != self.head_dim // 2:
            raise ValueError(f"mrope_section {self.mrope_section} doesn't sum to half of head_dim ({self.head_dim})")
        return self

    def block_shapes(self) -> Shapes:
        """Return the shapes of a layer."""
        width, head = self.hidden_size, self.head_dim
        return (
            {"input_layernorm.weight": (width,), "post_attention_layernorm.weight": (width,)}
            | {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
            | self.linear_layer_shapes(self.num_attention_heads * head, self.num_key_value_heads * head)
        )

    def head_shapes(self) -> Shapes:
        """Return the shape of the last norm."""
        return {"norm.weight": (self.hidden_size,)}

    def flops(self, num_tokens: int) -> TowerFlops:
        """Count the operations for one caption; the mask saves none."""
        width, queries = self.hidden_size, self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        products = width * (2 * queries + 2 * keys + 3 * self.intermediate_size)
        return TowerFlops(0, 2 * num_tokens * products + 4 * num_tokens**2 * queries, 0)

    def workspace_values(self, num_tokens: int) -> int:
        """Count residual, norm, q, k, v, and gate, value and product of a layer's MLP."""
        heads = (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim
        return num_tokens * (2 * self.hidden_size + heads + 3 * self.intermediate_size)

    def library_settings(self) -> dict[str, Any]:
        """Return the settings of transformers' configuration, by its names."""
        own = self.model_dump(exclude={"family", "pool", "rope_theta", "mrope_section"})
        rope = {"rope_type": "default", "rope_theta": self.rope_theta, "mrope_interleaved": True}
        return own | {"rope_parameters": rope | {"mrope_section": list(self.mrope_section)}, "use_cache": False}

    def run(self, module: Any, layers: LayerRange, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run layers in order; a token attends to those before it."""
        import torch

        from shards.picture_layout import causal_mask

        places = torch.arange(x_FLD.shape[1], device=x_FLD.device).expand(3, 1, -1)
        positions, mask = module.rotary_emb(x_FLD, places), causal_mask(layout)
        for layer in range(layers.start, layers.stop):
            x_FLD = module.layers[layer](x_FLD, position_embeddings=positions, attention_mask=mask)
        return x_FLD

    def pool_tokens(self, module: Any, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run the last norm on the last token of each caption, in float32; (R, L, D) to (R, D)."""
        last: torch.Tensor = module.norm(super().pool_tokens(module, x_FLD, layout))
        return last


Decoder = TypeVar("Decoder", bound=Qwen3VlTextTower)


def read_decoder(
    family: type[Decoder], theirs: Any, where: Path, expected: Mapping[str, object], **given: object
) -> Decoder:
    """Read a decoder from transformers' configuration; raises a ModelError for what can't be built.

    `expected` has the settings that must be so; `given` replaces those of the same names.
    """
    rope = theirs.rope_parameters or {}
    if rope.get("rope_type", "default") != "default" or not rope.get("mrope_section"):
        raise ModelError(
            f"{where}: {theirs.model_type}: rope_parameters = {rope}; only 'default' with mrope_section can be imported"
        )
    own = {
        "max_position_embeddings": min(theirs.max_position_embeddings, MAX_CAPTION_TOKENS),
        "rope_theta": rope["rope_theta"],
        "mrope_section": tuple(rope["mrope_section"]),
        "pad_token_id": theirs.pad_token_id or 0,  # only padding has this id, and it is masked
        **given,
    }
    return read_settings(family, where, theirs, expected, **own)
