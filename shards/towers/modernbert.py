"""transformers' ModernBertModel: rotary positions; some layers attend to all tokens, others to a window around each.

Legend: `R` captions, `T` tokens of the longest one, `N` tokens of all captions, `D` width. Source: transformers 5.23,
`ModernBertModel.forward`, whose steps these methods follow.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from shards.file_schema import require_multiple
from shards.model_errors import ModelError
from shards.ranges import LayerRange
from shards.towers.base import Shapes, TowerImport, linear_shapes
from shards.towers.from_transformers import read_settings
from shards.towers.text_encoder import (
    FULL,
    SLIDING,
    TextActivation,
    TextEncoderTower,
    TokenPoolings,
    encoder_names,
    window_mask,
)

if TYPE_CHECKING:
    import torch

# Fields that transformers' configuration has in another form; the others have the same names.
_OWN_KEYS = {"family", "pool", "global_attn_every_n_layers", "global_rope_theta", "local_rope_theta"}


class ModernBertTower(TextEncoderTower):
    """A ModernBERT as transformers builds it, without its optional biases."""

    label = "ModernBERT"
    kernels_per_layer = 36
    library_class = "ModernBertModel"
    layer_prefix = "layers."
    head_prefixes = ("final_norm.",)
    has_gated_mlp = True

    family: Literal["modernbert"] = "modernbert"
    vocab_size: int = Field(50368, ge=1)
    hidden_size: int = Field(768, ge=1)
    num_hidden_layers: int = Field(22, ge=1, description="layers")
    num_attention_heads: int = Field(12, ge=1)
    intermediate_size: int = Field(1152, ge=1, description="width of the gated MLP")
    hidden_activation: TextActivation = "gelu"
    max_position_embeddings: int = Field(8192, ge=1, description="longest caption, in tokens")
    global_attn_every_n_layers: int = Field(3, ge=1, description="of n layers, the first attends to all tokens")
    local_attention: int = Field(128, ge=1, description="tokens that the others attend to, half on each side")
    global_rope_theta: float = Field(160000.0, gt=0, description="base of rotary positions where all is attended to")
    local_rope_theta: float = Field(10000.0, gt=0, description="the same of the other layers")
    norm_eps: float = Field(1e-5, gt=0)
    pad_token_id: int = Field(50283, ge=0)
    pool: TokenPoolings = Field("cls", description="of the tokens")

    @model_validator(mode="after")
    def _rotates_pairs(self) -> Self:
        pairs = 2 * self.num_attention_heads
        require_multiple("hidden_size", self.hidden_size, "two values of each attention head", pairs)
        return self

    @property
    def layer_types(self) -> list[str]:
        """Kind of each layer."""
        return [SLIDING if layer % self.global_attn_every_n_layers else FULL for layer in range(self.num_layers)]

    def front_shapes(self) -> Shapes:
        """Return the shapes of the embeddings, which have no position table."""
        return {
            "embeddings.tok_embeddings.weight": (self.vocab_size, self.hidden_size),
            "embeddings.norm.weight": (self.hidden_size,),
        }

    def block_shapes(self) -> Shapes:
        """Return the shapes of a layer; value and gate of the MLP are in one matrix."""
        width = self.hidden_size
        return (
            {"attn_norm.weight": (width,)}
            | linear_shapes("attn.Wqkv", width, 3 * width, bias=False)
            | linear_shapes("attn.Wo", width, width, bias=False)
            | {"mlp_norm.weight": (width,)}
            | linear_shapes("mlp.Wi", width, 2 * self.intermediate_size, bias=False)
            | linear_shapes("mlp.Wo", self.intermediate_size, width, bias=False)
        )

    def shapes_of(self, number: int) -> Shapes:
        """Return the shapes of one layer; the first has no leading norm, because the embeddings end with one."""
        return {name: shape for name, shape in self.block_shapes().items() if number or name != "attn_norm.weight"}

    def head_shapes(self) -> Shapes:
        """Return the shapes of the last norm."""
        return {"final_norm.weight": (self.hidden_size,)}

    def library_settings(self) -> dict[str, Any]:
        """Return the settings of transformers' configuration, by its names."""
        bases = {FULL: self.global_rope_theta, SLIDING: self.local_rope_theta}
        return self.model_dump(exclude=_OWN_KEYS) | {
            "layer_types": self.layer_types,
            "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
        }

    def run(self, module: Any, layers: LayerRange, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run layers in order, each with positions and mask of its kind."""
        import torch

        kinds = self.layer_types[layers.start : layers.stop]
        places = torch.arange(x_FLD.shape[1], device=x_FLD.device)
        positions = {kind: module.rotary_emb(x_FLD, places[None], kind) for kind in set(kinds)}
        masks = {FULL: layout.mask, SLIDING: window_mask(places, layout.mask, self.local_attention // 2)}
        for layer, kind in enumerate(kinds, layers.start):
            x_FLD = module.layers[layer](x_FLD, masks[kind], positions[kind])
        return x_FLD

    def pool_tokens(self, module: Any, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run the last norm, and pool each caption's tokens, in float32; (R, T, D) to (R, D)."""
        return super().pool_tokens(module, module.final_norm(x_FLD.float()), layout)


def _read(theirs: Any, names: frozenset[str], where: Path) -> ModernBertTower:
    del names
    kinds, rope = theirs.layer_types, theirs.rope_parameters
    for kind, settings in rope.items():
        if settings != {"rope_type": "default", "rope_theta": settings["rope_theta"]}:
            raise ModelError(f"{where}: modernbert: {kind} has rope_parameters {settings}; only a base can be imported")
    tower = read_settings(
        ModernBertTower,
        where,
        theirs,
        {"attention_bias": False, "mlp_bias": False, "norm_bias": False},
        global_attn_every_n_layers=kinds.index(FULL, 1) if FULL in kinds[1:] else len(kinds),
        global_rope_theta=rope[FULL]["rope_theta"],
        local_rope_theta=rope[SLIDING]["rope_theta"],
        pool=theirs.classifier_pooling,
    )
    if tower.layer_types != kinds:
        raise ModelError(f"{where}: modernbert: layer_types = {kinds}; expected {FULL} at the first of each n layers")
    return tower


TOWERS = (ModernBertTower,)
_HEADS = ("head.", "decoder.", "classifier.")
IMPORTS = {
    "modernbert": TowerImport("ModernBertConfig", _read, encoder_names, ignored=_HEADS, has_pooled_output=False),
}
