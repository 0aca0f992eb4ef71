"""Towers of open_clip's checkpoints: described as this project's, with the source of each tensor.

Source: open_clip 3.3, `transformer.VisionTransformer`, `transformer.TextTransformer` and `timm_model.TimmModel`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pydantic import ValidationError

from shards.convert.open_clip_config import OPEN_CLIP_CONFIG_FILE, OpenClipConfig, TextSection
from shards.convert.transformers_model import read_tower
from shards.convert.whole_models import describe_whole, read_timm_model
from shards.file_schema import describe
from shards.model_config import Projection
from shards.model_errors import ModelError
from shards.towers.base import Tower
from shards.towers.clip import ClipActivation, ClipTextTower
from shards.towers.from_transformers import one_side
from shards.towers.registry import IMPORTS
from shards.towers.siglip import SiglipTextTower
from shards.towers.text_encoder import TextEncoderTower
from shards.towers.tower_kinds import TextTower, VisionTower
from shards.towers.vit import VisionActivation, VitTower

AnyTower_co = TypeVar("AnyTower_co", bound=Tower, covariant=True)


@dataclass(frozen=True)
class Source:
    """Source of one of our tensors: the checkpoint's tensor, and its rows as in `TowerImport.rows` (None for all).

    `is_transposed` marks a matrix stored as (in, out).
    """

    name: str
    rows: tuple[int, int, int] | None = None
    is_transposed: bool = False


@dataclass(frozen=True)
class Side(Generic[AnyTower_co]):
    """One tower of a checkpoint; `find` returns a tensor's source by our name, None if open_clip omits it (zeros).

    `projection_tensors` are sources by name, without a bias if open_clip's projection has none.
    """

    tower: AnyTower_co
    find: Callable[[str], Source | None]
    projection: Projection
    projection_tensors: Mapping[str, Source]


def read_vision(config: OpenClipConfig, folder: Path) -> Side[VisionTower]:
    """Read the vision tower; raises a ModelError if it can't be built here."""
    section = config.vision_cfg
    if section.timm_model_name is not None:
        return _read_timm(config, folder)
    quick = _checked_quick_gelu(config.quick_gelu, section.act_kwargs is not None, "vision_cfg", folder)
    activation: VisionActivation = "quick_gelu" if quick else "gelu_tanh" if section.is_tanh_gelu else "gelu"
    try:
        tower = VitTower(
            image_size=one_side(section.image_size, "vision_cfg.image_size", folder),
            patch_size=one_side(section.patch_size, "vision_cfg.patch_size", folder),
            width=section.width,
            depth=section.layers,
            num_heads=section.width // section.head_width,
            mlp_ratio=section.mlp_ratio,
            pre_norm=not section.no_ln_pre,
            fc_norm=section.final_ln_after_pool and section.pool_type == "avg",
            pool="avg" if section.pool_type == "avg" else "token",
            init_values=section.ls_init_value,
            norm_eps=section.norm_eps,
            activation=activation,
        )
    except ValidationError as error:
        raise ModelError(f"{folder}: vision_cfg: {describe(error)}") from None
    return Side(tower, _vit_source, "linear", {"projection.weight": Source("visual.proj", is_transposed=True)})


def read_text(config: OpenClipConfig, names: frozenset[str], folder: Path) -> Side[TextTower]:
    """Read the text tower; raises a ModelError if it can't be built here."""
    section = config.text_cfg
    if section.hf_model_name is not None:
        return read_hf_text(config, names, folder)
    prefix = "text." if any(name.startswith("text.") for name in names) else ""
    quick = _checked_quick_gelu(config.quick_gelu, section.act_kwargs is not None, "text_cfg", folder)
    activation: ClipActivation = "quick_gelu" if quick else "gelu_pytorch_tanh" if section.is_tanh_gelu else "gelu"
    fields = {
        "vocab_size": section.vocab_size,
        "hidden_size": section.width,
        "num_hidden_layers": section.layers,
        "num_attention_heads": section.heads,
        "intermediate_size": int(section.width * section.mlp_ratio),
        "hidden_act": activation,
        "max_position_embeddings": section.context_length,
        "layer_norm_eps": section.norm_eps,
    }
    try:
        tower = _own_text(section, fields, folder)
    except ValidationError as error:
        raise ModelError(f"{folder}: text_cfg: {describe(error)}") from None
    return Side(tower, lambda name: _text_source(name, prefix), *_text_projection(config, prefix))


def _own_text(section: TextSection, fields: dict[str, Any], folder: Path) -> TextTower:
    """Make the tower that computes like open_clip's text transformer; its tokeniser's ids are set later.

    Without a causal mask, every token sees the padding, so all captions have one length.
    """
    if not section.no_causal_mask and section.pool_type != "last":
        end = section.eos_id if section.pool_type == "eos" else section.vocab_size - 1
        return ClipTextTower(**fields, eos_token_id=end, pad_token_id=end)
    if section.no_causal_mask and section.pool_type != "eos":
        pooled: Literal["last", "highest"] = "last" if section.pool_type == "last" else "highest"
        return SiglipTextTower(**fields, pad_token_id=section.pad_id, pooled_token=pooled)
    raise ModelError(
        f"{folder}: text_cfg.no_causal_mask = {section.no_causal_mask} with pool_type {section.pool_type!r}; can be "
        "imported: true with 'argmax' or 'last', false with 'argmax' or 'eos'"
    )


def _checked_quick_gelu(quick: bool, has_settings: bool, key: str, folder: Path) -> bool:
    if quick and has_settings:
        raise ModelError(f"{folder}: quick_gelu takes no {key}.act_kwargs; leave one of the two out")
    return quick


_VIT_WHOLE = {
    "cls_token": "class_embedding",
    "pos_embed": "positional_embedding",
    "patch_embed.proj.weight": "conv1.weight",
}
_VIT_NORMS = {"norm_pre": "ln_pre", "norm": "ln_post", "fc_norm": "ln_post"}
_VIT_BLOCK = {
    "norm1": "ln_1.",
    "attn.qkv": "attn.in_proj_",
    "attn.proj": "attn.out_proj.",
    "norm2": "ln_2.",
    "mlp.fc1": "mlp.c_fc.",
    "mlp.fc2": "mlp.c_proj.",
    "ls1": "ls_1.",
    "ls2": "ls_2.",
}


def _vit_source(name: str) -> Source | None:
    """Find a tensor of timm's ViT in open_clip's, whose patches never have a bias."""
    if name == "patch_embed.proj.bias":
        return None
    if name in _VIT_WHOLE:
        return Source(f"visual.{_VIT_WHOLE[name]}")
    module, _, leaf = name.rpartition(".")
    if module in _VIT_NORMS:
        return Source(f"visual.{_VIT_NORMS[module]}.{leaf}")
    _, layer, part = module.split(".", 2)
    return Source(f"visual.transformer.resblocks.{layer}.{_VIT_BLOCK[part]}{leaf}")


_TEXT_WHOLE = {
    "embeddings.token_embedding.weight": "token_embedding.weight",
    "embeddings.position_embedding.weight": "positional_embedding",
    "final_layer_norm.weight": "ln_final.weight",
    "final_layer_norm.bias": "ln_final.bias",
}
_TEXT_BLOCK = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "self_attn.out_proj": "attn.out_proj",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}
# torch's MultiheadAttention concatenates queries, keys and values.
_IN_PROJ_ROWS = {"self_attn.q_proj": (0, 1, 3), "self_attn.k_proj": (1, 2, 3), "self_attn.v_proj": (2, 3, 3)}


def _text_source(name: str, prefix: str) -> Source:
    """Find a tensor of transformers' CLIP or SigLIP text tower in open_clip's."""
    if name in _TEXT_WHOLE:
        return Source(f"{prefix}{_TEXT_WHOLE[name]}")
    module, _, leaf = name.rpartition(".")
    layer, _, part = module.removeprefix("encoder.layers.").partition(".")
    block = f"{prefix}transformer.resblocks.{layer}"
    if part in _IN_PROJ_ROWS:
        return Source(f"{block}.attn.in_proj_{leaf}", rows=_IN_PROJ_ROWS[part])
    return Source(f"{block}.{_TEXT_BLOCK[part]}.{leaf}")


def _text_projection(config: OpenClipConfig, prefix: str) -> tuple[Projection, dict[str, Source]]:
    """Return kind and sources of the projection: a linear layer if it has a bias, else a parameter."""
    section, name = config.text_cfg, f"{prefix}text_projection"
    if section.proj_type == "none":
        return "none", {}
    if section.proj_bias:
        return "linear", _linear(name, bias=True)
    return "linear", {"projection.weight": Source(name, is_transposed=True)}


def _linear(name: str, *, bias: bool) -> dict[str, Source]:
    return {f"projection.{leaf}": Source(f"{name}.{leaf}") for leaf in ("weight", "bias") if bias or leaf == "weight"}


def read_hf_text(config: OpenClipConfig, names: frozenset[str], folder: Path) -> Side[TextTower]:
    """Read a text tower of transformers; raises a ModelError if unsupported, or its configuration isn't local."""
    section, prefix = config.text_cfg, "text.transformer."
    tree = _hf_config(str(section.hf_model_name), folder)
    kind = str(tree["model_type"])
    bare = frozenset(name.removeprefix(prefix) for name in names if name.startswith(prefix))
    tower = read_tower(kind, "text", tree, bare, folder / OPEN_CLIP_CONFIG_FILE)
    if not isinstance(tower, TextEncoderTower) or kind not in _HF_KINDS:
        raise ModelError(
            f"{folder}: text_cfg.hf_model_name = {section.hf_model_name!r}: this is a {kind}; can be imported: "
            f"{', '.join(_HF_KINDS)}"
        )
    pooler = section.hf_pooler_type or ("cls_last_hidden_state_pooler" if kind == "bert" else "mean_pooler")
    tower = tower.model_copy(update={"pool": _HF_POOLS[pooler]})
    projection: Projection = section.hf_proj_type or "none"
    names_of = {"none": (), "linear": ("weight",), "mlp": ("0.weight", "2.weight")}[projection]
    tensors = {f"projection.{name}": Source(f"text.proj.{name}") for name in names_of}
    return Side(tower, lambda name: Source(prefix + IMPORTS[kind].theirs(name, bare)[0]), projection, tensors)


_HF_KINDS = ("bert", "roberta", "xlm-roberta")
_HF_POOLS = {"mean_pooler": "mean", "cls_pooler": "pooler", "cls_last_hidden_state_pooler": "cls"}


def _hf_config(name: str, folder: Path) -> dict[str, Any]:
    """Return a transformers model's configuration from huggingface_hub's cache or a folder, without downloading."""
    from transformers import AutoConfig

    try:
        theirs = AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:100]
        raise ModelError(
            f"{folder}: text_cfg.hf_model_name = {name!r}: its configuration isn't in the cache of huggingface_hub "
            f"({reason}); fetch it with `hf download {name} config.json`"
        ) from None
    tree: dict[str, Any] = theirs.to_dict()
    return tree


@dataclass(frozen=True)
class _Trunk:
    """timm's model of a checkpoint, without values and classifier: how open_clip makes it.

    `pool` takes the place of its global pooling; `classifier` is the name of the one that is the projection, or None.
    """

    module: Any
    arguments: Mapping[str, Any]
    pool: str | None
    classifier: str | None


def _read_timm(config: OpenClipConfig, folder: Path) -> Side[VisionTower]:
    section, name = config.vision_cfg, str(config.vision_cfg.timm_model_name)
    side, trunk = one_side(section.image_size, "vision_cfg.image_size", folder), _build_trunk(config, folder)
    tower = read_timm_model(
        trunk.module, folder, lambda: describe_whole(name, trunk.arguments, trunk.pool, side, folder)
    )
    if tower.side_px != side:
        raise ModelError(
            f"{folder}: vision_cfg.image_size = {section.image_size}, but {section.timm_model_name} takes "
            f"{tower.side_px} px; write that, or the timm model of the other size"
        )
    projection: Projection = "none"
    tensors: dict[str, Source] = {}
    if trunk.classifier is not None:
        projection, tensors = "linear", _linear(f"visual.trunk.{trunk.classifier}", bias=True)
    elif section.timm_proj == "linear":
        projection, tensors = "linear", _linear("visual.head.proj", bias=section.timm_proj_bias)
    elif section.timm_proj == "mlp":
        names = {"0.weight": "fc1.weight", "0.bias": "fc1.bias", "2.weight": "fc2.weight"}
        names |= {"2.bias": "fc2.bias"} if section.timm_proj_bias else {}
        projection = "wide_mlp"
        tensors = {f"projection.{own}": Source(f"visual.head.mlp.{their}") for own, their in names.items()}
    return Side(tower, lambda name: Source(f"visual.trunk.{name}"), projection, tensors)


def _build_trunk(config: OpenClipConfig, folder: Path) -> _Trunk:
    """Build timm's model without values, as open_clip does."""
    import torch

    from shards.compat import deferred_compiler

    with deferred_compiler():
        import timm
    section, name = config.vision_cfg, str(config.vision_cfg.timm_model_name)
    if not timm.is_model(name.partition(".")[0]) or ":" in name:  # a name with a colon would be downloaded
        raise ModelError(f"{folder}: vision_cfg.timm_model_name = {name!r}: timm {timm.__version__} has no such model")
    has_head = section.timm_proj in ("linear", "mlp")  # of open_clip, behind timm's model
    num_classes = 0 if section.timm_proj == "none" else config.embed_dim
    arguments = {} if has_head else {"num_classes": num_classes, "global_pool": section.timm_pool}
    pool = section.timm_pool or None if has_head else None
    try:
        with torch.device("meta"):
            trunk = timm.create_model(name, **arguments)
            names = {module: name for name, module in trunk.named_modules()}
            classifier = names[trunk.get_classifier()] if arguments.get("num_classes") else None
            trunk.reset_classifier(0, **({} if pool is None else {"global_pool": pool}))
    except (AssertionError, AttributeError, LookupError, RuntimeError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        pool = section.timm_pool
        raise ModelError(f"{folder}: timm can't build {name!r} with timm_pool {pool!r} ({reason})") from None
    return _Trunk(trunk, arguments, pool, classifier)
