"""Mapping between our tensor names and those of transformers' VisionTextDualEncoderModel (ViT + ALBERT).

Source: transformers 5.23, modeling_vit.py and conversion_mapping.py: `save_pretrained` writes the older names, which
all versions read; the newer ones are the names of the modules since then.
"""

from collections.abc import Iterable

from shards.tensor_shapes import LOGIT_SCALE

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
_NEW_BLOCK = {
    "norm1": ("layernorm_before",),
    "attn.qkv": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    "attn.proj": ("attention.o_proj",),
    "norm2": ("layernorm_after",),
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
