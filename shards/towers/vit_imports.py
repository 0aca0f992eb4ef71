"""Vision towers of transformers that a timm VisionTransformer computes exactly.

Source: transformers 5.23, modeling_vit.py, modeling_deit.py and conversion_mapping.py: `save_pretrained` writes the
older names, which all versions read; the newer ones are the names of the modules since then.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shards.errors import ModelError
from shards.towers.base import TowerImport
from shards.towers.from_transformers import checked, mlp_ratio, one_side, parse_config
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
}
_WHOLE = {
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


def read_vit(tree: Mapping[str, Any], names: frozenset[str], where: Path) -> VitTower:
    """Read a ViT's section of config.json.

    Args:
        tree: the section; missing keys have transformers' defaults.
        names: names of its tensors.
        where: path of config.json, for messages.

    Raises:
        ModelError: it has something that we can't build.
    """
    from transformers import ViTConfig

    return _read(parse_config(ViTConfig, tree, where), names, where)


def read_deit(tree: Mapping[str, Any], names: frozenset[str], where: Path) -> VitTower:
    """Read a DeiT's section of config.json: a ViT whose distillation token is a register with a position of its own.

    Args:
        tree: the section; missing keys have transformers' defaults.
        names: names of its tensors.
        where: path of config.json, for messages.

    Raises:
        ModelError: it has something that we can't build.
    """
    from transformers import DeiTConfig

    return _read(parse_config(DeiTConfig, tree, where), names, where, num_reg_tokens=1)


def _read(theirs: Any, names: frozenset[str], where: Path, *, num_reg_tokens: int = 0) -> VitTower:
    return checked(
        VitTower,
        where,
        theirs,
        {"num_channels": 3, "pooler_act": "tanh", "pooler_output_size": theirs.hidden_size},
        image_size=one_side(theirs.image_size, "vision_config.image_size", where),
        patch_size=one_side(theirs.patch_size, "vision_config.patch_size", where),
        width=theirs.hidden_size,
        depth=theirs.num_hidden_layers,
        num_heads=theirs.num_attention_heads,
        mlp_ratio=mlp_ratio(theirs.hidden_size, theirs.intermediate_size),
        qkv_bias=theirs.qkv_bias,
        num_reg_tokens=num_reg_tokens,
        pooler="tanh" if not names or "pooler.dense.weight" in names else "none",
        norm_eps=theirs.layer_norm_eps,
        activation=vision_activation(theirs.hidden_act, where),
    )


def vision_activation(name: str, where: Path) -> VisionActivation:
    """Find timm's name of an activation.

    Raises:
        ModelError: it has none.
    """
    if name not in ACTIVATIONS:
        raise ModelError(f"{where}: vision_config.hidden_act = {name!r}; only {', '.join(ACTIVATIONS)} can be imported")
    return ACTIVATIONS[name]


def vit_names(name: str, names: frozenset[str]) -> tuple[str, ...]:
    """Find transformers' names of one of a ViT's tensors, in the older or the newer form."""
    if name in _WHOLE:
        return (_WHOLE[name],)
    module, _, leaf = name.rpartition(".")
    if module in _TOP:
        return (f"{_TOP[module]}.{leaf}",)
    _, layer, part = module.split(".", 2)
    is_new = any(each.startswith("layers.") for each in names)
    prefix, block = ("layers.", _NEW_BLOCK) if is_new else ("encoder.layer.", _OLD_BLOCK)
    return tuple(f"{prefix}{layer}.{theirs}.{leaf}" for theirs in block[part])


_UNUSED = ("embeddings.mask_token", "classifier.", "cls_classifier.", "distillation_classifier.", "decoder.")

IMPORTS = {
    "vit": TowerImport(read_vit, vit_names, ignored=_UNUSED),
    "deit": TowerImport(read_deit, vit_names, ignored=_UNUSED),
}
