"""Import of a timm checkpoint as our vision tower: loaded by timm, then described by our configuration."""

from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from shards.config import CONFIG_FILE, PreprocessConfig, VisionConfig, describe, read_json
from shards.convert.dual_encoder import mlp_ratio
from shards.convert.image_processor import Interpolation, Resize
from shards.errors import ModelError
from shards.vision import build_vit
from shards.weights import WEIGHTS_FILE

_ACTIVATION_OF_CLASS = {
    "GELU": "gelu",
    "GELUTanh": "gelu_tanh",
    "QuickGELU": "quick_gelu",
    "ReLU": "relu",
    "SiLU": "silu",
}
# timm keeps a share of the image (crop_pct) after scaling up; here the whole shortest side is kept.
_RESIZE_OF_CROP_MODE: dict[str, Resize] = {"center": "crop", "squash": "squash", "border": "pad"}
_INTERPOLATIONS: dict[str, Interpolation] = {"bilinear": "bilinear", "bicubic": "bicubic", "lanczos": "lanczos"}


def load_timm_vit(folder: Path) -> Any:
    """Load a timm checkpoint as timm does, renamed keys included, without its classifier.

    Raises:
        ModelError: it is no timm checkpoint, its weights aren't safetensors, or timm can't load it.
    """
    import timm

    config = read_json(folder / CONFIG_FILE, "give a folder with timm's config.json and model.safetensors")
    if "architecture" not in config:
        raise ModelError(f"{folder / CONFIG_FILE}: found no `architecture`; give a checkpoint that timm saved")
    if not (folder / WEIGHTS_FILE).is_file():
        raise ModelError(f"{folder}: found no {WEIGHTS_FILE}; pickled checkpoints aren't read, so convert it first")
    try:
        # With its own number of classes timm is strict; with another it would leave missing tensors random.
        vit = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"{folder}: timm can't load {config['architecture']!r} ({reason})") from None
    vit.reset_classifier(0)
    return vit


def read_vit_config(vit: Any, folder: Path) -> VisionConfig:
    """Describe a timm model, and check that building from the description gives the same model.

    Raises:
        ModelError: the model has something that we don't build.
    """
    from timm.models.vision_transformer import VisionTransformer

    if type(vit) is not VisionTransformer:
        raise ModelError(f"{folder}: this is a {type(vit).__name__}; only timm's VisionTransformer can be imported")
    if vit.global_pool not in ("token", "avg", "avgmax", "max") or vit.pool_include_prefix:
        raise ModelError(f"{folder}: pooling {vit.global_pool!r} can't be imported; token, avg, avgmax and max can")
    activation = type(getattr(vit.blocks[0].mlp, "act", None)).__name__
    if activation not in _ACTIVATION_OF_CLASS:
        raise ModelError(f"{folder}: the MLP's activation {activation} can't be imported; GELU, ReLU and SiLU can")
    try:
        config = _describe_vit(vit, _ACTIVATION_OF_CLASS[activation], folder)
    except ValidationError as error:
        raise ModelError(f"{folder}: {describe(error)}") from None
    _check_same(vit, config, folder)
    return config


def read_timm_preprocess(vit: Any, image_size: int, max_caption_tokens: int, folder: Path) -> PreprocessConfig:
    """Convert timm's preprocessing of a model to ours.

    Args:
        vit: the timm model.
        image_size: side of the model's images, px.
        max_caption_tokens: longest caption.
        folder: the checkpoint, for messages.

    Raises:
        ModelError: timm crops or interpolates in a way that we don't.
    """
    from timm.data import resolve_data_config

    data = resolve_data_config(model=vit, pretrained_cfg=vit.pretrained_cfg)
    if data["crop_mode"] not in _RESIZE_OF_CROP_MODE or data["interpolation"] not in _INTERPOLATIONS:
        raise ModelError(
            f"{folder}: crop_mode {data['crop_mode']!r} with interpolation {data['interpolation']!r}; "
            f"expected one of {list(_RESIZE_OF_CROP_MODE)} and one of {list(_INTERPOLATIONS)}"
        )
    return PreprocessConfig(
        image_size=image_size,
        resize=_RESIZE_OF_CROP_MODE[data["crop_mode"]],
        interpolation=_INTERPOLATIONS[data["interpolation"]],
        mean=tuple(data["mean"]),
        std=tuple(data["std"]),
        max_caption_tokens=max_caption_tokens,
    )


def _describe_vit(vit: Any, activation: str, folder: Path) -> VisionConfig:
    block = vit.blocks[0]
    fc_norm = not isinstance(vit.fc_norm, torch.nn.Identity)
    scale = getattr(block.ls1, "init_values", None)
    return VisionConfig(
        image_size=_one_side(vit.patch_embed.img_size, "img_size", folder),
        patch_size=_one_side(vit.patch_embed.patch_size, "patch_size", folder),
        width=vit.embed_dim,
        depth=len(vit.blocks),
        num_heads=block.attn.num_heads,
        mlp_ratio=mlp_ratio(vit.embed_dim, block.mlp.fc1.out_features),
        qkv_bias=block.attn.qkv.bias is not None,
        class_token=vit.cls_token is not None,
        num_reg_tokens=vit.num_reg_tokens,
        pos_embed="none" if vit.pos_embed is None else "learn",
        no_embed_class=vit.no_embed_class,
        pre_norm=not isinstance(vit.norm_pre, torch.nn.Identity),
        final_norm=fc_norm or not isinstance(vit.norm, torch.nn.Identity),
        fc_norm=fc_norm,
        init_values=scale,
        pool=vit.global_pool,
        norm_eps=block.norm1.eps,
        activation=activation,
    )


def _check_same(vit: Any, config: VisionConfig, folder: Path) -> None:
    """Compare the structure that torch prints, and all shapes, with the model that the description builds."""
    with torch.device("meta"):
        built = build_vit(config)
    for theirs, ours in zip(_structure(vit), _structure(built), strict=False):
        if theirs != ours:
            raise ModelError(f"{folder}: this ViT has {theirs.strip()!r} where we build {ours.strip()!r}")
    their_shapes = {name: tuple(tensor.shape) for name, tensor in vit.state_dict().items()}
    our_shapes = {name: tuple(tensor.shape) for name, tensor in built.state_dict().items()}
    if different := sorted(set(their_shapes.items()) ^ set(our_shapes.items())):
        raise ModelError(f"{folder}: the tensor {different[0][0]} is not as we build it, of {different[0][1]}")


def _structure(vit: Any) -> list[str]:
    # torch's and timm's exact GELU print differently and compute the same.
    return repr(vit).replace("GELU(approximate='none')", "GELU()").splitlines()


def _one_side(sides: tuple[int, int], key: str, folder: Path) -> int:
    if sides[0] != sides[1]:
        raise ModelError(f"{folder}: {key} = {sides}; only squares can be imported")
    return sides[0]
