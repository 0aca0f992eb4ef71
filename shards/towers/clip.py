"""transformers' CLIPTextModel: causal, pooled at the end of the caption.

Legend: `R` captions, `T` tokens of the longest one, `N` tokens of all captions, `D` width.
Source: transformers 5.23, `CLIPTextModel.forward` and `CLIPEncoder.forward`, whose steps these methods follow. Captions
end with their first end token (`embedder.steps.captions` cuts them there), so what is pooled is the last token; no
token sees a later one, so padding is seen by none that counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from shards.ranges import LayerRange
from shards.schema import require_multiple
from shards.towers.base import (
    Shapes,
    TextTower,
    TowerFlops,
    TowerImport,
    attention_flops,
    linear_shapes,
    norm_shapes,
)
from shards.towers.from_transformers import checked, mlp_ratio, one_side, parse_config
from shards.towers.vit import VitTower
from shards.towers.vit_imports import vision_activation

if TYPE_CHECKING:
    import torch

ClipActivation = Literal["gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu"]


class ClipTextTower(TextTower):
    """CLIP's text transformer."""

    label = "CLIP text"
    layer_prefix = "encoder.layers."
    head_prefixes = ("final_layer_norm.",)
    lookup_prefixes = ("embeddings.",)

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
    def _buildable(self) -> Self:
        require_multiple("hidden_size", self.hidden_size, "num_attention_heads", self.num_attention_heads)
        if max(self.pad_token_id, self.eos_token_id) >= self.vocab_size:
            found = max(self.pad_token_id, self.eos_token_id)
            raise ValueError(f"the token id {found} is outside the vocabulary of {self.vocab_size}")
        return self

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.num_hidden_layers

    @property
    def dim(self) -> int:
        """Width of the activations."""
        return self.hidden_size

    @property
    def max_tokens(self) -> int:
        """Longest caption, in tokens."""
        return self.max_position_embeddings

    @property
    def num_vocabulary(self) -> int:
        """Number of tokens that the embedding table knows."""
        return self.vocab_size

    @property
    def padding_id(self) -> int:
        """Token id that captions are padded with."""
        return self.pad_token_id

    @property
    def end_id(self) -> int | None:
        """Id of the token that ends a caption: nothing after the first one counts."""
        return self.eos_token_id

    def describe(self) -> str:
        """Describe the tower with its sizes."""
        return f"{self.label} {self.num_hidden_layers} layers x {self.hidden_size}, {self.vocab_size:,} tokens"

    def front_shapes(self) -> Shapes:
        """Compute the shapes of the token and position tables."""
        return {
            "embeddings.token_embedding.weight": (self.vocab_size, self.hidden_size),
            "embeddings.position_embedding.weight": (self.max_position_embeddings, self.hidden_size),
        }

    def block_shapes(self) -> Shapes:
        """Compute the shapes of a layer."""
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
        """Compute the shapes of the last norm."""
        return norm_shapes("final_layer_norm", self.hidden_size)

    def flops(self, num_tokens: int) -> TowerFlops:
        """Count the operations for one caption; its front only looks tokens up."""
        return TowerFlops(0, attention_flops(num_tokens, self.hidden_size, self.intermediate_size), 0)

    def workspace_values(self, num_tokens: int) -> int:
        """Count in a layer residual, norm, q, k, v, and the hidden width twice."""
        return num_tokens * (5 * self.hidden_size + 2 * self.intermediate_size)

    def build(self) -> Any:
        """Build the whole tower, with attention by torch's fused kernel."""
        from shards.compat import deferred_compiler

        with deferred_compiler():
            from transformers import CLIPTextConfig, CLIPTextModel
            from transformers.initialization import no_init_weights

        config = CLIPTextConfig(**self.model_dump(exclude={"family"}), attn_implementation="sdpa")
        with no_init_weights():  # all weights are loaded; and on the meta device, torch's compiler would make them
            return CLIPTextModel(config)

    def prune(self, module: Any, layers: LayerRange) -> None:
        """Remove all modules that a shard with these layers doesn't own; the others keep their names."""
        from torch import nn

        for layer in range(self.num_layers):
            if not layers.start <= layer < layers.stop:
                module.encoder.layers[layer] = nn.Identity()
        if not layers.holds_front():
            module.embeddings = None
        if not layers.holds_head(self.num_layers):
            module.final_layer_norm = None

    def fill_buffers(self, module: Any, device: torch.device) -> None:
        """Fill the table of positions; on the meta device it has no values."""
        import torch

        if module.embeddings is not None:
            shape = module.embeddings.position_ids.shape
            module.embeddings.position_ids = torch.arange(shape[-1], device=device).expand(shape)

    def layer_modules(self, module: Any) -> Any:
        """Give the layers."""
        return module.encoder.layers

    def front(self, module: Any, values: torch.Tensor, layout: Any) -> torch.Tensor:
        """Look up tokens and positions; (N,) to (R, T, D)."""
        tokens: torch.Tensor = module.embeddings(layout.pad(values, fill=self.pad_token_id))
        return tokens

    def run(self, module: Any, layers: LayerRange, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run layers in order, in which each token sees those in front of it."""
        for layer in range(layers.start, layers.stop):
            x_FLD = module.encoder.layers[layer](x_FLD, None, is_causal=True)
        return x_FLD

    def pool_tokens(self, module: Any, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run the last norm over the last token of each caption, in float32; (R, T, D) to (R, D)."""
        import torch

        rows = torch.arange(len(x_FLD), device=x_FLD.device)
        last = x_FLD[rows, layout.lengths.to(x_FLD.device) - 1]
        pooled: torch.Tensor = module.final_layer_norm(last.float())
        return pooled

    def reference(self, module: Any, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Compute pooled features by transformers' own forward function."""
        layout = self.layout(lengths, values.device)
        ids_RT = layout.pad(values, fill=self.pad_token_id)
        pooled: torch.Tensor = module(input_ids=ids_RT).pooler_output
        return pooled

    def use_plain_attention(self, module: Any) -> None:
        """Turn off fused attention."""
        module.set_attn_implementation("eager")


def read_clip_text(tree: Mapping[str, Any], names: frozenset[str], where: Path) -> ClipTextTower:
    """Read the section of a text tower.

    Args:
        tree: the section; missing keys have transformers' defaults.
        names: names of its tensors.
        where: path of config.json, for messages.

    Raises:
        ModelError: it has something that we can't build.
    """
    from transformers import CLIPTextConfig

    del names
    theirs = parse_config(CLIPTextConfig, tree, where)
    fields = {key: getattr(theirs, key) for key in ClipTextTower.model_fields if key != "family"}
    if fields["eos_token_id"] == 2:
        # A mistake of older configurations, after which transformers pools at the highest id: of the end token.
        fields["eos_token_id"] = fields["vocab_size"] - 1
    fields["pad_token_id"] = fields["eos_token_id"]
    return checked(ClipTextTower, where, theirs, {}, **fields)


def clip_text_names(name: str, names: frozenset[str]) -> tuple[str, ...]:
    """Give transformers' name of a tensor, which is ours."""
    del names
    return (name,)


def read_clip_vision(tree: Mapping[str, Any], names: frozenset[str], where: Path) -> VitTower:
    """Read the section of a vision tower, which is a ViT with a norm in front.

    Args:
        tree: the section; missing keys have transformers' defaults.
        names: names of its tensors.
        where: path of config.json, for messages.

    Raises:
        ModelError: it has something that we can't build.
    """
    from transformers import CLIPVisionConfig

    del names
    theirs = parse_config(CLIPVisionConfig, tree, where)
    return checked(
        VitTower,
        where,
        theirs,
        {"num_channels": 3},
        image_size=one_side(theirs.image_size, "vision_config.image_size", where),
        patch_size=one_side(theirs.patch_size, "vision_config.patch_size", where),
        width=theirs.hidden_size,
        depth=theirs.num_hidden_layers,
        num_heads=theirs.num_attention_heads,
        mlp_ratio=mlp_ratio(theirs.hidden_size, theirs.intermediate_size),
        pre_norm=True,
        norm_eps=theirs.layer_norm_eps,
        activation=vision_activation(theirs.hidden_act, where),
    )


_VISION_MODULES = {
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
    """Find transformers' names of one of a ViT's tensors."""
    del names
    if name == "cls_token":
        return ("embeddings.class_embedding",)
    if name == "pos_embed":
        return ("embeddings.position_embedding.weight",)
    module, _, leaf = name.rpartition(".")
    if module in _VISION_MODULES:
        return (f"{_VISION_MODULES[module]}.{leaf}",)
    _, layer, part = module.split(".", 2)
    return tuple(f"encoder.layers.{layer}.{theirs}.{leaf}" for theirs in _VISION_BLOCK[part])


TOWERS = (ClipTextTower,)
IMPORTS = {
    "clip_text_model": TowerImport(read_clip_text, clip_text_names, ignored=("embeddings.position_ids",)),
    "clip_vision_model": TowerImport(read_clip_vision, clip_vision_names, ignored=("embeddings.position_ids",)),
}
