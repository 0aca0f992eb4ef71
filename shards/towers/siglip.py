"""transformers' SiglipTextModel, of SigLIP and SigLIP 2: captions padded to one length, pooled at their last token.

Padding is attended to like any other token, so a caption is always as long as the tokeniser pads it. The library's last
layer, `head`, is our projection. The vision tower is a ViT with attention pooling.

Legend: `R` captions, `T` tokens of each, `D` width. Source: transformers 5.23, `SiglipTextModel.forward` and
`SiglipVisionModel.forward`, whose steps these methods follow.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from shards.model_errors import ModelError
from shards.towers.base import ModelClass, Rows, TowerImport
from shards.towers.clip import PreNormTextTower, clip_vision_names
from shards.towers.from_transformers import check_settings, read_settings, vision_fields
from shards.towers.text_encoder import TextActivation
from shards.towers.vit import VitTower
from shards.towers.vit_imports import vision_activation

if TYPE_CHECKING:
    import torch

    from shards.ranges import LayerRange


class SiglipTextTower(PreNormTextTower):
    """SigLIP's text transformer."""

    label = "SigLIP text"
    library_class = "SiglipTextModel"

    family: Literal["siglip_text"] = "siglip_text"
    vocab_size: int = Field(32000, ge=1)
    hidden_size: int = Field(768, ge=1)
    num_hidden_layers: int = Field(12, ge=1, description="layers")
    num_attention_heads: int = Field(12, ge=1)
    intermediate_size: int = Field(3072, ge=1)
    hidden_act: TextActivation = "gelu_pytorch_tanh"
    max_position_embeddings: int = Field(64, ge=1, description="length that captions are padded to, in tokens")
    layer_norm_eps: float = Field(1e-6, gt=0)
    pad_token_id: int = Field(1, ge=0)
    pooled_token: Literal["last", "highest"] = Field(
        "last", description="highest: the one of the highest id, which ends a caption, as open_clip's argmax"
    )

    @property
    def has_fixed_length(self) -> bool:
        """Return True: all captions are padded to one length."""
        return True

    def tokens_in(self, num_tokens: int) -> int:
        """Return the tokens of one caption; all captions have the same number."""
        del num_tokens
        return self.max_position_embeddings

    def input_bytes(self, num_tokens: int) -> int:
        """Return the bytes of one caption's token ids, int32."""
        return 4 * self.tokens_in(num_tokens)

    def sample_lengths(self, num_rows: int, num_tokens: int) -> torch.Tensor:
        """Return captions of the one length."""
        import torch

        return torch.full((num_rows,), self.tokens_in(num_tokens))

    def check_input(self, values: torch.Tensor, lengths: torch.Tensor) -> None:
        """Raise a ModelError for ids, int32 (N,), outside the vocabulary, or captions not padded to one length."""
        super().check_input(values, lengths)
        shortest, longest = int(lengths.min()), int(lengths.max())
        if shortest != longest:
            raise ModelError(
                f"token ids: captions of {shortest} to {longest} tokens, a {self.label} tower takes captions padded to "
                "one length; use the model folder's own tokenizer.json"
            )

    def build(self) -> Any:
        """Build the whole tower with torch's fused attention kernel; `ProjectionHead` provides its head."""
        from torch import nn

        module = super().build()
        module.head = nn.Identity()
        return module

    def library_settings(self) -> dict[str, Any]:
        """Return the settings of transformers' configuration, which knows only the last token."""
        return self.model_dump(exclude={"family", "pooled_token"})

    def front(self, module: Any, values: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run the embeddings, (N,) to (R, T, D); the token to pool moves to the last place.

        Later layers don't know the ids. Each token sees all others and has its position by now, so their order says
        nothing: the vector stays the same, but for the last bits of sums.
        """
        ids_RT = layout.pad(values, fill=self.pad_token_id)
        x_RTD: torch.Tensor = module.embeddings(ids_RT)
        return x_RTD if self.pooled_token == "last" else _with_highest_last(ids_RT, x_RTD)

    def reference(self, module: Any, rows: Rows) -> torch.Tensor:
        """Compute pooled features by transformers' own forward functions: of the model, or of its layers."""
        if self.pooled_token == "last":
            return super().reference(module, rows)
        x_RTD = self.front(module, rows.values, self.layout(rows.lengths))
        encoded_RTD = module.encoder(inputs_embeds=x_RTD).last_hidden_state
        return self.run_last_norm(module, encoded_RTD[:, -1])

    def run(self, module: Any, layers: LayerRange, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run layers in order, in which each token sees all others, including padding."""
        for layer in range(layers.start, layers.stop):
            x_FLD = module.encoder.layers[layer](x_FLD, None)
        return x_FLD


def _with_highest_last(ids_RT: torch.Tensor, x_RTD: torch.Tensor) -> torch.Tensor:
    """Let the first token of the highest id change places with the last one, in each caption."""
    import torch

    places_T, last = torch.arange(ids_RT.shape[1], device=ids_RT.device), ids_RT.shape[1] - 1
    highest_R1 = ids_RT.argmax(1, keepdim=True)
    swapped_RT = torch.where(places_T == highest_R1, last, places_T)
    swapped_RT = torch.where(places_T == last, highest_R1, swapped_RT)
    return x_RTD.gather(1, swapped_RT[..., None].expand_as(x_RTD))


def _read_text(theirs: Any, names: frozenset[str], where: Path) -> SiglipTextTower:
    del names
    padding = theirs.pad_token_id or 0  # the tokeniser pads, with its own id
    return read_settings(SiglipTextTower, where, theirs, {}, pad_token_id=padding, pooled_token="last")


def siglip_text_names(name: str, names: frozenset[str]) -> tuple[str, ...]:
    """Return transformers' name of a tensor: the same, except for the projection."""
    del names
    return (name.replace("head.projection.", "head."),)


def _read_vision(theirs: Any, names: frozenset[str], where: Path) -> VitTower:
    """Read the configuration of a vision tower of one image size."""
    del names
    return check_settings(
        VitTower,
        where,
        theirs,
        {"num_channels": 3, "vision_use_head": True},
        **vision_fields(theirs, where),
        class_token=False,
        pool="map",
        activation=vision_activation(theirs.hidden_act, where),
    )


_VISION_TENSORS = {"pos_embed": "embeddings.position_embedding.weight", "attn_pool.latent": "head.probe"}
_VISION_MODULES = {
    "patch_embed.proj": "embeddings.patch_embedding.",
    "norm": "post_layernorm.",
    "attn_pool.q": "head.attention.in_proj_",
    "attn_pool.kv": "head.attention.in_proj_",
    "attn_pool.proj": "head.attention.out_proj.",
    "attn_pool.norm": "head.layernorm.",
    "attn_pool.mlp.fc1": "head.mlp.fc1.",
    "attn_pool.mlp.fc2": "head.mlp.fc2.",
}


def siglip_vision_names(name: str, names: frozenset[str]) -> tuple[str, ...]:
    """Return transformers' names of one of a ViT's tensors."""
    module, _, leaf = name.rpartition(".")
    if name in _VISION_TENSORS:
        return (_VISION_TENSORS[name],)
    if module in _VISION_MODULES:
        return (_VISION_MODULES[module] + leaf,)
    return clip_vision_names(name, names)


# torch's MultiheadAttention concatenates queries, keys and values.
_IN_PROJ_ROWS = {
    "attn_pool.q.weight": (0, 1, 3),
    "attn_pool.q.bias": (0, 1, 3),
    "attn_pool.kv.weight": (1, 3, 3),
    "attn_pool.kv.bias": (1, 3, 3),
}
_POSITIONS = ("embeddings.position_ids",)
_TEXT_IMPORT = TowerImport("SiglipTextConfig", _read_text, siglip_text_names, ignored=_POSITIONS, has_projection=True)

TOWERS = (SiglipTextTower,)
IMPORTS = {
    "siglip_text_model": _TEXT_IMPORT,
    "siglip2_text_model": _TEXT_IMPORT,  # the same layers, see transformers' modular_siglip2.py
    "siglip_vision_model": TowerImport(
        "SiglipVisionConfig", _read_vision, siglip_vision_names, ignored=_POSITIONS, rows=_IN_PROJ_ROWS
    ),
}
CLASSES = {
    name: ModelClass(f"{name}_vision_model", f"{name}_text_model", has_projections=False)
    for name in ("siglip", "siglip2")
}
