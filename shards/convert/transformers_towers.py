"""Towers of transformers, a ViT and an ALBERT: their configurations and tensor names as ours.

Source: transformers 5.23, modeling_vit.py and conversion_mapping.py: `save_pretrained` writes the older names, which
all versions read; the newer ones are the names of the modules since then.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shards.errors import ModelError
from shards.schema import describe
from shards.tensor_shapes import LOGIT_SCALE
from shards.towers.albert import AlbertTower
from shards.towers.vit import VisionActivation, VitTower

_OUR_ACTIVATION: dict[str, VisionActivation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
# Heads of transformers' ALBERT classes, which an encoder doesn't need, and tables that follow from the shapes.
_NOT_ENCODER = (
    "predictions.",
    "sop_classifier.",
    "classifier.",
    "qa_outputs.",
    "embeddings.position_ids",
    "embeddings.token_type_ids",
)

# One of our tensors is one of theirs, or several of theirs concatenated.
TheirNames = tuple[str, ...]

_TOP = {
    "vision.patch_embed.proj": "vision_model.embeddings.patch_embeddings.projection",
    "vision.norm": "vision_model.layernorm",
    "vision_head.pooler": "vision_model.pooler.dense",
    "vision_head.projection": "visual_projection",
    "text_head.projection": "text_projection",
}
_WHOLE = {
    "vision.cls_token": "vision_model.embeddings.cls_token",
    "vision.pos_embed": "vision_model.embeddings.position_embeddings",
    LOGIT_SCALE: LOGIT_SCALE,
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
_NEW_LAYERS = "vision_model.layers."
_OLD_LAYERS = "vision_model.encoder.layer."

# Tables that older versions saved although the shapes determine them, and a token that only pretraining uses.
IGNORED = frozenset(
    {
        "text_model.embeddings.position_ids",
        "text_model.embeddings.token_type_ids",
        "vision_model.embeddings.mask_token",
    }
)


def import_vit_config(tree: Mapping[str, Any], where: Path) -> VitTower:
    """Read a transformers ViT's configuration; missing keys have transformers' defaults.

    Raises:
        ModelError: it is no ViT, or has something that we can't build.
    """
    from transformers import ViTConfig

    if tree.get("model_type") != "vit":
        raise ModelError(f"{where}: the vision tower is {tree.get('model_type')!r}; only 'vit' can be imported")
    theirs = _parse(ViTConfig, tree, where)
    expected = {"num_channels": 3, "pooler_act": "tanh", "pooler_output_size": theirs.hidden_size}
    for key, value in expected.items():
        if getattr(theirs, key) != value:
            raise ModelError(f"{where}: vision_config.{key} = {getattr(theirs, key)!r}; only {value!r} can be imported")
    if theirs.hidden_act not in _OUR_ACTIVATION:
        known = ", ".join(_OUR_ACTIVATION)
        raise ModelError(f"{where}: vision_config.hidden_act = {theirs.hidden_act!r}; only {known} can be imported")
    try:
        return VitTower(
            image_size=one_side(theirs.image_size, "vision_config.image_size", where),
            patch_size=one_side(theirs.patch_size, "vision_config.patch_size", where),
            width=theirs.hidden_size,
            depth=theirs.num_hidden_layers,
            num_heads=theirs.num_attention_heads,
            mlp_ratio=mlp_ratio(theirs.hidden_size, theirs.intermediate_size),
            qkv_bias=theirs.qkv_bias,
            pooler="tanh",
            norm_eps=theirs.layer_norm_eps,
            activation=_OUR_ACTIVATION[theirs.hidden_act],
        )
    except ValidationError as error:
        raise ModelError(f"{where}: vision tower: {describe(error)}") from None


def mlp_ratio(width: int, mlp_width: int) -> float:
    """Compute the ratio that timm rounds to this hidden width; half a unit more where it would round below it."""
    ratio = mlp_width / width
    return ratio if int(width * ratio) == mlp_width else (mlp_width + 0.5) / width


def import_text_config(tree: Mapping[str, Any], where: Path, *, has_pooler: bool) -> AlbertTower:
    """Read an ALBERT's configuration; missing keys have transformers' defaults.

    Args:
        tree: content of config.json.
        where: its path, for messages.
        has_pooler: whether the checkpoint has a pooler; without one, tokens are averaged.

    Raises:
        ModelError: it is no ALBERT, or has something that we can't build.
    """
    from transformers import AlbertConfig

    if tree.get("model_type") != "albert":
        raise ModelError(f"{where}: the text tower is {tree.get('model_type')!r}; only 'albert' can be imported")
    if tree.get("position_embedding_type", "absolute") != "absolute":
        found = tree["position_embedding_type"]
        raise ModelError(f"{where}: position_embedding_type = {found!r}; only 'absolute' can be imported")
    theirs = _parse(AlbertConfig, tree, where)
    try:
        fields = {key: getattr(theirs, key) for key in AlbertTower.model_fields if key not in ("family", "pool")}
        # Only padding has this id, and it is masked.
        fields["pad_token_id"] = fields["pad_token_id"] or 0
        return AlbertTower(**fields, pool="pooler" if has_pooler else "mean")
    except ValidationError as error:
        raise ModelError(f"{where}: text tower: {describe(error)}") from None


def _parse(config_class: Any, tree: Mapping[str, Any], where: Path) -> Any:
    """Transformers' configuration from the content of a config.json."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        return config_class.from_dict(dict(tree))
    except StrictDataclassError as error:
        raise ModelError(f"{where}: {' '.join(str(error).split())[:200]}") from None


def one_side(value: Any, key: str, where: Path) -> int:
    """Give the side of a square that is written as one number or as two equal ones.

    Args:
        value: the number or numbers.
        key: its name, for the message.
        where: file or folder, for the message.

    Raises:
        ModelError: the sides differ.
    """
    sides = set(value) if isinstance(value, list | tuple) else {value}
    if len(sides) != 1:
        raise ModelError(f"{where}: {key} = {value!r}; only squares can be imported")
    return int(sides.pop())


def rename_albert(files: Mapping[str, Path]) -> dict[str, str]:
    """Map our names to a checkpoint's, whether it is of AlbertModel or of a class with heads around it.

    Raises:
        ModelError: a tensor belongs neither to the encoder nor to a known head.
    """
    renamed: dict[str, str] = {}
    for name, path in files.items():
        inner = name.removeprefix("albert.")
        if inner.startswith(("embeddings.", "encoder.", "pooler.")) and not inner.startswith(_NOT_ENCODER):
            renamed[f"text.{inner}"] = name
        elif not inner.startswith(_NOT_ENCODER):
            raise ModelError(f"{path}: found the tensor {name}, which no ALBERT of transformers has")
    return renamed


def uses_new_names(their_names: Iterable[str]) -> bool:
    """Whether a checkpoint's ViT layers have the newer names."""
    return any(name.startswith(_NEW_LAYERS) for name in their_names)


def their_names(name: str, *, new: bool = False) -> TheirNames:
    """Find transformers' names of one of our tensors.

    Args:
        name: our name, in a model that transformers' classes can represent.
        new: whether to give the newer names of ViT layers.
    """
    if name in _WHOLE:
        return (_WHOLE[name],)
    if name.startswith("text."):
        return ("text_model." + name.removeprefix("text."),)
    module, _, leaf = name.rpartition(".")
    if module in _TOP:
        return (f"{_TOP[module]}.{leaf}",)
    _, _, layer, part = module.split(".", 3)
    prefix, block = (_NEW_LAYERS, _NEW_BLOCK) if new else (_OLD_LAYERS, _OLD_BLOCK)
    return tuple(f"{prefix}{layer}.{theirs}.{leaf}" for theirs in block[part])
