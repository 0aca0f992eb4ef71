"""Import of two-tower models of transformers: their towers by `shards.towers.IMPORTS`, their projections and scale."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import isqrt, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from shards.convert.pickled_weights import checkpoint_weights
from shards.convert.preprocessing import import_budget, import_processor, import_tokenizer, max_caption_tokens
from shards.convert.sentence_transformers import find_sentence_model
from shards.file_schema import describe, read_json
from shards.model_config import CONFIG_FILE, ModelConfig, find_model_folder
from shards.model_errors import ModelError
from shards.saving import staged_model, write_weights
from shards.tensor_shapes import BATCH_COUNTER, LOGIT_SCALE, OPTIONAL_SHAPES, model_shapes
from shards.towers.base import ModelClass, Shape, Tower, TowerImport
from shards.towers.from_transformers import parse_config
from shards.towers.registry import CLASSES, IMPORTS
from shards.towers.tower_kinds import TextTower, VisionTower
from shards.weights import CHECKPOINT_CURE, POSITIONS_CURE, check_shape, stored_names

if TYPE_CHECKING:
    import torch

PREFIXES = {
    "vision": ("vision_model.", "vision_encoder.", "video_model."),
    "text": ("text_model.", "text_encoder."),
}
"""What begins the names of each side's tensors: in most checkpoints, in TIPSv2's published files, in VideoPrism's."""
TEMPERATURE = "temperature"
"""TIPSv2's tensor of what logits are divided by; others have the logarithm of a factor."""

Towers = Mapping[str, tuple[Tower, str]]
"""The tower of each side, and the `model_type` that it was read as."""


def import_transformers(src: str | Path, out: str | Path, *, name: str | None = None) -> ModelConfig:
    """Convert a saved two-tower model, with tokeniser and image processor, into a model folder.

    `out` must be missing or empty; `name` defaults to the name of the folder `src`. Raises a ModelError if the
    checkpoint has something that can't be mapped, or lacks something.
    """
    folder = find_model_folder(src)
    with checkpoint_weights(folder, Path(out)) as files:
        config, types, towers = _import_config(folder, frozenset(files), name or Path(src).name)
        tokenizer = import_tokenizer(folder, config.required_text)
        with staged_model(Path(out), config, tokenizer) as stage:
            write_weights(stage, _import_tensors(files, config, types, towers))
    return config


def read_transformers_config(folder: Path, name: str) -> ModelConfig:
    """Read the configuration, which needs no weights or processors; raises a ModelError for what can't be mapped."""
    return _import_config(folder, frozenset(stored_names(folder)), name, is_complete=False)[0]


def _import_config(
    folder: Path, names: frozenset[str], name: str, *, is_complete: bool = True
) -> tuple[ModelConfig, dict[str, str], dict[str, Tower]]:
    """Read the configuration, each side's `model_type`, and each side's tower at the checkpoint's own image size.

    `names` are the checkpoint's tensor names; `is_complete` says whether the folder must have an image processor.
    """
    path = folder / CONFIG_FILE
    tree: dict[str, Any] = read_json(path, "give the folder of a model that transformers saved")
    model_class = _find_class(tree, path)
    sections = {side: _section(tree, f"{side}_config", path) for side in model_class.types}
    types = {side: _find_type(side, section, model_class, path) for side, section in sections.items()}
    towers = {
        side: read_tower(types[side], side, section, below(names, side), path) for side, section in sections.items()
    }
    vision, text = _select_sides(towers, types, path)
    vision = import_budget(folder, vision)
    try:
        preprocess = import_processor(
            folder,
            vision.side_px,
            max_caption_tokens(folder, text),
            is_required=is_complete,
            takes_any_size=IMPORTS[types["vision"]].positions != "fixed",
            patch_px=vision.patch_px,
            takes_clips=vision.clip_frames is not None,
        )
        config = ModelConfig(
            name=name,
            trained=True,
            embedding_dim=tree.get("projection_dim", 512) if model_class.has_projections else vision.dim,
            projection_bias=not model_class.has_projections,
            vision_projection="linear" if model_class.has_projections else "none",
            text_projection="linear"
            if model_class.has_projections or IMPORTS[types["text"]].has_projection
            else "none",
            vision=resize_tower(vision, preprocess.image_size),
            text=text,
            preprocess=preprocess,
        )
    except ValidationError as error:
        raise ModelError(f"{path}: {describe(error)}") from None
    if (sentence := find_sentence_model(folder)) is not None:
        sentence.check_unpooled(vision, text)
        config = config.model_copy(update={"preprocess": sentence.prompt(config.preprocess)})
    return config, types, towers


def _select_sides(towers: Mapping[str, Tower], types: Mapping[str, str], path: Path) -> tuple[VisionTower, TextTower]:
    vision, text = towers["vision"], towers["text"]
    if not isinstance(vision, VisionTower) or not isinstance(text, TextTower):
        raise ModelError(f"{path}: its towers are {types}; expected one for images and one for captions")
    return vision, text


def _find_class(tree: Mapping[str, Any], path: Path) -> ModelClass:
    """Find the class of two-tower models that a configuration is of, or raise a ModelError."""
    model_class = CLASSES.get(str(tree.get("model_type")))
    if model_class is None:
        raise ModelError(
            f"{path}: model_type = {tree.get('model_type')!r}; this import takes {', '.join(map(repr, CLASSES))}"
        )
    return model_class


def _find_type(side: str, section: Mapping[str, Any], model_class: ModelClass, path: Path) -> str:
    """Find the `model_type` of one side's tower; raises a ModelError if the tower has no features."""
    named = str(section.get("model_type") or model_class.types[side])
    # A section may name a whole two-tower model that it is one side of.
    found = CLASSES.get(named, ModelClass()).types[side] or named
    if found in IMPORTS and not IMPORTS[found].has_pooled_output:
        raise ModelError(
            f"{path}: the {side} tower is {found!r}: it has no pooler, which this class needs, so "
            "transformers computes no features of it either; retrain with another tower"
        )
    return found


def read_tower(model_type: str, side: str, section: Mapping[str, Any], names: frozenset[str], where: Path) -> Tower:
    """Read one tower of a checkpoint; raises a ModelError if no family takes it or part of it can't be built."""
    if model_type not in IMPORTS:
        raise ModelError(
            f"{where}: the {side} tower is {model_type!r}; these can be imported: {', '.join(sorted(IMPORTS))}"
        )
    found = IMPORTS[model_type]
    return found.read(parse_config(found.config_class, section, where), names, where)


def prefix_in(names: Iterable[str], side: str) -> str:
    """Return what begins the names of one side's tensors in a checkpoint with these names."""
    found = (prefix for name in names for prefix in PREFIXES[side] if name.startswith(prefix))
    return next(found, PREFIXES[side][0])


def below(names: Iterable[str], side: str) -> frozenset[str]:
    """Return the tensor names of one side, without its prefix."""
    return frozenset(name.partition(".")[2] for name in names if name.startswith(PREFIXES[side]))


def their_names(
    name: str,
    types: Mapping[str, str],
    names: Mapping[str, frozenset[str]],
    prefixes: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """Find the checkpoint's names for one of our tensors; arguments are by side, `prefixes` are the usual ones."""
    section, _, inner = name.partition(".")
    side = section.removesuffix("_head")
    if side not in types:
        return (name,)
    if section != side:
        if inner.startswith("projection.") and not IMPORTS[types[side]].has_projection:
            return (f"{'visual' if side == 'vision' else side}_{inner}",)
        inner = f"head.{inner}"
    prefix = PREFIXES[side][0] if prefixes is None else prefixes[side]
    return tuple(prefix + their for their in IMPORTS[types[side]].theirs(inner, names[side]))


def _import_tensors(
    files: Mapping[str, Path], config: ModelConfig, types: Mapping[str, str], towers: Mapping[str, Tower]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the model's tensors in order; `towers` are those at the checkpoint's own image size."""
    names = {side: below(files, side) for side in types}
    shapes = model_shapes(config) | {name: shape for name, shape in OPTIONAL_SHAPES.items() if name in files}
    prefixes = {side: prefix_in(files, side) for side in types}
    theirs = {name: their_names(name, types, names, prefixes) for name in shapes}
    ignored = tuple(prefixes[side] + each for side in types for each in IMPORTS[types[side]].ignored)
    used = {their for each in theirs.values() for their in each}
    has_temperature = TEMPERATURE in files and any(kind.startswith("tipsv2") for kind in types.values())
    check_all_used(files, used | ({TEMPERATURE} if has_temperature else set()), ignored, types)
    for name, shape in shapes.items():
        side, _, inner = name.partition(".")
        if side in types:
            stored = towers[side].front_shapes().get(inner, shape)
            yield name, import_tensor(files, theirs[name], shape, IMPORTS[types[side]], inner, stored)
        else:
            yield name, joined_tensor(files, theirs[name], shape)
    if has_temperature:
        yield LOGIT_SCALE, _scale_of(files)


def _scale_of(files: Mapping[str, Path]) -> torch.Tensor:
    """Return the logarithm of the factor of logits; raises a ModelError for a temperature that has none."""
    temperature = joined_tensor(files, (TEMPERATURE,), ())
    if not float(temperature) > 0:
        raise ModelError(
            f"{files[TEMPERATURE]}: {TEMPERATURE} = {float(temperature)}: expected one above 0; fetch the model again"
        )
    return -temperature.log()


def check_all_used(
    files: Mapping[str, Path], used: set[str], ignored: tuple[str, ...], types: Mapping[str, str]
) -> None:
    """Raise a ModelError if a tensor of the checkpoint was left over."""
    for name, path in files.items():
        if name not in used and not name.startswith(ignored) and not name.endswith(BATCH_COUNTER):
            towers = " + ".join(types.values())
            raise ModelError(
                f"{path}: found the tensor {name}, which a {towers} of that configuration hasn't; {CHECKPOINT_CURE}"
            )


def import_tensor(
    files: Mapping[str, Path],
    theirs: tuple[str, ...],
    shape: Shape,
    found: TowerImport,
    name: str,
    stored_at: Shape | None = None,
) -> torch.Tensor:
    """Read one of our tensors as the import of its tower says.

    `name` is this project's, inside the tower; `stored_at` is the shape at the checkpoint's own image size,
    None where it is the same. Raises a ModelError if a tensor is missing, broken, of another shape, or not finite.
    """
    if stored_at is not None and stored_at != shape:
        table = import_tensor(files, theirs, stored_at, found, name)
        return resample_positions(table, shape, found.positions)
    if name in found.flattened:
        return joined_tensor(files, theirs, (prod(shape[:-1]), shape[-1])).reshape(shape)
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


def resize_tower(tower: VisionTower, image_size: int) -> VisionTower:
    """Copy the tower for another image size; raises pydantic's ValidationError if it can't take it."""
    if tower.side_px == image_size:
        return tower
    return tower.model_validate(tower.model_dump() | {"image_size": image_size})


def resample_positions(table_1LD: torch.Tensor, shape: Shape, positions: str) -> torch.Tensor:
    """Resample a square table of positions, class token (if any) first; `positions` as in `TowerImport`.

    Source: transformers 5.23, `interpolate_pos_encoding` of Dinov2Embeddings, Dinov2WithRegistersEmbeddings and
    Tipsv2VisionEmbeddings.
    """
    import torch

    side, new_side = isqrt(table_1LD.shape[1]), isqrt(shape[1])
    num_prefix = table_1LD.shape[1] - side**2
    patches_1DHW = table_1LD[:, num_prefix:].mT.reshape(1, -1, side, side)
    resampled_1DHW = torch.nn.functional.interpolate(
        patches_1DHW.float(),
        size=(new_side, new_side),
        mode="bilinear" if positions == "linear" else "bicubic",
        align_corners=False,
        antialias=positions in ("antialiased", "linear"),
    )
    return torch.cat((table_1LD[:, :num_prefix], resampled_1DHW.to(table_1LD.dtype).flatten(2).mT), 1)


def joined_tensor(
    files: Mapping[str, Path], theirs: tuple[str, ...], shape: Shape, rows: tuple[int, int, int] | None = None
) -> torch.Tensor:
    """Read one of our tensors from one tensor of a checkpoint, from several in sequence, or from some rows of one.

    Leading dimensions of 1 in `shape` don't count; `rows` is as in `TowerImport.rows`. Raises a ModelError if a tensor
    is missing, broken, of another shape, or not finite.
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
    """Drop leading dimensions of 1."""
    while shape[:1] == (1,):
        shape = shape[1:]
    return shape


def _section(tree: Mapping[str, Any], key: str, where: Path) -> Mapping[str, Any]:
    section = tree.get(key)
    if not isinstance(section, dict):
        raise ModelError(f"{where}: found no {key}; save the model with transformers' save_pretrained")
    older = tree.get(f"{key}_dict")
    for name, value in older.items() if isinstance(older, dict) else ():
        if section.get(name, value) != value:
            raise ModelError(
                f"{where}: {key}_dict.{name} = {value!r} and {key}.{name} = {section[name]!r}; transformers takes the "
                "first, older files mean the second: delete the wrong one"
            )
    return section
