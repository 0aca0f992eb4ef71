"""Reading of timm's checkpoints: the model as timm loads it, our description of its tower, its preprocessing."""

from __future__ import annotations

from collections.abc import Collection
from itertools import zip_longest
from math import floor
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from shards.convert.preprocessing import Interpolation, Resize
from shards.file_schema import describe, read_json
from shards.model_config import CONFIG_FILE
from shards.model_errors import ModelError
from shards.preprocess import PreprocessConfig
from shards.tensor_shapes import BATCH_COUNTER
from shards.towers.eva import EvaTower
from shards.towers.from_transformers import mlp_ratio, one_side
from shards.towers.naflex import NaFlexTower
from shards.towers.timm_tower import Mlp, TimmVisionTower
from shards.towers.tower_kinds import VisionTower
from shards.towers.vit import VisionActivation, VitTower
from shards.weights import WEIGHTS_FILE

_ACTIVATION_OF_CLASS: dict[str, VisionActivation] = {
    "GELU": "gelu",
    "GELUTanh": "gelu_tanh",
    "QuickGELU": "quick_gelu",
    "ReLU": "relu",
    "SiLU": "silu",
}
_MLPS: dict[str, Mlp] = {"Mlp": "mlp", "SwiGLU": "swiglu", "GluMlp": "swiglu_packed"}
# ParallelScalingBlock, DiffAttention and the like are left out: few models have them.
_BLOCKS = ("Block", "EvaBlock", "EvaBlockPostNorm")
_ATTENTIONS = ("Attention", "EvaAttention", "AttentionRope")
# RotaryEmbeddingMixed is left out: one tensor holds the positions of all layers, so it can't be cut.
_ROPES = {"RotaryEmbeddingCat": "cat", "RotaryEmbeddingDinoV3": "dinov3"}
_RESIZE_OF_CROP_MODE: dict[str, Resize] = {"center": "crop", "squash": "squash"}
_INTERPOLATIONS: dict[str, Interpolation] = {"bilinear": "bilinear", "bicubic": "bicubic", "lanczos": "lanczos"}


_POSITION_SETTINGS = (
    "pos_embed_interp_mode",
    "pos_embed_ar_preserving",
    "pos_embed_antialias",
    "pos_embed_align_corners",
)


def load_timm_model(folder: Path) -> Any:
    """Load a timm checkpoint (safetensors) as timm does, without classifier; raises a ModelError if timm can't."""
    from shards.loading import check_values

    if not (folder / WEIGHTS_FILE).is_file():
        raise ModelError(f"{folder}: found no {WEIGHTS_FILE}; pickled checkpoints aren't read, so convert it first")
    model = _create(folder, pretrained=True)
    for name, tensor in model.state_dict().items():
        if not name.endswith(BATCH_COUNTER):
            check_values(folder / WEIGHTS_FILE, name, tensor)
    return model


def build_timm_model(folder: Path) -> Any:
    """Build a timm checkpoint's model on the meta device, without classifier; raises a ModelError if timm can't."""
    import torch

    with torch.device("meta"):
        return _create(folder, pretrained=False)


def _create(folder: Path, *, pretrained: bool) -> Any:
    import timm

    config = read_json(folder / CONFIG_FILE, "give a folder with timm's config.json and model.safetensors")
    if "architecture" not in config:
        raise ModelError(f"{folder / CONFIG_FILE}: found no `architecture`; give a checkpoint that timm saved")
    try:
        # timm is strict only with the checkpoint's own number of classes; with another it would leave missing tensors
        # random.
        model = timm.create_model(f"local-dir:{folder}", pretrained=False).eval()
        if pretrained and not _load_own_names(model, folder):
            model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()  # which renames
    except (OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"{folder}: timm can't load {config['architecture']!r} ({reason})") from None
    model.reset_classifier(0)
    return model


def _load_own_names(model: Any, folder: Path) -> bool:
    """Load weights into a built model; False if their names or shapes are others, of older checkpoints.

    What timm builds with weights fetches those of a hybrid's backbone from the web first.
    """
    from timm.models import load_checkpoint

    try:
        load_checkpoint(model, str(folder / WEIGHTS_FILE), strict=True)
    except RuntimeError:
        return False
    return True


def read_timm_tower(model: Any, folder: Path) -> TimmVisionTower:
    """Describe a timm model; raises a ModelError unless building from the description gives the same model."""
    from timm.models.eva import Eva
    from timm.models.naflexvit import NaFlexVit
    from timm.models.vision_transformer import VisionTransformer

    classes = {VisionTransformer: _describe_vit, Eva: _describe_eva, NaFlexVit: _describe_naflex}
    describe_model = classes.get(type(model))
    if describe_model is None:
        names = ", ".join(each.__name__ for each in classes)
        name = model.pretrained_cfg.get("architecture", "")
        raise ModelError(
            f"{folder}: {name}{': ' if name else ''}this is a {type(model).__name__}; of timm these are cut by layers: "
            f"{names}"
        )
    if model.global_pool not in get_args(TimmVisionTower.model_fields["pool"].annotation):
        raise ModelError(
            f"{folder}: pooling {model.global_pool!r} can't be imported; token, avg, avgmax, max and map can"
        )
    try:
        tower = describe_model(model, folder)
    except ValidationError as error:
        raise ModelError(f"{folder}: {describe(error)}") from None
    _check_positions(model, check_structure(model, tower, folder), tower, folder)
    return tower


def read_timm_preprocess(
    vit: Any, image_size: int, max_caption_tokens: int, folder: Path, *, patch_px: int | None = None
) -> PreprocessConfig:
    """Convert a timm model's preprocessing; raises a ModelError if timm crops or interpolates as this project can't.

    `patch_px` is the side of a patch, px, for a model whose images keep their proportions.
    """
    from timm.data import resolve_data_config

    data = resolve_data_config(model=vit, pretrained_cfg=vit.pretrained_cfg)
    mode, share = data["crop_mode"], data["crop_pct"]
    if mode not in _RESIZE_OF_CROP_MODE or data["interpolation"] not in _INTERPOLATIONS or not 0 < share <= 1:
        raise ModelError(
            f"{folder}: crop_mode {mode!r} and interpolation {data['interpolation']!r} with crop_pct {share}; "
            f"expected one of {list(_RESIZE_OF_CROP_MODE)} and one of {list(_INTERPOLATIONS)}, and at most 1"
        )
    resize_size = floor(image_size / share) if patch_px is None else image_size
    return PreprocessConfig(
        image_size=image_size,
        resize=_RESIZE_OF_CROP_MODE[mode] if patch_px is None else "patches",
        resize_size=None if resize_size == image_size else resize_size,
        interpolation=_INTERPOLATIONS[data["interpolation"]],
        mean=tuple(data["mean"]),
        std=tuple(data["std"]),
        reduced_decode=False,  # so that pixels equal those of the training
        max_caption_tokens=max_caption_tokens,
    )


def _require_one_of(folder: Path, part: str, found: Any, known: Collection[str]) -> None:
    if type(found).__name__ not in known:
        raise ModelError(f"{folder}: its {part}: found {type(found).__name__}; only {', '.join(known)} can be imported")


def _describe_shared(model: Any, folder: Path) -> dict[str, Any]:
    """Return the settings that both classes have, by a model's first block (a ModelError if it has other parts)."""
    from torch.nn import Identity

    block = model.blocks[0]
    _require_one_of(folder, "layers", block, _BLOCKS)
    _require_one_of(folder, "attention", block.attn, _ATTENTIONS)
    _require_one_of(folder, "MLP", block.mlp, _MLPS)
    return {
        "width": model.embed_dim,
        "depth": len(model.blocks),
        "num_heads": block.attn.num_heads,
        "mlp": _MLPS[type(block.mlp).__name__],
        "qk_norm": not isinstance(block.attn.q_norm, Identity),
        "scale_attn_norm": not isinstance(block.attn.norm, Identity),
        "scale_mlp_norm": not isinstance(block.mlp.norm, Identity),
        "pre_norm": not isinstance(model.norm_pre, Identity),
        "final_norm": not (isinstance(model.norm, Identity) and isinstance(model.fc_norm, Identity)),
        "fc_norm": not isinstance(model.fc_norm, Identity),
        "pool": model.global_pool,
        "norm_eps": block.norm1.eps,
    }


def _describe_front(model: Any, folder: Path) -> dict[str, Any]:
    return {
        "image_size": one_side(model.patch_embed.img_size, "img_size", folder),
        "patch_size": one_side(model.patch_embed.patch_size, "patch_size", folder),
        "class_token": model.cls_token is not None,
        "num_reg_tokens": 0 if model.reg_token is None else model.reg_token.shape[1],
        "pos_embed": "none" if model.pos_embed is None else "learn",
        "no_embed_class": model.no_embed_class,
    }


def _activation_of(model: Any, folder: Path) -> VisionActivation:
    """Return the activation of the MLPs; raises a ModelError if it is unknown, or if not only patches are pooled."""
    if model.pool_include_prefix:
        raise ModelError(f"{folder}: its pooling takes class and register tokens too, which can't be imported")
    activation = type(model.blocks[0].mlp.act).__name__
    if activation not in _ACTIVATION_OF_CLASS:
        raise ModelError(f"{folder}: the MLP's activation {activation} can't be imported; GELU, ReLU and SiLU can")
    return _ACTIVATION_OF_CLASS[activation]


def _describe_naflex(model: Any, folder: Path) -> NaFlexTower:
    embeds, block = model.embeds, model.blocks[0]
    unknown = [name for name in (*_POSITION_SETTINGS, "channels_last") if not hasattr(embeds, name)]
    if unknown:
        raise ModelError(
            f"{folder}: the installed timm doesn't say how a NaFlexVit treats its positions and patches (no "
            f"{', '.join(unknown)}); timm 1.0.31 does: pip install 'timm>=1.0.31'"
        )
    if model.rope is not None or embeds.pos_embed_use_grid_sample or not embeds.channels_last or not embeds.is_linear:
        raise ModelError(
            f"{folder}: a NaFlexVit with rotary or sampled positions, or with patches of another order, can't be "
            "imported; those with a position table that is resized can"
        )
    shared, activation = _describe_shared(model, folder), _activation_of(model, folder)
    patch_size = one_side(embeds.patch_size, "patch_size", folder)
    height, width = model.pretrained_cfg["input_size"][1:]
    table_side = one_side(embeds.pos_embed_grid_size or (1, 1), "pos_embed_grid_size", folder)
    return NaFlexTower(
        **shared,
        image_size=table_side * patch_size,
        patch_size=patch_size,
        max_patches=(height // patch_size) * (width // patch_size),
        mlp_ratio=mlp_ratio(model.embed_dim, block.mlp.fc2.in_features),
        qkv_bias=block.attn.qkv.bias is not None,
        class_token=model.has_class_token,
        num_reg_tokens=model.num_reg_tokens,
        pos_embed="none" if embeds.pos_embed_type == "none" else "learn",
        factorized_pos_embed=embeds.pos_embed_type == "factorized",
        **{name: getattr(embeds, name) for name in _POSITION_SETTINGS},
        init_values=getattr(block.ls1, "init_values", None),
        activation=activation,
    )


def _describe_vit(vit: Any, folder: Path) -> VitTower:
    from torch.nn import Identity

    shared, block = _describe_shared(vit, folder) | _describe_front(vit, folder), vit.blocks[0]
    activation = _activation_of(vit, folder)
    first = block.mlp.fc1_g if shared["mlp"] == "swiglu" else block.mlp.fc1
    return VitTower(
        **shared,
        mlp_ratio=mlp_ratio(vit.embed_dim, first.out_features),
        qkv_bias=block.attn.qkv.bias is not None,
        proj_bias=block.attn.proj.bias is not None,
        norm="rms" if type(block.norm1).__name__ == "RmsNorm" else "layer",
        embed_norm=not isinstance(getattr(vit.patch_embed, "norm", Identity()), Identity),
        init_values=getattr(block.ls1, "init_values", None),
        activation=activation,
    )


def _describe_eva(eva: Any, folder: Path) -> EvaTower:
    shared, block = _describe_shared(eva, folder) | _describe_front(eva, folder), eva.blocks[0]
    attention = block.attn
    query = attention.qkv if attention.q_proj is None else attention.q_proj
    fields: dict[str, Any] = {}
    if eva.rope is not None:
        _require_one_of(folder, "positions", eva.rope, _ROPES)
        reference = getattr(eva.rope, "ref_feat_shape", None)
        fields = {
            "rope": _ROPES[type(eva.rope).__name__],
            "rope_temperature": eva.rope.temperature,
            "rope_rotate_half": getattr(eva.rope, "rotate_half", False),  # timm 1.0.30 made it an option
            "rope_grid_offset": eva.rope.grid_offset,
            "rope_grid_indexing": eva.rope.grid_indexing,
            "rope_ref_side": None if reference is None else one_side(reference, "ref_feat_shape", folder),
        }
    if eva.attn_pool is not None:
        ratio = mlp_ratio(eva.embed_dim, eva.attn_pool.mlp.fc1.out_features)
        fields |= {"attn_pool_num_heads": eva.attn_pool.num_heads, "attn_pool_mlp_ratio": ratio}
    return EvaTower(
        **shared,
        **{"rope": "none"} | fields,
        mlp_ratio=mlp_ratio(eva.embed_dim, block.mlp.fc2.in_features),
        attention="eva" if type(attention).__name__ == "EvaAttention" else "rope",
        qkv_fused=attention.q_proj is None,
        qkv_bias=query.bias is not None or getattr(attention, "q_bias", None) is not None,
        post_norm=type(block).__name__ == "EvaBlockPostNorm",
        init_values=getattr(block, "init_values", None),
    )


def check_structure(model: Any, tower: VisionTower, folder: Path) -> Any:
    """Build a description on the meta device; raises a ModelError if its structure or its shapes are others."""
    import torch

    with torch.device("meta"):
        built = tower.build()
    for theirs, own in zip_longest(_structure(model), _structure(built), fillvalue="nothing"):
        if theirs != own:
            raise ModelError(f"{folder}: this model has {theirs.strip()!r} where embedder builds {own.strip()!r}")
    their_shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    our_shapes = {name: tuple(tensor.shape) for name, tensor in built.state_dict().items()}
    if different := sorted(set(their_shapes.items()) ^ set(our_shapes.items())):
        raise ModelError(f"{folder}: the tensor {different[0][0]} is not as we build it, of {different[0][1]}")
    return built


def _check_positions(model: Any, built: Any, tower: TimmVisionTower, folder: Path) -> None:
    """Raise a ModelError if the description builds other rotary positions."""
    import torch

    if getattr(model, "rope", None) is None:
        return
    positions = model.rope.get_embed(shape=list(model.patch_embed.grid_size))
    if not positions.is_meta:
        built.rope.to_empty(device=positions.device).init_non_persistent_buffers()
        if not torch.equal(positions, built.rope.get_embed()):
            raise ModelError(f"{folder}: its rotary positions are not those that we build from {tower.describe()}")


def _structure(model: Any) -> list[str]:
    # torch's and timm's exact GELU print differently and compute the same.
    return repr(model).replace("GELU(approximate='none')", "GELU()").splitlines()
