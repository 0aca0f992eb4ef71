"""Towers of transformers' Tipsv2Model: DINOv2's ViT with registers, and captions of the mean of their tokens.

Published files have the names of the first code, under `vision_encoder.` and `text_encoder.`; `save_pretrained` writes
them, and those of the classes are read as well.

Legend: `R` captions, `T` tokens of the longest one, `N` tokens of all captions, `D` width. Source: transformers 5.23,
modular_tipsv2.py and conversion_mapping.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from shards.towers import dino_imports
from shards.towers.base import ModelClass, Shapes, TowerImport
from shards.towers.clip import PreNormTextTower
from shards.towers.dino_imports import dinov2_with_registers_names
from shards.towers.from_transformers import QKV, QKV_ROWS, read_settings
from shards.towers.text_encoder import TextActivation, pool_by

if TYPE_CHECKING:
    import torch


class Tipsv2TextTower(PreNormTextTower):
    """TIPSv2's text transformer: positions of sines, no token at either end, the mean of a caption's tokens."""

    label = "TIPSv2 text"
    library_class = "Tipsv2TextModel"
    masks_padding = True

    family: Literal["tipsv2_text"] = "tipsv2_text"
    vocab_size: int = Field(32000, ge=1)
    hidden_size: int = Field(768, ge=4, description="even")
    num_hidden_layers: int = Field(12, ge=1, description="layers")
    num_attention_heads: int = Field(12, ge=1)
    intermediate_size: int = Field(3072, ge=1)
    hidden_act: TextActivation = "relu"
    max_position_embeddings: int = Field(64, ge=1, description="longest caption, in tokens")
    layer_norm_eps: float = Field(1e-5, gt=0)
    pad_token_id: int = Field(0, ge=0)
    scale_sqrt_depth: bool = Field(True, description="token embeddings times the root of hidden_size")

    @property
    def needs_special_tokens(self) -> bool:
        """Return False: a caption is only its words."""
        return False

    def front_shapes(self) -> Shapes:
        """Return the shape of the token table; positions are computed."""
        return {"embeddings.token_embedding.weight": (self.vocab_size, self.hidden_size)}

    def fill_buffers(self, module: Any, device: torch.device) -> None:
        """Fill the tables of positions, which have no values on the meta device."""
        import torch

        super().fill_buffers(module, device)
        if module.embeddings is not None:
            with torch.device(device):
                module.embeddings.position_embedding = type(module.embeddings.position_embedding)(module.config)

    def pool_tokens(self, module: Any, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run the last norm, and average each caption's tokens, in float32; (R, T, D) to (R, D)."""
        return pool_by("mean", module.final_layer_norm(x_FLD.float()), layout)


def _read_text(theirs: Any, names: frozenset[str], where: Path) -> Tipsv2TextTower:
    del names
    return read_settings(Tipsv2TextTower, where, theirs, {}, pad_token_id=theirs.pad_token_id or 0)


_TEXT_TOP = {"embeddings.token_embedding.": "token_embedding.", "final_layer_norm.": "ln_final."}
_TEXT_BLOCK = {"layer_norm1": "ln_1", "layer_norm2": "ln_2", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}
_TEXT_BLOCK["self_attn.out_proj"] = "attn.out_proj"


def tipsv2_text_names(name: str, names: frozenset[str]) -> tuple[str, ...]:
    """Return transformers' names of a tensor; queries, keys and values are rows of those of all three."""
    is_published = "token_embedding.weight" in names
    for own, theirs in _TEXT_TOP.items():
        if name.startswith(own):
            return (name.replace(own, theirs) if is_published else name,)
    prefix, layer, part = "encoder.layers.", *name.removeprefix("encoder.layers.").split(".", 1)
    module, _, leaf = part.rpartition(".")
    if is_published and module in QKV:
        return (f"transformer.resblocks.{layer}.attn.in_proj_{leaf}",)
    if module in QKV:
        return tuple(f"{prefix}{layer}.{each}.{leaf}" for each in QKV)
    return (f"transformer.resblocks.{layer}.{_TEXT_BLOCK[module]}.{leaf}" if is_published else name,)


def tipsv2_vision_names(name: str, names: frozenset[str]) -> tuple[str, ...]:
    """Return transformers' names of one of a ViT's tensors; published ones are nearly timm's."""
    if "pos_embed" not in names:
        return dinov2_with_registers_names(name, names)
    if name == "cls_token":
        return ("cls_token", "pos_embed")
    others = {".mlp.fc1.": (".mlp.c_fc.", ".mlp.w12."), ".mlp.fc2.": (".mlp.c_proj.", ".mlp.w3.")}
    found = [name.replace(own, theirs) for own, each in others.items() if own in name for theirs in each]
    return ("register_tokens",) if name == "reg_token" else (next((each for each in found if each in names), name),)


TOWERS = (Tipsv2TextTower,)
_DINOV2 = dino_imports.IMPORTS["dinov2_with_registers"]
IMPORTS = {
    "tipsv2_text_model": TowerImport(
        "Tipsv2TextConfig", _read_text, tipsv2_text_names, ignored=("embeddings.position_ids",), rows=QKV_ROWS
    ),
    "tipsv2_vision_model": replace(
        _DINOV2,
        config_class="Tipsv2VisionConfig",
        theirs=tipsv2_vision_names,
        ignored=(*_DINOV2.ignored, "mask_token"),
        positions="linear",
    ),
}
CLASSES = {"tipsv2": ModelClass("tipsv2_vision_model", "tipsv2_text_model", has_projections=False)}
