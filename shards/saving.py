"""Write model folders: whole or not at all, and never over something that is there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shards.errors import ModelError
from shards.weights import WEIGHTS_FILE, WEIGHTS_INDEX_FILE

if TYPE_CHECKING:
    import torch

# A writer holds one file's tensors in memory; stages that read one tower each open fewer of them, too.
MAX_FILE_BYTES = 4 << 30


@contextmanager
def staged_folder(folder: Path) -> Iterator[Path]:
    """Give a temporary sibling to write into; it takes the folder's name when all went well.

    Raises:
        ModelError: the folder exists and isn't empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder}: there is something already; name a folder that doesn't exist yet")
    folder.parent.mkdir(parents=True, exist_ok=True)
    stage = folder.parent / f".{folder.name}.{os.getpid()}.tmp"
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir()
    try:
        yield stage
        stage.rename(folder)  # over an empty folder this is allowed
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def write_weights(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], *, max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write tensors as model.safetensors, or as several files and their index where they are larger than one may be.

    Args:
        folder: a folder that nobody reads yet.
        tensors: names and values, taken one by one.
        max_file_bytes: a file is closed before it would grow beyond this.
    """
    parts: list[list[str]] = []
    waiting: dict[str, torch.Tensor] = {}
    sizes: dict[str, int] = {}
    for name, tensor in tensors:
        if waiting and sum(held.nbytes for held in waiting.values()) + tensor.nbytes > max_file_bytes:
            parts.append(_write_part(folder, len(parts), waiting))
            waiting = {}
        waiting[name] = tensor.contiguous()
        sizes[name] = tensor.nbytes
    parts.append(_write_part(folder, len(parts), waiting))
    _name_parts(folder, parts, sum(sizes.values()))


def _write_part(folder: Path, number: int, tensors: dict[str, torch.Tensor]) -> list[str]:
    from safetensors.torch import save_file

    path = _part_path(folder, number)
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)  # safetensors makes a file for its owner alone; others go by the umask, and so shall this one
    return list(tensors)


def _part_path(folder: Path, number: int) -> Path:
    return folder / f"part-{number}.tmp"


def _name_parts(folder: Path, parts: list[list[str]], size_bytes: int) -> None:
    """Give the files their final names, now that their number is known."""
    if len(parts) == 1:
        _part_path(folder, 0).rename(folder / WEIGHTS_FILE)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(parts):
        file_name = f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors"
        _part_path(folder, number).rename(folder / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    index = {"metadata": {"total_size": size_bytes}, "weight_map": weight_map}
    (folder / WEIGHTS_INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
