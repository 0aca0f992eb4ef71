"""Pruning of layers: a smaller model folder from some layers of a larger model, as a start for training.

A kept layer keeps its weights bit for bit. Everything else (embeddings, norms, poolers, projections, tokeniser,
temperature) is copied. Layers that share weights keep them, and apply them less often.
"""

from collections.abc import Mapping
from pathlib import Path

from embedder.plugins.train.trainer.train_settings import LayerChoice, chosen_layers
from shards.loading import read_tensor
from shards.model_config import TOKENIZER_FILE, load_model_config
from shards.model_errors import ModelError
from shards.saving import staged_model, write_weights
from shards.tensor_shapes import OPTIONAL_SHAPES, model_shapes
from shards.towers.base import Tower
from shards.weights import find_weights


def prune_model(source: Path, folder: Path, layers: Mapping[str, LayerChoice]) -> Path:
    """Write a model folder with the chosen layers, by side, of another one; `folder` must be empty or not exist yet.

    Raises `ModelError` if the chosen layers don't exist, don't fit after one another, or belong to both towers.
    """
    config = load_model_config(source)
    if config.is_one_tower:
        raise ModelError(
            f"model {source}: pictures and texts share its layers, and none can be left out; train it whole"
        )
    towers: dict[str, Tower] = {}
    origins: dict[str, str] = {}
    for side, tower in config.towers.items():
        towers[side], of_side = _prune(tower, layers[side], f"model {source}, {side} tower")
        origins |= {f"{side}.{new}": f"{side}.{old}" for new, old in of_side.items()}
    pruned = config.model_copy(update=towers)
    files = find_weights(source)
    shapes = model_shapes(pruned) | {name: shape for name, shape in OPTIONAL_SHAPES.items() if name in files}
    tokenizer = source / TOKENIZER_FILE
    tokenizer_json = tokenizer.read_text(encoding="utf-8") if tokenizer.is_file() else None
    with staged_model(folder, pruned, tokenizer_json) as stage:
        tensors = ((name, read_tensor(files, origins.get(name, name), shape)) for name, shape in shapes.items())
        write_weights(stage, tensors)
    return folder


def _prune(tower: Tower, choice: LayerChoice, where: str) -> tuple[Tower, dict[str, str]]:
    """Return a tower of the chosen layers and, for each tensor of its layers, its name in the larger tower."""
    try:
        chosen = chosen_layers(choice, tower.num_layers)
    except ValueError as error:
        raise ModelError(f"{where}: {error}") from None
    smaller = tower.keep_layers(chosen)
    origins: dict[str, str] = {}
    for place, layer in reversed(list(enumerate(chosen))):  # if several share weights, the first one counts
        new, old = smaller.weights_of(place), tower.weights_of(layer)
        shapes = smaller.shapes_of(new)
        if shapes != tower.shapes_of(old):
            raise ModelError(
                f"{where}: layer {layer} has other tensors than layer {place} of the smaller tower; keep layer "
                f"{place} in its place, as a choice that begins at 0 does"
            )
        prefixes = smaller.prefix_of(new), tower.prefix_of(old)
        origins |= {prefixes[0] + name: prefixes[1] + name for name in shapes}
    return smaller, origins
