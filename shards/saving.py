"""Write model folders: atomically, and never over existing files."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from shards.model_config import CONFIG_FILE, TOKENIZER_FILE, ModelConfig
from shards.model_errors import ModelError
from shards.towers.base import Shapes
from shards.weights import WEIGHTS_FILE, WEIGHTS_INDEX_FILE

if TYPE_CHECKING:
    import torch

# safetensors' names of the stored dtypes.
_STORED_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk that takes no more."""

# A writer holds one file's tensors in memory; and stages that read one tower each open fewer files.
MAX_FILE_BYTES = 4 << 30


@contextmanager
def staged_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, renamed to `folder` on success.

    Raises a ModelError if `folder` isn't empty or can't be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder}: there is something already; name a folder that doesn't exist yet")
    stage = folder.parent / f".{folder.name}.{os.getpid()}.tmp"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(stage, ignore_errors=True)
        stage.mkdir()
    except OSError as error:
        raise ModelError(f"{folder}: can't be written ({error.strerror}); name another folder") from None
    try:
        yield stage
        stage.rename(folder)  # allowed over an empty folder
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise ModelError(
            f"{folder}: can't be written ({os.strerror(error.errno)}); free some space, or name another folder"
        ) from None
    finally:
        shutil.rmtree(stage, ignore_errors=True)


@contextmanager
def staged_model(folder: Path, config: ModelConfig, tokenizer_json: str | None) -> Iterator[Path]:
    """Yield a temporary folder to write a model's weights into; its other files are added when the block succeeds.

    With `tokenizer_json` None, no tokenizer.json is written. Raises a ModelError if the folder exists and isn't empty.
    """
    with staged_folder(folder) as stage:
        yield stage
        if tokenizer_json is not None:
            (stage / TOKENIZER_FILE).write_text(tokenizer_json, encoding="utf-8")
        (stage / CONFIG_FILE).write_text(config.to_json(), encoding="utf-8")


def stream_weights(
    folder: Path,
    shapes: Shapes,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    dtype: str,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write tensors as `write_weights` does, but hold only one at a time: their shapes are known in advance.

    Tensors come in the order of `shapes`, else a ModelError is raised, and are cast to the stored dtype. A file exceeds
    `max_file_bytes` only if a single tensor does. The folder must be unpublished.
    """
    from shards.loading import torch_dtype

    kind = torch_dtype(dtype)
    waiting = iter(tensors)
    parts = _plan_parts(shapes, kind.itemsize, max_file_bytes)
    for number, names in enumerate(parts):
        with _part_path(folder, number).open("wb") as file:
            file.write(_header({name: shapes[name] for name in names}, _STORED_NAMES[dtype], kind.itemsize))
            for expected in names:
                name, tensor = next(waiting, ("no tensor", None))
                if tensor is None or (name, tuple(tensor.shape)) != (expected, shapes[expected]):
                    raise ModelError(f"{folder}: got {name} where {expected} of {list(shapes[expected])} comes next")
                file.write(_raw(tensor.to(kind)))
    _name_parts(folder, parts, kind.itemsize * sum(prod(shape) for shape in shapes.values()))


def _plan_parts(shapes: Shapes, value_bytes: int, max_file_bytes: int) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    size_bytes = 0
    for name, shape in shapes.items():
        size_bytes += prod(shape) * value_bytes
        if parts[-1] and size_bytes > max_file_bytes:
            parts.append([])
            size_bytes = prod(shape) * value_bytes
        parts[-1].append(name)
    return parts


def _header(shapes: Shapes, stored_name: str, value_bytes: int) -> bytes:
    """Make the header of a safetensors file, padded with spaces to a multiple of 8 bytes."""
    items: dict[str, object] = {"__metadata__": {"format": "pt"}}
    stop = 0
    for name, shape in shapes.items():
        start, stop = stop, stop + prod(shape) * value_bytes
        items[name] = {"dtype": stored_name, "shape": list(shape), "data_offsets": [start, stop]}
    text = json.dumps(items, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _raw(tensor: torch.Tensor) -> memoryview:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_weights(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], *, max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write tensors as model.safetensors, or as several files with an index if they exceed one file's limit."""
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
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = _part_path(folder, number)
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        if (found := re.search(r"os error (\d+)", str(error))) is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from None
    path.chmod(mode)  # safetensors makes a file only its owner can read; apply the umask instead
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
