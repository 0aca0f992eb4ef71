"""Import of a timm ViT and a transformers ALBERT, each trained elsewhere, with fresh projections into one space."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from shards.config import CONFIG_FILE, ModelConfig, PreprocessConfig, find_model_folder
from shards.convert.preprocessing import Interpolation, Resize, import_tokenizer, max_caption_tokens
from shards.convert.transformers_model import check_all_used, read_tower
from shards.errors import ModelError
from shards.ranges import LayerRange
from shards.saving import staged_model, write_weights
from shards.schema import describe, read_json
from shards.tensor_shapes import LOGIT_SCALE, model_shapes
from shards.towers import IMPORTS
from shards.towers.base import TextTower
from shards.towers.from_transformers import mlp_ratio, one_side
from shards.towers.vit import VisionActivation, VitTower
from shards.weights import WEIGHTS_FILE, find_weights

if TYPE_CHECKING:
    import torch

# Captions are short; a fresh model need not use the whole position table.
MAX_CAPTION_TOKENS = 64

_ACTIVATION_OF_CLASS: dict[str, VisionActivation] = {
    "GELU": "gelu",
    "GELUTanh": "gelu_tanh",
    "QuickGELU": "quick_gelu",
    "ReLU": "relu",
    "SiLU": "silu",
}
# timm keeps a share of the image (crop_pct) after scaling up; here the whole shortest side is kept.
_RESIZE_OF_CROP_MODE: dict[str, Resize] = {"center": "crop", "squash": "squash", "border": "pad"}
_INTERPOLATIONS: dict[str, Interpolation] = {"bilinear": "bilinear", "bicubic": "bicubic", "lanczos": "lanczos"}


def import_timm_and_albert(
    vision_src: str | Path, albert_src: str | Path, out: str | Path, embedding_dim: int, *, seed: int = 0
) -> ModelConfig:
    """Join a timm ViT and an ALBERT to a model folder whose projections are fresh (`trained` is false).

    Args:
        vision_src: a folder with timm's config.json and model.safetensors.
        albert_src: a transformers ALBERT folder with its tokeniser.
        out: the model folder to write; must not exist yet, or be empty.
        embedding_dim: size of the common space.
        seed: seed of the projections.

    Raises:
        ModelError: a checkpoint has something that can't be mapped, or lacks something.
    """
    vit_folder, albert_folder = find_model_folder(vision_src), find_model_folder(albert_src)
    vit = _load_timm_vit(vit_folder)
    path = albert_folder / CONFIG_FILE
    tree = read_json(path, "give a transformers ALBERT folder")
    files = find_weights(albert_folder)
    text, names = _read_text(tree, files, path)
    vision = _read_vit_config(vit, vit_folder)
    max_tokens = min(MAX_CAPTION_TOKENS, max_caption_tokens(albert_folder, text))
    try:
        config = ModelConfig(
            name=Path(out).name,
            trained=False,
            embedding_dim=embedding_dim,
            vision=vision,
            text=text,
            preprocess=_read_timm_preprocess(vit, vision.image_size, max_tokens, vit_folder),
        )
    except ValidationError as error:
        raise ModelError(f"{vit_folder} and {albert_folder}: {describe(error)}") from None
    tokenizer = import_tokenizer(albert_folder, config.text)
    with staged_model(Path(out), config, tokenizer) as stage:
        write_weights(stage, _joined_tensors(config, vit, files, names, seed))
    return config


def _read_text(tree: Mapping[str, Any], files: Mapping[str, Path], path: Path) -> tuple[TextTower, dict[str, str]]:
    """Text tower of a checkpoint, with heads around it or without, and its name of each of our tensors."""
    model_type = str(tree.get("model_type"))
    names = {name.removeprefix(f"{model_type}."): name for name in files}
    text = read_tower(model_type, "text", tree, frozenset(names), path)
    if not isinstance(text, TextTower):
        raise ModelError(f"{path}: model_type = {model_type!r}; give a checkpoint of a text tower")
    theirs = {
        name: IMPORTS[model_type].theirs(name, frozenset(names)) for name in text.shapes(LayerRange(0, text.num_layers))
    }
    bare = {name: files[full] for name, full in names.items()}
    check_all_used(
        bare, {their for each in theirs.values() for their in each}, IMPORTS[model_type].ignored, {"text": model_type}
    )
    return text, {f"text.{name}": names.get(each[0], each[0]) for name, each in theirs.items()}


def _joined_tensors(
    config: ModelConfig, vit: Any, albert_files: Mapping[str, Path], albert_names: Mapping[str, str], seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of the joined model in their order.

    Args:
        config: the joined model.
        vit: the timm model.
        albert_files: the ALBERT's files by tensor.
        albert_names: its name of each of our tensors.
        seed: seed of the projections.
    """
    from shards.fresh import fresh_tensors
    from shards.loading import read_tensor

    fresh = dict(fresh_tensors(config, seed, ("vision_head.", "text_head.", LOGIT_SCALE)))
    ready = fresh | {f"vision.{name}": tensor for name, tensor in vit.state_dict().items()}
    for name, shape in model_shapes(config).items():
        if name in ready:
            yield name, ready[name]
        else:
            yield name, read_tensor(albert_files, albert_names.get(name, name), shape)
    yield LOGIT_SCALE, fresh[LOGIT_SCALE]


def _load_timm_vit(folder: Path) -> Any:
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


def _read_vit_config(vit: Any, folder: Path) -> VitTower:
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


def _read_timm_preprocess(vit: Any, image_size: int, max_caption_tokens: int, folder: Path) -> PreprocessConfig:
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


def _describe_vit(vit: Any, activation: VisionActivation, folder: Path) -> VitTower:
    from torch.nn import Identity

    block = vit.blocks[0]
    fc_norm = not isinstance(vit.fc_norm, Identity)
    scale = getattr(block.ls1, "init_values", None)
    return VitTower(
        image_size=one_side(vit.patch_embed.img_size, "img_size", folder),
        patch_size=one_side(vit.patch_embed.patch_size, "patch_size", folder),
        width=vit.embed_dim,
        depth=len(vit.blocks),
        num_heads=block.attn.num_heads,
        mlp_ratio=mlp_ratio(vit.embed_dim, block.mlp.fc1.out_features),
        qkv_bias=block.attn.qkv.bias is not None,
        class_token=vit.cls_token is not None,
        num_reg_tokens=vit.num_reg_tokens,
        pos_embed="none" if vit.pos_embed is None else "learn",
        no_embed_class=vit.no_embed_class,
        pre_norm=not isinstance(vit.norm_pre, Identity),
        final_norm=fc_norm or not isinstance(vit.norm, Identity),
        fc_norm=fc_norm,
        init_values=scale,
        pool=vit.global_pool,
        norm_eps=block.norm1.eps,
        activation=activation,
    )


def _check_same(vit: Any, config: VitTower, folder: Path) -> None:
    """Compare the structure that torch prints, and all shapes, with the model that the description builds."""
    import torch

    with torch.device("meta"):
        built = config.build()
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
