"""transformers' CLIPTextModel: causal, pooled at the end of the caption.

Legend: `R` captions, `T` tokens of the longest one, `N` tokens of all captions, `D` width. Source: transformers 5.23,
`CLIPTextModel.forward` and `CLIPEncoder.forward`, whose steps these methods follow. Captions end with their first end
token (`embedder.steps.caption_encoder` cuts them there), so the last token is pooled; no token sees a later one, so
padding affects no token that counts.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from shards.ranges import LayerRange
from shards.towers.base import ModelClass, Shapes, TowerImport, linear_shapes, norm_shapes
from shards.towers.from_transformers import check_settings, own_names, read_settings, vision_fields
from shards.towers.text_encoder import TextEncoderTower
from shards.towers.vit import VitTower
from shards.towers.vit_imports import find_names, vision_activation

if TYPE_CHECKING:
    import torch

ClipActivation = Literal["gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu"]


class PreNormTextTower(TextEncoderTower):
    """What the text towers of CLIP and SigLIP share: norms before attention and MLP, and one after the layers."""

    layer_prefix = "encoder.layers."
    head_prefixes = ("final_layer_norm.",)
    masks_padding = False

    def front_shapes(self) -> Shapes:
        """Return the shapes of the token and position tables."""
        return {
            "embeddings.token_embedding.weight": (self.vocab_size, self.hidden_size),
            "embeddings.position_embedding.weight": (self.max_position_embeddings, self.hidden_size),
        }

    def block_shapes(self) -> Shapes:
        """Return the shapes of a layer."""
        width, shapes = self.hidden_size, norm_shapes("layer_norm1", self.hidden_size)
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= linear_shapes(f"self_attn.{part}", width, width)
        return (
            shapes
            | norm_shapes("layer_norm2", width)
            | linear_shapes("mlp.fc1", width, self.intermediate_size)
            | linear_shapes("mlp.fc2", self.intermediate_size, width)
        )

    def head_shapes(self) -> Shapes:
        """Return the shapes of the last norm."""
        return norm_shapes("final_layer_norm", self.hidden_size)

    def pool_tokens(self, module: Any, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run the last norm over the last token of each caption, in float32; (R, T, D) to (R, D)."""
        import torch

        rows = torch.arange(x_FLD.shape[0], device=x_FLD.device)
        return self.run_last_norm(module, x_FLD[rows, layout.num_tokens - 1].float())

    def run_last_norm(self, module: Any, last_FD: torch.Tensor) -> torch.Tensor:
        """Run the last norm on the last token of each caption."""
        normed: torch.Tensor = module.final_layer_norm(last_FD)
        return normed


class ClipTextTower(PreNormTextTower):
    """CLIP's text transformer."""

    label = "CLIP text"
    library_class = "CLIPTextModel"

    family: Literal["clip_text"] = "clip_text"
    vocab_size: int = Field(49408, ge=1)
    hidden_size: int = Field(512, ge=1)
    num_hidden_layers: int = Field(12, ge=1, description="layers")
    num_attention_heads: int = Field(8, ge=1)
    intermediate_size: int = Field(2048, ge=1)
    hidden_act: ClipActivation = "quick_gelu"
    max_position_embeddings: int = Field(77, ge=1, description="longest caption, in tokens")
    layer_norm_eps: float = Field(1e-5, gt=0)
    eos_token_id: int = Field(49407, ge=0, description="id of the token that ends a caption, where it is pooled")
    pad_token_id: int = Field(49407, ge=0)

    @model_validator(mode="after")
    def _ends_inside_vocabulary(self) -> Self:
        if self.eos_token_id >= self.vocab_size:
            raise ValueError(f"eos_token_id {self.eos_token_id} is outside the vocabulary of {self.vocab_size}")
        return self

    @property
    def end_id(self) -> int | None:
        """Id of the token that ends a caption: nothing after the first one counts."""
        return self.eos_token_id

    def run(self, module: Any, layers: LayerRange, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run layers in order, in which each token sees the previous ones."""
        for layer in range(layers.start, layers.stop):
            x_FLD = module.encoder.layers[layer](x_FLD, None, is_causal=True)
        return x_FLD


def _read_text(theirs: Any, names: frozenset[str], where: Path) -> ClipTextTower:
    del names
    # 2 is a mistake of older configurations, for which transformers pools at the highest id: the end token.
    end = theirs.vocab_size - 1 if theirs.eos_token_id == 2 else theirs.eos_token_id
    return read_settings(ClipTextTower, where, theirs, {}, eos_token_id=end, pad_token_id=end)


def _read_vision(theirs: Any, names: frozenset[str], where: Path) -> VitTower:
    """Read the configuration of a vision tower, a ViT that begins with a norm."""
    del names
    return check_settings(
        VitTower,
        where,
        theirs,
        {"num_channels": 3},
        **vision_fields(theirs, where),
        pre_norm=True,
        activation=vision_activation(theirs.hidden_act, where),
    )


_VISION_TOP = {
    "cls_token": "embeddings.class_embedding",
    "pos_embed": "embeddings.position_embedding.weight",
    "patch_embed.proj": "embeddings.patch_embedding",
    "norm_pre": "pre_layrnorm",
    "norm": "post_layernorm",
}
_VISION_BLOCK = {
    "norm1": ("layer_norm1",),
    "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.proj": ("self_attn.out_proj",),
    "norm2": ("layer_norm2",),
    "mlp.fc1": ("mlp.fc1",),
    "mlp.fc2": ("mlp.fc2",),
}


def clip_vision_names(name: str, names: frozenset[str]) -> tuple[str, ...]:
    """Return transformers' names of one of a ViT's tensors; older versions nest the tower in one more module."""
    nested = "vision_model." if any(each.startswith("vision_model.") for each in names) else ""
    return tuple(nested + each for each in find_names(name, _VISION_TOP, _VISION_BLOCK, "encoder.layers."))


TOWERS = (ClipTextTower,)
_POSITIONS = ("embeddings.position_ids", "vision_model.embeddings.position_ids")  # derived from the shapes
IMPORTS = {
    "clip_text_model": TowerImport("CLIPTextConfig", _read_text, own_names, ignored=_POSITIONS),
    "clip_vision_model": TowerImport("CLIPVisionConfig", _read_vision, clip_vision_names, ignored=_POSITIONS),
}
CLASSES = {"clip": ModelClass("clip_vision_model", "clip_text_model")}
