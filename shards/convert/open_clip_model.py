"""Import of open_clip's checkpoints: `open_clip_config.json` with safetensors, like open_clip's folders on the hub.

open_clip itself is needed only if a folder has no tokeniser: then its own vocabulary is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from shards.convert.open_clip_config import (
    OpenClipConfig,
    PreprocessSection,
    read_open_clip_config,
    read_open_clip_preprocess,
)
from shards.convert.open_clip_tokenizer import import_open_clip_tokenizer
from shards.convert.open_clip_towers import Side, Source, read_text, read_vision
from shards.convert.pickled_weights import PICKLE_FILE, checkpoint_weights
from shards.convert.transformers_model import check_all_used, joined_tensor
from shards.file_schema import describe
from shards.model_config import ModelConfig, find_model_folder
from shards.model_errors import ModelError
from shards.saving import staged_model, write_weights
from shards.tensor_shapes import OPTIONAL_SHAPES, model_shapes
from shards.towers.base import Shape, Tower
from shards.weights import INDEX_SUFFIX, WEIGHTS_FILE, stored_names

if TYPE_CHECKING:
    import torch

# Prefix of open_clip's weight files; a folder may also hold the same model for transformers.
PREFIX = "open_clip_"

# Biases of projections, which the whole model has or has not.
_BIASES = ("projection.bias", "projection.2.bias")
_IGNORED = ("attn_mask", "text.attn_mask", "text.transformer.embeddings.position_ids")


def import_open_clip(src: str | Path, out: str | Path, *, name: str | None = None) -> ModelConfig:
    """Convert a model saved by open_clip into a model folder.

    `src` has open_clip_config.json, safetensors and the tokeniser's files. `out` must be missing or empty; `name`
    defaults to the name of the folder `src`. Raises a ModelError if the checkpoint has something that can't be mapped,
    or lacks something.
    """
    folder = find_model_folder(src)
    theirs, images = read_open_clip_config(folder)
    with checkpoint_weights(folder, Path(out), _prefix(folder)) as files:
        vision, text = read_vision(theirs, folder), read_text(theirs, frozenset(files), folder)
        tokenizer, tower = import_open_clip_tokenizer(folder, theirs.text_cfg, text.tower)
        sides: dict[str, Side[Tower]] = {"vision": vision, "text": replace(text, tower=tower)}
        config = describe_model(theirs, images, sides, name or Path(src).name, folder)
        with staged_model(Path(out), config, tokenizer) as stage:
            write_weights(stage, _import_tensors(files, config, sides))
    return config


def read_model_config(folder: Path, name: str) -> ModelConfig:
    """Read the configuration, which needs no weights or tokeniser; raises a ModelError for what can't be mapped."""
    theirs, images = read_open_clip_config(folder)
    names = frozenset(stored_names(folder, f"{_prefix(folder)}{WEIGHTS_FILE}"))
    sides: dict[str, Side[Tower]] = {"vision": read_vision(theirs, folder), "text": read_text(theirs, names, folder)}
    return describe_model(theirs, images, sides, name, folder)


def describe_model(
    theirs: OpenClipConfig, images: PreprocessSection, sides: Mapping[str, Side[Tower]], name: str, folder: Path
) -> ModelConfig:
    """Make our configuration of a model; raises a ModelError if the parts don't fit each other."""
    towers: dict[str, Any] = {side: each.tower for side, each in sides.items()}
    projections: dict[str, Any] = {f"{side}_projection": each.projection for side, each in sides.items()}
    max_tokens = min(theirs.text_cfg.context_length, towers["text"].max_tokens)
    try:
        return ModelConfig(
            name=name,
            trained=True,
            embedding_dim=theirs.embed_dim,
            projection_bias=any(name.endswith(_BIASES) for each in sides.values() for name in each.projection_tensors),
            preprocess=read_open_clip_preprocess(images, towers["vision"].side_px, max_tokens),
            **projections,
            **towers,
        )
    except ValidationError as error:
        raise ModelError(f"{folder}: {describe(error)}") from None


def _prefix(folder: Path) -> str:
    """Return the prefix of the weight files' names: open_clip's, unless there are only files without one."""
    names = [f"{name}{suffix}" for name in (WEIGHTS_FILE, PICKLE_FILE) for suffix in ("", INDEX_SUFFIX)]
    found = [prefix for prefix in (PREFIX, "") if any((folder / f"{prefix}{name}").is_file() for name in names)]
    return found[0] if found else PREFIX


def open_clip_sources(config: ModelConfig, sides: Mapping[str, Side[Tower]]) -> dict[str, Source | None]:
    """Return the source of each of our tensors; None for biases that a checkpoint leaves out."""
    sources: dict[str, Source | None] = {}
    for name in model_shapes(config):
        section, _, inner = name.partition(".")
        side = sides[section.removesuffix("_head")]
        sources[name] = side.find(inner) if section in sides else side.projection_tensors.get(inner)
    return sources


def _import_tensors(
    files: Mapping[str, Path], config: ModelConfig, sides: Mapping[str, Side[Tower]]
) -> Iterator[tuple[str, torch.Tensor]]:
    sources = open_clip_sources(config, sides)
    scales = {name: shape for name, shape in OPTIONAL_SHAPES.items() if name in files}
    used = {source.name for source in sources.values() if source is not None} | scales.keys()
    check_all_used(files, used, _IGNORED, {side: each.tower.label for side, each in sides.items()})
    for name, shape in (model_shapes(config) | scales).items():
        yield name, _read(files, sources.get(name, Source(name)), shape)


def _read(files: Mapping[str, Path], source: Source | None, shape: Shape) -> torch.Tensor:
    """Read one of our tensors from its source; a bias that open_clip leaves out becomes zeros."""
    import torch

    if source is None:
        return torch.zeros(shape)
    if source.is_transposed:
        return joined_tensor(files, (source.name,), shape[::-1]).T
    return joined_tensor(files, (source.name,), shape, source.rows)
