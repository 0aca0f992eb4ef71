"""Export of trained weights as model folders, and of ranges of layers as small deltas over an unchanged base."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from shards.config import CONFIG_FILE, TOKENIZER_FILE, ModelConfig, load_model_config
from shards.errors import ModelError
from shards.fingerprint import model_fingerprint
from shards.loading import read_tensor, torch_dtype
from shards.saving import staged_folder, staged_model, write_weights
from shards.summary import DELTA_FILE, DELTA_FORMAT, read_delta
from shards.tensor_shapes import OPTIONAL_SHAPES, model_shapes
from shards.weights import WEIGHTS_FILE, find_weights, read_header


def export_model(
    folder: Path,
    config: ModelConfig,
    weights: Mapping[str, torch.Tensor],
    tokenizer_json: str | None,
    *,
    dtype: str = "float32",
    replace: bool = False,
) -> Path:
    """Write a model folder, whole or not at all.

    Args:
        folder: the folder to write; must not exist yet, or be empty, unless it may be replaced.
        config: configuration of the model.
        weights: every tensor of the model, by name.
        tokenizer_json: content of tokenizer.json; None writes none.
        dtype: name of the stored dtype.
        replace: whether an existing model folder is replaced when the new one is complete.

    Raises:
        ModelError: the folder isn't empty and may not be replaced.
    """
    kind = torch_dtype(dtype)
    is_replaced = replace and (folder / CONFIG_FILE).is_file()
    target = folder.with_name(f".{folder.name}.{os.getpid()}.new") if is_replaced else folder
    with staged_model(target, config, tokenizer_json) as stage:
        names = [*model_shapes(config), *(name for name in OPTIONAL_SHAPES if name in weights)]
        write_weights(stage, ((name, weights[name].to(kind)) for name in names))
    if is_replaced:
        old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
        folder.rename(old)
        target.rename(folder)
        shutil.rmtree(old)
    return folder


def read_logit(folder: Path, name: str, initial: float) -> float:
    """Read the log of the inverse temperature, or SigLIP's bias, that training ended with.

    Args:
        folder: the model folder.
        name: name of the tensor.
        initial: value where it is missing.
    """
    files = find_weights(folder)
    return read_tensor(files, name, ()).float().item() if name in files else initial


def write_delta(
    folder: str | Path, base: str | Path, weights: Mapping[str, torch.Tensor], names: tuple[str, ...], *, title: str
) -> Path:
    """Write some layers of a model that was trained on a base, and the base's fingerprint.

    Args:
        folder: the folder to write; must not exist yet, or be empty.
        base: the model folder that training began with; it isn't changed.
        weights: the trained tensors by name.
        names: names of the tensors to write.
        title: name of the version.

    Raises:
        ModelError: the folder isn't empty.
    """
    about = {"format_version": DELTA_FORMAT, "name": title, "base_fingerprint": model_fingerprint(base)}
    with staged_folder(Path(folder)) as stage:
        write_weights(stage, ((name, weights[name]) for name in names))
        (stage / DELTA_FILE).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return Path(folder)


def apply_delta(base: str | Path, delta: str | Path, folder: str | Path) -> Path:
    """Write the model folder that a base and a delta make together.

    Args:
        base: the model folder that the delta was made over.
        delta: folder of the delta.
        folder: the folder to write; must not exist yet, or be empty.

    Raises:
        ModelError: the delta is of another base or broken, or the folder isn't empty.
    """
    base, delta = Path(base), Path(delta)
    name, expected = read_delta(delta)
    config = load_model_config(base).model_copy(update={"name": name, "trained": True})
    if (found := model_fingerprint(base)) != expected:
        raise ModelError(f"{delta}: made over the base {expected}, and {base} is {found}; name the right base")
    shapes = model_shapes(config) | OPTIONAL_SHAPES
    changed = dict.fromkeys(read_header(delta / WEIGHTS_FILE), delta / WEIGHTS_FILE)
    if unknown := sorted(changed.keys() - shapes.keys()):
        raise ModelError(f"{delta}: holds the tensor {unknown[0]}, which {base} doesn't have; name the right base")
    files = find_weights(base) | changed
    tokenizer = base / TOKENIZER_FILE
    tokenizer_json = tokenizer.read_bytes().decode() if tokenizer.is_file() else None
    with staged_model(Path(folder), config, tokenizer_json) as stage:
        write_weights(stage, ((name, read_tensor(files, name, shapes[name])) for name in files))
    return Path(folder)
