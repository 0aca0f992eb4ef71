"""Towers of transformers' AltCLIPModel: an XLM-RoBERTa with a norm and a linear layer behind [CLS], and CLIP's ViT.

Source: transformers 5.23, modular_altclip.py: `AltCLIPTextModel` computes as RoBERTa does, then runs `pre_LN` and
`transformation`. Published files have `layer` in the names of the text tower and `layers` in those of the vision tower;
`save_pretrained` writes `layer` in both, and the classes have `layers`. All are read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from shards.towers import clip
from shards.towers.base import ModelClass, Rows, Shapes, TowerFlops, linear_shapes, norm_shapes
from shards.towers.bert import RobertaTower
from shards.towers.text_encoder import encoder_import, encoder_names

if TYPE_CHECKING:
    import torch


class AltClipTextTower(RobertaTower):
    """AltCLIP's text encoder; the width of its vectors is that of the model which taught it."""

    label = "AltCLIP text"
    dual_encoder_type = None
    head_prefixes = ("pre_LN.", "transformation.")

    family: Literal["altclip_text"] = "altclip_text"  # type: ignore[assignment]
    vocab_size: int = Field(250002, ge=1)
    hidden_size: int = Field(1024, ge=1)
    num_hidden_layers: int = Field(24, ge=1, description="layers")
    num_attention_heads: int = Field(16, ge=1)
    intermediate_size: int = Field(4096, ge=1)
    project_dim: int = Field(768, ge=1, description="width of a caption's vector before the projection")
    pool: Literal["cls"] = "cls"

    @property
    def pooled_dim(self) -> int:
        """Width of a caption's vector."""
        return self.project_dim

    def head_shapes(self) -> Shapes:
        """Return the shapes of the norm and of the layer behind it."""
        return norm_shapes("pre_LN", self.hidden_size) | linear_shapes(
            "transformation", self.hidden_size, self.project_dim
        )

    def flops(self, num_tokens: int) -> TowerFlops:
        """Count the operations for one caption."""
        return TowerFlops(0, super().flops(num_tokens).layer, 2 * self.hidden_size * self.project_dim)

    def build(self) -> Any:
        """Build the encoder, with the norm and the layer behind it next to its own modules."""
        from torch import nn

        module = super().build()
        module.pre_LN = nn.LayerNorm(self.hidden_size, eps=self.layer_norm_eps)
        module.transformation = nn.Linear(self.hidden_size, self.project_dim)
        return module

    def pool_tokens(self, module: Any, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run norm and linear layer on the first token of each caption, in float32; (R, T, D) to (R, project_dim)."""
        del layout
        return self._transform(module, x_FLD[:, 0])

    def reference(self, module: Any, rows: Rows) -> torch.Tensor:
        """Compute pooled features by transformers' own forward function of the encoder."""
        return self._transform(module, super().reference(module, rows))

    def _transform(self, module: Any, first_FD: torch.Tensor) -> torch.Tensor:
        transformed: torch.Tensor = module.transformation(module.pre_LN(first_FD.float()))
        return transformed


def altclip_text_names(name: str, names: frozenset[str]) -> tuple[str, ...]:
    """Return transformers' name of a tensor, in the older or the newer form."""
    if name.startswith(AltClipTextTower.head_prefixes):
        return (name,)
    is_new = any(each.startswith("roberta.encoder.layers.") for each in names)
    inner = name.replace("encoder.layer.", "encoder.layers.") if is_new else name
    return tuple(f"roberta.{each}" for each in encoder_names(inner, names))


def altclip_vision_names(name: str, names: frozenset[str]) -> tuple[str, ...]:
    """Return transformers' names of one of a ViT's tensors, in either form."""
    found = clip.clip_vision_names(name, names)
    is_old = any("encoder.layer." in each for each in names)
    return tuple(each.replace("encoder.layers.", "encoder.layer.") for each in found) if is_old else found


TOWERS = (AltClipTextTower,)
_TEXT = encoder_import(
    AltClipTextTower,
    "AltCLIPTextConfig",
    pool="cls",
    ignored=("roberta.embeddings.position_ids", "roberta.embeddings.token_type_ids", "roberta.pooler."),
)
IMPORTS = {
    "altclip_text_model": replace(_TEXT, theirs=altclip_text_names),
    "altclip_vision_model": replace(clip.IMPORTS["clip_vision_model"], theirs=altclip_vision_names),
}
CLASSES = {"altclip": ModelClass("altclip_vision_model", "altclip_text_model")}
