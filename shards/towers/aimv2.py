"""Towers of transformers' Aimv2Model: RMS norms and gated MLPs, a ViT that one learned query pools, and causal text.

Legend: `F` images (frames), `R` captions, `T` tokens of the longest one, `L` tokens of one image, `D` width. Source:
transformers 5.23, `Aimv2VisionModel.forward` and `Aimv2TextModel.forward`, whose steps these methods follow. A vision
tower without a head is a plain ViT whose patches are averaged, as timm has it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from shards.ranges import LayerRange
from shards.towers.base import ModelClass, Rows, Shapes, TowerImport, linear_shapes
from shards.towers.clip import ClipTextTower
from shards.towers.from_transformers import check_settings, own_names, read_settings, vision_fields
from shards.towers.vit import VitTower
from shards.towers.vit_imports import find_names

if TYPE_CHECKING:
    import torch


class Aimv2VisionTower(VitTower):
    """AIMv2's ViT with its pooling head: attention of one learned query, the same for all images."""

    label = "AIMv2"

    family: Literal["aimv2"] = "aimv2"  # type: ignore[assignment]
    norm: Literal["rms"] = "rms"
    mlp: Literal["swiglu"] = "swiglu"
    pool: Literal["avg"] = Field("avg", description="timm's, before the head")
    class_token: Literal[False] = False

    def head_shapes(self) -> Shapes:
        """Return the shapes of the last norm and of the head."""
        query: Shapes = {"attn_pool.cls_token": (1, 1, self.width)}
        for part in ("k_proj", "v_proj"):
            query |= linear_shapes(f"attn_pool.{part}", self.width, self.width, bias=self.qkv_bias)
        return super().head_shapes() | query | linear_shapes("attn_pool.output_proj", self.width, self.width)

    def head_flops(self) -> float:
        """Count those of the head: 4*L*D*D for keys and values, 4*L*D for the query's attention, 2*D*D behind it."""
        return 4 * self.num_tokens * self.width * (self.width + 1) + 2 * self.width**2

    def build(self) -> Any:
        """Build the whole ViT, with transformers' own head in the place of timm's."""
        from shards.compat import deferred_compiler

        with deferred_compiler():
            from transformers import Aimv2VisionConfig
            from transformers.models.aimv2.modeling_aimv2 import Aimv2AttentionPoolingHead
        config = Aimv2VisionConfig(hidden_size=self.width, num_attention_heads=self.num_heads, qkv_bias=self.qkv_bias)
        module = super().build()
        module.attn_pool = Aimv2AttentionPoolingHead(config)
        return module

    def pool_tokens(self, module: Any, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run the last norm and the head in float32; (F, L, D) to (F, D)."""
        del layout
        pooled: torch.Tensor = module.attn_pool(module.norm(x_FLD.float()))
        return pooled

    def reference(self, module: Any, rows: Rows) -> torch.Tensor:
        """Compute pooled features by timm's own forward function and transformers' head."""
        pooled: torch.Tensor = module.attn_pool(module.forward_features(rows.values))
        return pooled


class Aimv2TextTower(ClipTextTower):
    """AIMv2's text transformer: causal and pooled at the end of the caption, as CLIP's."""

    label = "AIMv2 text"
    kernels_per_layer = 28
    library_class = "Aimv2TextModel"
    head_prefixes = ("rms_norm.",)
    has_gated_mlp = True

    family: Literal["aimv2_text"] = "aimv2_text"  # type: ignore[assignment]
    hidden_size: int = Field(768, ge=1)
    num_attention_heads: int = Field(6, ge=1)
    hidden_act: Literal["silu"] = "silu"  # type: ignore[assignment]
    layer_norm_eps: float = Field(1e-5, gt=0, description="transformers' rms_norm_eps")
    qkv_bias: bool = False
    mlp_bias: bool = False

    def block_shapes(self) -> Shapes:
        """Return the shapes of a layer."""
        width, hidden = self.hidden_size, self.intermediate_size
        shapes: Shapes = {"rms_norm1.weight": (width,), "rms_norm2.weight": (width,)}
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= linear_shapes(f"attention.{part}", width, width, bias=self.qkv_bias)
        for part in ("gate_proj", "up_proj"):
            shapes |= linear_shapes(f"ffn.{part}", width, hidden, bias=self.mlp_bias)
        return shapes | linear_shapes("ffn.down_proj", hidden, width, bias=self.mlp_bias)

    def head_shapes(self) -> Shapes:
        """Return the shapes of the last norm."""
        return {"rms_norm.weight": (self.hidden_size,)}

    def library_settings(self) -> dict[str, Any]:
        """Return the settings of transformers' configuration, by its names."""
        settings = self.model_dump(exclude={"family", "pad_token_id", "layer_norm_eps"})
        return settings | {"rms_norm_eps": self.layer_norm_eps}

    def build(self) -> Any:
        """Build the whole tower, whose attention is causal without a mask of transformers'."""
        module = super().build()
        for layer in module.encoder.layers:
            layer.attention.is_causal = True
        return module

    def run(self, module: Any, layers: LayerRange, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run layers in order, in which each token sees the previous ones."""
        del layout
        for layer in range(layers.start, layers.stop):
            x_FLD = module.encoder.layers[layer](x_FLD)
        return x_FLD

    def run_last_norm(self, module: Any, last_FD: torch.Tensor) -> torch.Tensor:
        """Run the last norm on the last token of each caption."""
        normed: torch.Tensor = module.rms_norm(last_FD)
        return normed


def _read_text(theirs: Any, names: frozenset[str], where: Path) -> Aimv2TextTower:
    del names
    padding = theirs.eos_token_id  # no token sees what follows the end
    own = {"layer_norm_eps": theirs.rms_norm_eps, "pad_token_id": padding}
    return read_settings(Aimv2TextTower, where, theirs, {}, **own)


def _read_vision(theirs: Any, names: frozenset[str], where: Path) -> VitTower:
    del names
    return check_settings(
        Aimv2VisionTower if theirs.use_head else VitTower,
        where,
        theirs,
        {"num_channels": 3, "is_native": False, "hidden_act": "silu", "mlp_bias": theirs.qkv_bias},
        **vision_fields(theirs, where),
        class_token=False,
        pool="avg",
        norm="rms",
        embed_norm=True,
        mlp="swiglu",
        activation="silu",
        qkv_bias=theirs.qkv_bias,
        proj_bias=theirs.qkv_bias,
    )


_TOP = {
    "pos_embed": "embeddings.position_embedding.weight",
    "patch_embed.proj": "embeddings.patch_embed",
    "patch_embed.norm": "embeddings.rms_norm",
    "norm": "rms_norm",
}
_BLOCK = {
    "norm1": ("rms_norm1",),
    "attn.qkv": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    "attn.proj": ("attention.out_proj",),
    "norm2": ("rms_norm2",),
    "mlp.fc1_g": ("ffn.gate_proj",),
    "mlp.fc1_x": ("ffn.up_proj",),
    "mlp.fc2": ("ffn.down_proj",),
}


def aimv2_vision_names(name: str, names: frozenset[str]) -> tuple[str, ...]:
    """Return transformers' names of one of a ViT's tensors."""
    del names
    if name.startswith("attn_pool."):
        return (name.replace("attn_pool.", "head.", 1),)
    return find_names(name, _TOP, _BLOCK, "encoder.layers.")


TOWERS = (Aimv2VisionTower, Aimv2TextTower)
_POSITIONS = ("embeddings.position_ids",)
IMPORTS = {
    "aimv2_vision_model": TowerImport("Aimv2VisionConfig", _read_vision, aimv2_vision_names, ignored=_POSITIONS),
    "aimv2_text_model": TowerImport("Aimv2TextConfig", _read_text, own_names, ignored=_POSITIONS),
}
CLASSES = {"aimv2": ModelClass("aimv2_vision_model", "aimv2_text_model")}
