"""Import of a single tower: a text or vision tower saved by transformers, or a vision tower saved by timm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from shards.convert.pickled_weights import checkpoint_weights
from shards.convert.preprocessing import import_budget, import_processor, import_tokenizer, max_caption_tokens
from shards.convert.sentence_transformers import find_sentence_model
from shards.convert.timm_vision import build_timm_model, load_timm_model, read_timm_preprocess
from shards.convert.transformers_model import check_all_used, import_tensor, joined_tensor, read_tower, resize_tower
from shards.convert.whole_models import describe_saved, read_timm_model
from shards.file_schema import describe, read_json
from shards.model_config import CONFIG_FILE, ModelConfig
from shards.model_errors import ModelError
from shards.preprocess import PreprocessConfig
from shards.saving import staged_model, write_weights
from shards.tensor_shapes import model_shapes
from shards.towers.base import Shapes, Tower, TowerImport
from shards.towers.registry import IMPORTS
from shards.towers.tower_kinds import TextTower, VisionTower
from shards.weights import stored_names

if TYPE_CHECKING:
    import torch

DEFAULT_CAPTION_TOKENS: int = PreprocessConfig.model_fields["max_caption_tokens"].default


def import_tower(folder: Path, out: Path, name: str) -> ModelConfig:
    """Convert a tower saved by transformers, with or without a head, into a model folder of only that tower.

    Its vectors are the library's own pooled features, without a projection. `folder` includes the tokeniser or image
    processor. Raises a ModelError if the checkpoint has something that can't be mapped, or lacks something.
    """
    path = folder / CONFIG_FILE
    tree = read_json(path, "give the folder of a model that transformers saved")
    model_type = str(tree.get("model_type"))
    with checkpoint_weights(folder, out) as weights:
        files = bare_names(weights)
        tower = read_tower(model_type, "only", tree, frozenset(files), path)
        config = _config(tower, folder, name, IMPORTS[model_type])
        tokenizer = import_tokenizer(folder, tower) if isinstance(tower, TextTower) else None
        left_over = ("pooler.",) if find_sentence_model(folder) is not None else ()
        with dense_weights(folder, out) as dense, staged_model(out, config, tokenizer) as stage:
            write_weights(stage, _tensors(files, config, model_type, tower.front_shapes(), dense, left_over))
    return config


def read_tower_config(folder: Path, name: str) -> ModelConfig:
    """Read the configuration, which needs no weights or processors; raises a ModelError for what can't be mapped."""
    path = folder / CONFIG_FILE
    tree = read_json(path, "give the folder of a model that transformers saved")
    names = frozenset(bare_names(stored_names(folder)))
    model_type = str(tree.get("model_type"))
    tower = read_tower(model_type, "only", tree, names, path)
    return _config(tower, folder, name, IMPORTS[model_type], is_complete=False)


def import_timm(folder: Path, out: Path, name: str) -> ModelConfig:
    """Convert a vision tower saved by timm (config.json and weights) into a model folder, without its classifier.

    Raises a ModelError if the checkpoint has something that can't be mapped, or lacks something.
    """
    module = load_timm_model(folder)
    config = _timm_config(module, folder, name)
    weights = {f"vision.{each}": tensor for each, tensor in module.state_dict().items()}
    with staged_model(out, config, None) as stage:
        write_weights(stage, ((each, weights[each]) for each in model_shapes(config)))
    return config


def read_timm_config(folder: Path, name: str) -> ModelConfig:
    """Read the configuration, which needs no weights; raises a ModelError for what can't be mapped."""
    return _timm_config(build_timm_model(folder), folder, name)


def _timm_config(module: Any, folder: Path, name: str) -> ModelConfig:
    tower = read_timm_model(module, folder, lambda: describe_saved(module, folder))
    preprocess = read_timm_preprocess(module, tower.side_px, DEFAULT_CAPTION_TOKENS, folder, patch_px=tower.patch_px)
    return _model(tower, preprocess, folder, name)


def _config(tower: Tower, folder: Path, name: str, found: TowerImport, *, is_complete: bool = True) -> ModelConfig:
    """Make the model's configuration; `is_complete` says whether the folder must have an image processor."""
    if isinstance(tower, TextTower):
        preprocess = PreprocessConfig(max_caption_tokens=max_caption_tokens(folder, tower))
        sentence = find_sentence_model(folder)
        if sentence is None:
            return _model(tower, preprocess, folder, name)
        tower, preprocess = sentence.pool(tower), sentence.prompt(preprocess)
        if sentence.dense is None:
            return _model(tower, preprocess, folder, name)
        dense = sentence.dense
        head = {"text_projection": dense.projection, "projection_bias": dense.has_bias, "embedding_dim": dense.size}
        return _model(tower, preprocess, folder, name, head)
    if isinstance(tower, VisionTower):
        if (sentence := find_sentence_model(folder)) is not None:
            sentence.pool(tower)
        tower = import_budget(folder, tower)
        preprocess = import_processor(
            folder,
            tower.side_px,
            DEFAULT_CAPTION_TOKENS,
            is_required=is_complete,
            takes_any_size=found.positions != "fixed",
            patch_px=tower.patch_px,
            takes_clips=tower.clip_frames is not None,
        )
        try:
            return _model(resize_tower(tower, preprocess.image_size), preprocess, folder, name)
        except ValidationError as error:
            raise ModelError(f"{folder}: the image processor's size: {describe(error)}") from None
    raise TypeError(f"{type(tower).__name__} is a tower neither for images nor for captions")


def _model(
    tower: Tower, preprocess: PreprocessConfig, folder: Path, name: str, head: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Make the configuration of one tower; `head` describes a layer behind it, if there is one."""
    side, other = ("vision", "text") if isinstance(tower, VisionTower) else ("text", "vision")
    sections: dict[str, Any] = {side: tower, other: None, "preprocess": preprocess}
    sections |= head or {f"{side}_projection": "none", "embedding_dim": tower.pooled_dim}
    try:
        return ModelConfig(name=name, trained=True, **sections)
    except ValidationError as error:
        raise ModelError(f"{folder / CONFIG_FILE}: {describe(error)}") from None


def bare_names(files: Mapping[str, Path]) -> dict[str, tuple[str, Path]]:
    """Return each tensor's name in the checkpoint and its file, by its name inside the tower that has embeddings."""
    marks = (".embeddings.", ".embed_tokens.")
    found = sorted(f".{name}".partition(mark)[0] for mark in marks for name in files if mark in f".{name}")
    prefix = f"{found[0]}.".removeprefix(".") if found else ""
    return {name.removeprefix(prefix): (name, path) for name, path in files.items()}


@contextmanager
def dense_weights(folder: Path, out: Path) -> Iterator[Mapping[str, Path]]:
    """Yield the file of each tensor of sentence-transformers' Dense, if one follows the tower."""
    sentence = find_sentence_model(folder)
    if sentence is None or sentence.dense is None:
        yield {}
        return
    with checkpoint_weights(sentence.dense.folder, out) as files:
        yield files


def _tensors(
    files: Mapping[str, tuple[str, Path]],
    config: ModelConfig,
    model_type: str,
    stored_at: Shapes,
    dense: Mapping[str, Path],
    left_over: tuple[str, ...],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the model's tensors in order.

    `files` has the checkpoint's name and file by the name inside the tower; `stored_at` are the shapes of the
    embeddings at the checkpoint's own image size; `dense` are the tensors of a layer behind the tower; `left_over`
    begins names that the modules around a checkpoint don't use.
    """
    names, found = frozenset(files), IMPORTS[model_type]
    theirs = {}
    own = {name: shape for name, shape in model_shapes(config).items() if not (dense and "_head.projection." in name)}
    for name in own:
        section, _, inner = name.partition(".")
        theirs[name] = found.theirs(inner if section in config.towers else f"head.{inner}", names)
    used = {each for their in theirs.values() for each in their}
    (side,) = config.towers
    ignored = (*found.ignored, *left_over)
    check_all_used({name: path for name, (_, path) in files.items()}, used, ignored, {side: model_type})
    by_full_name = dict(files.values())
    full = {name: each for name, (each, _) in files.items()}
    for name, shape in own.items():
        their = tuple(full.get(each, each) for each in theirs[name])
        inner = name.partition(".")[2]
        yield name, import_tensor(by_full_name, their, shape, found, inner, stored_at.get(inner))
    for name in model_shapes(config).keys() - own.keys():
        yield name, joined_tensor(dense, (name.replace("text_head.projection", "linear"),), model_shapes(config)[name])
