"""Vision towers of transformers that a timm VisionTransformer computes exactly.

Source: transformers 5.23, modeling_vit.py, modeling_deit.py and conversion_mapping.py: `save_pretrained` writes the
older names, which all versions read; the newer ones are the names of the modules since then.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from shards.model_errors import ModelError
from shards.towers.base import TowerImport
from shards.towers.from_transformers import check_settings, vision_fields
from shards.towers.vit import VisionActivation, VitTower

ACTIVATIONS: dict[str, VisionActivation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}

_TOP = {
    "patch_embed.proj": "embeddings.patch_embeddings.projection",
    "norm": "layernorm",
    "head.pooler": "pooler.dense",
    "cls_token": "embeddings.cls_token",
    "reg_token": "embeddings.distillation_token",
    "pos_embed": "embeddings.position_embeddings",
}
_OLD_BLOCK = {
    "norm1": ("layernorm_before",),
    "attn.qkv": ("attention.attention.query", "attention.attention.key", "attention.attention.value"),
    "attn.proj": ("attention.output.dense",),
    "norm2": ("layernorm_after",),
    "mlp.fc1": ("intermediate.dense",),
    "mlp.fc2": ("output.dense",),
}
_NEW_BLOCK = _OLD_BLOCK | {
    "attn.qkv": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    "attn.proj": ("attention.o_proj",),
    "mlp.fc1": ("mlp.fc1",),
    "mlp.fc2": ("mlp.fc2",),
}


def _read(theirs: Any, names: frozenset[str], where: Path, *, num_reg_tokens: int = 0) -> VitTower:
    """Read the configuration of a ViT; a DeiT's distillation token is a register with a position."""
    return check_settings(
        VitTower,
        where,
        theirs,
        {"num_channels": 3, "pooler_act": "tanh", "pooler_output_size": theirs.hidden_size},
        **vision_fields(theirs, where),
        qkv_bias=theirs.qkv_bias,
        num_reg_tokens=num_reg_tokens,
        pooler="tanh" if not names or "pooler.dense.weight" in names else "none",
        activation=vision_activation(theirs.hidden_act, where),
    )


def vision_activation(name: str, where: Path) -> VisionActivation:
    """Return timm's name of an activation; raises a ModelError if it has none."""
    if name not in ACTIVATIONS:
        raise ModelError(f"{where}: vision_config.hidden_act = {name!r}; only {', '.join(ACTIVATIONS)} can be imported")
    return ACTIVATIONS[name]


def vit_names(name: str, names: frozenset[str]) -> tuple[str, ...]:
    """Return transformers' names of one of a ViT's tensors, in the older or the newer form."""
    is_new = any(each.startswith("layers.") for each in names)
    prefix, block = ("layers.", _NEW_BLOCK) if is_new else ("encoder.layer.", _OLD_BLOCK)
    return find_names(name, _TOP, block, prefix)


def find_names(name: str, top: Mapping[str, str], block: Mapping[str, tuple[str, ...]], prefix: str) -> tuple[str, ...]:
    """Return the names of one of a ViT's tensors, by tables of what is outside the blocks and of a block's modules."""
    module, _, leaf = name.rpartition(".")
    if name in top or module in top:
        return (top[name] if name in top else f"{top[module]}.{leaf}",)
    _, layer, part = module.split(".", 2)
    return tuple(f"{prefix}{layer}.{theirs}.{leaf}" for theirs in block[part])


_UNUSED = ("embeddings.mask_token", "classifier.", "cls_classifier.", "distillation_classifier.", "decoder.")

IMPORTS = {
    "vit": TowerImport("ViTConfig", _read, vit_names, ignored=_UNUSED),
    "deit": TowerImport("DeiTConfig", partial(_read, num_reg_tokens=1), vit_names, ignored=_UNUSED),
}
