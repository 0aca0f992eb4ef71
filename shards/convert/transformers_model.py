"""Import of two-tower models of transformers: their towers by `shards.towers.IMPORTS`, their projections and scale."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from shards.config import CONFIG_FILE, ModelConfig, find_model_folder
from shards.convert.pickled_weights import checkpoint_weights
from shards.convert.preprocessing import import_processor, import_tokenizer, max_caption_tokens
from shards.errors import ModelError
from shards.saving import staged_model, write_weights
from shards.schema import describe, read_json
from shards.tensor_shapes import OPTIONAL_SHAPES, model_shapes
from shards.towers import IMPORTS
from shards.towers.base import Shape, Tower, TowerImport
from shards.towers.kinds import TextTower, VisionTower
from shards.weights import CHECKPOINT_CURE, POSITIONS_CURE, check_shape

if TYPE_CHECKING:
    import torch

Towers = Mapping[str, tuple[Tower, str]]
"""By side, the tower and the `model_type` that it was read as."""


@dataclass(frozen=True)
class ModelClass:
    """A class of transformers with two towers.

    Attributes:
        vision_type: `model_type` of a vision section that names none.
        text_type: the same of a text section.
        has_projections: whether it has them; without them, the text tower's own is the only one.
        refused: towers that the class can't compute, by `model_type`, with the reason.
    """

    vision_type: str | None = None
    text_type: str | None = None
    has_projections: bool = True
    refused: Mapping[str, str] = field(default_factory=dict)


CLASSES = {
    "clip": ModelClass("clip_vision_model", "clip_text_model"),
    "chinese_clip": ModelClass("chinese_clip_vision_model", "chinese_clip_text_model"),
    "siglip": ModelClass("siglip_vision_model", "siglip_text_model", has_projections=False),
    "siglip2": ModelClass("siglip2_vision_model", "siglip2_text_model", has_projections=False),
    "vision-text-dual-encoder": ModelClass(refused={"distilbert": "it has no pooler, which this class needs"}),
}

# Sections that hold a whole two-tower model, of which one tower is taken.
_INNER_TYPES = {
    (kind, side): f"{kind}_{side}_model" for kind in ("clip", "siglip", "siglip2") for side in ("vision", "text")
}


def import_transformers(src: str | Path, out: str | Path, *, name: str | None = None) -> ModelConfig:
    """Turn a saved model of two towers into a model folder.

    Args:
        src: its folder, with tokeniser and image processor.
        out: the model folder to write; must not exist yet, or be empty.
        name: of the model; by default that of the folder `src`.

    Raises:
        ModelError: the checkpoint has something that can't be mapped, or lacks something.
    """
    folder = find_model_folder(src)
    with checkpoint_weights(folder, Path(out)) as files:
        config, types = _import_config(folder, files, name or Path(src).name)
        tokenizer = import_tokenizer(folder, config.required_text)
        with staged_model(Path(out), config, tokenizer) as stage:
            write_weights(stage, _import_tensors(files, config, types))
    return config


def _import_config(folder: Path, files: Mapping[str, Path], name: str) -> tuple[ModelConfig, dict[str, str]]:
    """Configuration of the model, and the `model_type` of each side."""
    path = folder / CONFIG_FILE
    tree: dict[str, Any] = read_json(path, "give the folder of a model that transformers saved")
    model_class = CLASSES.get(str(tree.get("model_type")))
    if model_class is None:
        raise ModelError(
            f"{path}: model_type = {tree.get('model_type')!r}; this import takes {', '.join(map(repr, CLASSES))}"
        )
    defaults = {"vision": model_class.vision_type, "text": model_class.text_type}
    sections = {side: _section(tree, f"{side}_config", path) for side in defaults}
    types = {}
    for side, section in sections.items():
        found = str(section.get("model_type") or defaults[side])
        types[side] = _INNER_TYPES.get((found, side), found)
        if types[side] in model_class.refused:
            raise ModelError(
                f"{path}: the {side} tower is {types[side]!r}: {model_class.refused[types[side]]}, so transformers "
                "computes no features of it either; retrain with another tower"
            )
    towers = {
        side: read_tower(types[side], side, section, below(files, side), path) for side, section in sections.items()
    }
    vision, text = towers["vision"], towers["text"]
    if not isinstance(vision, VisionTower) or not isinstance(text, TextTower):
        raise ModelError(f"{path}: its towers are {types}; expected one for images and one for captions")
    try:
        config = ModelConfig(
            name=name,
            trained=True,
            embedding_dim=tree.get("projection_dim", 512) if model_class.has_projections else vision.dim,
            projection_bias=not model_class.has_projections,
            vision_projection="linear" if model_class.has_projections else "none",
            vision=vision,
            text=text,
            preprocess=import_processor(folder, vision.side_px, max_caption_tokens(folder, text)),
        )
    except ValidationError as error:
        raise ModelError(f"{path}: {describe(error)}") from None
    return config, types


def read_tower(model_type: str, side: str, section: Mapping[str, Any], names: frozenset[str], where: Path) -> Tower:
    """Read one tower of a checkpoint.

    Args:
        model_type: its kind, as transformers names it.
        side: vision or text.
        section: its part of config.json.
        names: names of its tensors.
        where: path of config.json, for messages.

    Raises:
        ModelError: no family takes it, or it has something that can't be built.
    """
    if model_type not in IMPORTS:
        raise ModelError(
            f"{where}: the {side} tower is {model_type!r}; these can be imported: {', '.join(sorted(IMPORTS))}"
        )
    return IMPORTS[model_type].read(section, names, where)


def below(files: Mapping[str, Path], side: str) -> frozenset[str]:
    """Give the names of the tensors of one side, without its prefix."""
    prefix = f"{side}_model."
    return frozenset(name.removeprefix(prefix) for name in files if name.startswith(prefix))


def their_names(name: str, types: Mapping[str, str], names: Mapping[str, frozenset[str]]) -> tuple[str, ...]:
    """Find the checkpoint's names of one of our tensors.

    Args:
        name: our name.
        types: the `model_type` of each side.
        names: names of the tensors of each side.
    """
    section, _, inner = name.partition(".")
    side = section.removesuffix("_head")
    if side not in types:
        return (name,)
    if section != side:
        if inner.startswith("projection.") and not IMPORTS[types[side]].has_projection:
            return (f"{'visual' if side == 'vision' else side}_{inner}",)
        inner = f"head.{inner}"
    return tuple(f"{side}_model.{their}" for their in IMPORTS[types[side]].theirs(inner, names[side]))


def _import_tensors(
    files: Mapping[str, Path], config: ModelConfig, types: Mapping[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    names = {side: below(files, side) for side in types}
    shapes = model_shapes(config) | {name: shape for name, shape in OPTIONAL_SHAPES.items() if name in files}
    theirs = {name: their_names(name, types, names) for name in shapes}
    ignored = tuple(f"{side}_model.{prefix}" for side in types for prefix in IMPORTS[types[side]].ignored)
    check_all_used(files, {their for each in theirs.values() for their in each}, ignored, types)
    for name, shape in shapes.items():
        side, _, inner = name.partition(".")
        if side in types:
            yield name, import_tensor(files, theirs[name], shape, IMPORTS[types[side]], inner)
        else:
            yield name, joined_tensor(files, theirs[name], shape)


def check_all_used(
    files: Mapping[str, Path], used: set[str], ignored: tuple[str, ...], types: Mapping[str, str]
) -> None:
    """Check that no tensor of a checkpoint is left over.

    Args:
        files: file of each tensor.
        used: names of those that are taken.
        ignored: prefixes of those that an encoder doesn't need.
        types: kinds of the towers, for the message.

    Raises:
        ModelError: one is.
    """
    for name, path in files.items():
        if name not in used and not name.startswith(ignored):
            towers = " + ".join(types.values())
            raise ModelError(
                f"{path}: found the tensor {name}, which a {towers} of that configuration hasn't; {CHECKPOINT_CURE}"
            )


def import_tensor(
    files: Mapping[str, Path], theirs: tuple[str, ...], shape: Shape, found: TowerImport, name: str
) -> torch.Tensor:
    """Read one of our tensors as the import of its tower says.

    Args:
        files: file of each tensor.
        theirs: the checkpoint's names.
        shape: our shape.
        found: the import.
        name: our name inside the tower.

    Raises:
        ModelError: one is missing, broken, of another shape, or has values that are not finite.
    """
    if name not in found.combined:
        return joined_tensor(files, theirs, shape, found.rows_of(name))
    from shards.loading import check_values, read_tensor, stored_shape

    tensors = []
    for their in theirs:
        stored = stored_shape(files, their) or shape
        if len(stored) != len(shape):
            check_shape(files[their], their, stored, shape, CHECKPOINT_CURE)
        tensors.append(read_tensor(files, their, stored))
        check_values(files[their], their, tensors[-1])
    combined = found.combined[name](tensors)
    check_shape(files[theirs[-1]], " with ".join(theirs), combined.shape, shape, POSITIONS_CURE)
    return combined


def joined_tensor(
    files: Mapping[str, Path], theirs: tuple[str, ...], shape: Shape, rows: tuple[int, int, int] | None = None
) -> torch.Tensor:
    """Read one of our tensors: one of a checkpoint, in our shape, or several one after the other, or rows of one.

    Args:
        files: file of each tensor.
        theirs: the checkpoint's names.
        shape: our shape; dimensions of 1 in front don't count.
        rows: which rows ours is, as in `TowerImport.rows`; None for all.

    Raises:
        ModelError: one is missing, broken, of another shape, or has values that are not finite.
    """
    import torch

    from shards.loading import check_values, read_tensor, stored_shape

    first, stop, parts = rows or (0, 1, 1)
    part = (shape[0] * parts // (stop - first) // len(theirs), *shape[1:]) if shape else shape
    tensors = []
    for their in theirs:
        stored = stored_shape(files, their)
        if stored is not None and _without_ones(stored) != _without_ones(part):
            cure = POSITIONS_CURE if "position" in their else CHECKPOINT_CURE
            check_shape(files[their], their, stored, _without_ones(part) or part, cure)
        tensor = read_tensor(files, their, part if stored is None else stored)
        check_values(files[their], their, tensor)
        tensors.append(tensor.reshape(part))
    joined = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    if rows is None:
        return joined
    size = shape[0] // (stop - first)
    return joined[first * size : stop * size]


def _without_ones(shape: Shape) -> Shape:
    """A shape without the dimensions of 1 in front."""
    while shape[:1] == (1,):
        shape = shape[1:]
    return shape


def _section(tree: Mapping[str, Any], key: str, where: Path) -> Mapping[str, Any]:
    section = tree.get(key)
    if not isinstance(section, dict):
        raise ModelError(f"{where}: found no {key}; save the model with transformers' save_pretrained")
    return section
