"""Export of trained weights as model folders, and of ranges of layers as small deltas over an unchanged base."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from embedder.storage.atomic_write import EXCHANGE, RENAME_UNSUPPORTED, rename_with
from shards.fingerprint import model_fingerprint
from shards.loading import read_tensor, torch_dtype
from shards.model_config import CONFIG_FILE, ModelConfig
from shards.model_summary import DELTA_FILE, DELTA_FORMAT
from shards.saving import staged_folder, staged_model, write_weights
from shards.tensor_shapes import OPTIONAL_SHAPES, model_shapes
from shards.weights import find_weights


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

    `folder` must be empty or not exist yet. With `replace`, an existing model folder changes places with the new one
    once that is complete, in one step where the file system can: a kill leaves one of them. `tokenizer_json` is the
    content of the file; None writes none. Weights are stored as `dtype`. Raises `ModelError` if the folder isn't empty
    and may not be replaced.
    """
    kind = torch_dtype(dtype)
    is_replaced = replace and (folder / CONFIG_FILE).is_file()
    target = folder.with_name(f".{folder.name}.{os.getpid()}.new") if is_replaced else folder
    for left in (target, _old_folder(target)) if is_replaced else ():
        shutil.rmtree(left, ignore_errors=True)  # of a killed process of this id, which containers give again
    with staged_model(target, config, tokenizer_json) as stage:
        names = [*model_shapes(config), *(name for name in OPTIONAL_SHAPES if name in weights)]
        write_weights(stage, ((name, weights[name].to(kind)) for name in names))
    if is_replaced:
        _exchange(target, folder)
        shutil.rmtree(target)
    return folder


def _exchange(one: Path, other: Path) -> None:
    """Let two folders change places, in one step where the file system can."""
    try:
        rename_with(EXCHANGE, one, other)
    except OSError as error:
        if error.errno not in RENAME_UNSUPPORTED:
            raise
        other.rename(_old_folder(one))
        one.rename(other)
        _old_folder(one).rename(one)


def _old_folder(new: Path) -> Path:
    return new.with_suffix(".old")


def read_logit(folder: Path, name: str, initial: float) -> float:
    """Read the final log of the inverse temperature, or SigLIP's bias, of a training; `initial` if it is missing."""
    files = find_weights(folder)
    return read_tensor(files, name, ()).float().item() if name in files else initial


def write_delta(
    folder: str | Path, base: str | Path, weights: Mapping[str, torch.Tensor], names: tuple[str, ...], *, title: str
) -> Path:
    """Write the tensors `names`, trained on `base`, and its fingerprint; ModelError if the folder isn't empty."""
    about = {"format_version": DELTA_FORMAT, "name": title, "base_fingerprint": model_fingerprint(base)}
    with staged_folder(Path(folder)) as stage:
        write_weights(stage, ((name, weights[name]) for name in names))
        (stage / DELTA_FILE).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return Path(folder)
