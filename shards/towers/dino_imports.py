"""Vision towers of transformers' DINOv2 (with and without registers) and DINOv3, which timm's classes compute exactly.

Their pooled features are the class token after the last norm.

Source: transformers 5.23, modeling_dinov2.py, modeling_dinov2_with_registers.py, modeling_dinov3_vit.py and
conversion_mapping.py: `save_pretrained` writes the older names, which all versions read; the newer ones are the names
of the modules since then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shards.model_errors import ModelError
from shards.towers.base import TowerImport
from shards.towers.eva import EvaTower
from shards.towers.from_transformers import check_settings, vision_fields
from shards.towers.vit import VitTower
from shards.towers.vit_imports import vision_activation

if TYPE_CHECKING:
    import torch

_DINOV2 = {
    "cls_token": "embeddings.cls_token",
    "reg_token": "embeddings.register_tokens",
    "pos_embed": "embeddings.position_embeddings",
    "patch_embed.proj": "embeddings.patch_embeddings.projection",
    "norm": "layernorm",
}
# Older and newer names by part of a block; `*` stands for weight or bias.
_DINOV2_BLOCK: dict[str, tuple[tuple[str, ...], ...]] = {
    "norm1.*": (("norm1.*",),),
    "attn.qkv.*": (
        ("attention.attention.query.*", "attention.attention.key.*", "attention.attention.value.*"),
        ("attention.q_proj.*", "attention.k_proj.*", "attention.v_proj.*"),
    ),
    "attn.proj.*": (("attention.output.dense.*",), ("attention.o_proj.*",)),
    "ls1.gamma": (("layer_scale1.lambda1",),),
    "norm2.*": (("norm2.*",),),
    "mlp.fc1.*": (("mlp.fc1.*",), ("mlp.weights_in.*",), ("mlp.gate_proj.*", "mlp.up_proj.*")),
    "mlp.fc2.*": (("mlp.fc2.*",), ("mlp.weights_out.*",), ("mlp.down_proj.*",)),
    "ls2.gamma": (("layer_scale2.lambda1",),),
}
_DINOV3 = {
    "cls_token": "embeddings.cls_token",
    "reg_token": "embeddings.register_tokens",
    "patch_embed.proj": "embeddings.patch_embeddings",
    "norm": "norm",
}
_QKV = tuple(f"attention.{part}_proj.*" for part in "qkv")
_DINOV3_BLOCK: dict[str, tuple[tuple[str, ...], ...]] = {
    "norm1.*": (("norm1.*",),),
    "attn.qkv.*": (_QKV,),
    "attn.q_bias": (("attention.q_proj.bias",),),
    "attn.v_bias": (("attention.v_proj.bias",),),
    "attn.proj.*": (("attention.o_proj.*",),),
    "gamma_1": (("layer_scale1.lambda1",),),
    "norm2.*": (("norm2.*",),),
    "mlp.fc1.*": (("mlp.up_proj.*",),),
    "mlp.fc1_g.*": (("mlp.gate_proj.*",),),
    "mlp.fc1_x.*": (("mlp.up_proj.*",),),
    "mlp.fc2.*": (("mlp.down_proj.*",),),
    "gamma_2": (("layer_scale2.lambda1",),),
}


def _read_dinov2(theirs: Any, names: frozenset[str], where: Path) -> VitTower:
    """Read the configuration of a DINOv2, with or without registers, which have no positions."""
    del names
    num_registers = getattr(theirs, "num_register_tokens", None)
    hidden = int(theirs.hidden_size * theirs.mlp_ratio)
    if theirs.use_swiglu_ffn:
        # Two thirds, rounded up to a multiple of 8; timm has gate and value in one matrix.
        hidden = 2 * ((int(hidden * 2 / 3) + 7) // 8 * 8)
    return check_settings(
        VitTower,
        where,
        theirs,
        {"num_channels": 3},
        **vision_fields(theirs, where, mlp_width=hidden),
        mlp="swiglu_packed" if theirs.use_swiglu_ffn else "mlp",
        qkv_bias=theirs.qkv_bias,
        init_values=theirs.layerscale_value,
        activation="silu" if theirs.use_swiglu_ffn else vision_activation(theirs.hidden_act, where),
        num_reg_tokens=num_registers or 0,
        no_embed_class=num_registers is not None,
    )


def _read_dinov3(theirs: Any, names: frozenset[str], where: Path) -> EvaTower:
    del names
    biases = (theirs.query_bias, theirs.key_bias, theirs.value_bias)
    if theirs.query_bias != theirs.value_bias or (theirs.key_bias and not theirs.query_bias):
        raise ModelError(
            f"{where}: {theirs.model_type}: query_bias, key_bias, value_bias = {biases}; "
            "only the same for all, or for queries and values, can be imported"
        )
    act = "silu" if theirs.use_gated_mlp else "gelu"
    return check_settings(
        EvaTower,
        where,
        theirs,
        {"num_channels": 3, "proj_bias": True, "mlp_bias": True, "hidden_act": act},
        **vision_fields(theirs, where),
        mlp="swiglu" if theirs.use_gated_mlp else "mlp",
        qkv_bias=theirs.query_bias,
        attention="rope" if theirs.key_bias else "eva",
        num_reg_tokens=theirs.num_register_tokens,
        pos_embed="none",
        rope="dinov3",
        rope_temperature=theirs.rope_theta,
        rope_rotate_half=True,
        init_values=theirs.layerscale_value,
    )


def dinov2_names(name: str, names: frozenset[str]) -> tuple[str, ...]:
    """Return transformers' names of one of a ViT's tensors, in the older or the newer form."""
    return _find(name, names, _DINOV2, _DINOV2_BLOCK, ("encoder.layer.",))


def dinov2_with_registers_names(name: str, names: frozenset[str]) -> tuple[str, ...]:
    """Like `dinov2_names`, for a class token with a position and registers without one."""
    if name == "cls_token":
        return (_DINOV2["cls_token"], _DINOV2["pos_embed"])
    return dinov2_names(name, names)


def dinov3_names(name: str, names: frozenset[str]) -> tuple[str, ...]:
    """Return transformers' names of one of an Eva's tensors, in the older or the newer form."""
    return _find(name, names, _DINOV3, _DINOV3_BLOCK, ("layer.", "model.layer."))


def _find(
    name: str,
    names: frozenset[str],
    top: Mapping[str, str],
    block: Mapping[str, tuple[tuple[str, ...], ...]],
    prefixes: tuple[str, ...],
) -> tuple[str, ...]:
    """Return the names of one of our tensors in the first form that the checkpoint has, or in the oldest."""
    if not name.startswith("blocks."):
        module, _, leaf = name.rpartition(".")
        return (top[name],) if name in top else (f"{top[module]}.{leaf}",)
    _, layer, part = name.split(".", 2)
    leaf = part.rpartition(".")[2]
    forms = block[part] if part in block else block[f"{part.removesuffix(leaf)}*"]
    found = [
        tuple(f"{prefix}{layer}.{their.replace('*', leaf)}" for their in form) for prefix in prefixes for form in forms
    ]
    return next((form for form in found if form[0] in names), found[0])


def _class_token(tensors: list[torch.Tensor]) -> torch.Tensor:
    token, positions = tensors
    return token + positions[:, :1]


def _patch_positions(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the positions of the patches, which follow that of the class token."""
    return tensors[0][:, 1:]


_COMBINED: dict[str, Callable[[list[torch.Tensor]], torch.Tensor]] = {
    "cls_token": _class_token,
    "pos_embed": _patch_positions,
}
_UNUSED = ("embeddings.mask_token", "classifier.")
# A DINOv3 without registers has an empty table of them.
_UNUSED_DINOV3 = (*_UNUSED, "embeddings.register_tokens")

IMPORTS = {
    "dinov2": TowerImport("Dinov2Config", _read_dinov2, dinov2_names, ignored=_UNUSED, positions="resampled"),
    "dinov2_with_registers": TowerImport(
        "Dinov2WithRegistersConfig",
        _read_dinov2,
        dinov2_with_registers_names,
        ignored=_UNUSED,
        combined=_COMBINED,
        positions="antialiased",
    ),
    "dinov3_vit": TowerImport(
        "DINOv3ViTConfig", _read_dinov3, dinov3_names, ignored=_UNUSED_DINOV3, positions="rotary"
    ),
}
