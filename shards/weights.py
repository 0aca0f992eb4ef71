"""Locations of tensors in weight files: file, dtype, shape and byte range; from headers alone, without torch.

Source: the safetensors format (8 bytes little-endian header length, a JSON header, then the tensors), and the
`model.safetensors.index.json` that transformers writes beside several files.
"""

import json
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import NonNegativeInt, TypeAdapter, ValidationError

from shards.config import CONFIG_FILE, ModelConfig
from shards.errors import ModelError
from shards.schema import ModelSection, describe, read_json
from shards.tensor_shapes import OPTIONAL_SHAPES, model_shapes
from shards.towers.base import Shape

WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX_FILE = "model.safetensors.index.json"

# The safetensors library refuses longer headers, too.
MAX_HEADER_BYTES = 100_000_000

CURE = f"weights and {CONFIG_FILE} belong together, import the model again"


@dataclass(frozen=True)
class TensorEntry:
    """Location of one tensor; `start, stop` are bytes from the beginning of the file."""

    path: Path
    dtype: str
    shape: Shape
    start: int
    stop: int


class _HeaderItem(ModelSection):
    """One tensor as a safetensors header describes it; offsets count from the end of the header."""

    dtype: str
    shape: tuple[NonNegativeInt, ...]
    data_offsets: tuple[NonNegativeInt, NonNegativeInt]


_HEADER = TypeAdapter(dict[str, _HeaderItem])


def find_weights(folder: Path) -> dict[str, Path]:
    """Find the file of each tensor of a folder; with an index, the files themselves are not opened.

    Raises:
        ModelError: there are no weights, or the index is broken.
    """
    if (folder / WEIGHTS_FILE).is_file():
        return dict.fromkeys(read_header(folder / WEIGHTS_FILE), folder / WEIGHTS_FILE)
    index = folder / WEIGHTS_INDEX_FILE
    if not index.is_file():
        raise ModelError(
            f"{folder}: found neither {WEIGHTS_FILE} nor {WEIGHTS_INDEX_FILE}; weights are read from safetensors "
            "only, so convert other formats first"
        )
    weight_map = read_json(index, "fetch it again").get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{index}: found no weight_map of names to files; fetch it again")
    for file_name in sorted(set(weight_map.values())):
        # A name that leaves the folder would read any file of this machine.
        if not re.fullmatch(r"[\w.-]+\.safetensors", file_name):
            raise ModelError(f"{index}: names the file {file_name!r}; expected the plain name of a .safetensors file")
    return {name: folder / file_name for name, file_name in weight_map.items()}


def read_entries(folder: Path) -> dict[str, TensorEntry]:
    """Read the headers of all weight files of a folder.

    Raises:
        ModelError: there are no weights, a header is broken, or a file lacks a tensor that the index puts there.
    """
    files = find_weights(folder)
    headers = {path: read_header(path) for path in sorted(set(files.values()))}
    for name, path in files.items():
        if name not in headers[path]:
            raise ModelError(f"{path}: lacks the tensor {name} that {WEIGHTS_INDEX_FILE} puts there; fetch both again")
    return {name: headers[path][name] for name, path in files.items()}


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Read the header of one safetensors file.

    Raises:
        ModelError: the file is missing, no safetensors file, or shorter than its header says.
    """
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8))[0] if size_bytes >= 8 else size_bytes
            if length > min(MAX_HEADER_BYTES, size_bytes - 8):
                raise ModelError(f"{path}: {size_bytes} bytes hold no whole safetensors header; fetch it again")
            text = file.read(length)
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}; fetch it again") from None
    items = _parse_header(path, text)
    begin = 8 + length
    stop = begin + max((item.data_offsets[1] for item in items.values()), default=0)
    if stop > size_bytes:
        raise ModelError(f"{path}: found {size_bytes} bytes, its header names {stop}; it was cut off, fetch it again")
    return {
        name: TensorEntry(path, item.dtype, item.shape, begin + item.data_offsets[0], begin + item.data_offsets[1])
        for name, item in items.items()
    }


def check_names(files: Mapping[str, Path], folder: Path, owned: Iterable[str], config: ModelConfig) -> None:
    """Check that weight files hold all of `owned`, and nothing that the model doesn't have.

    Args:
        files: the file of each tensor.
        folder: the model folder, for the message.
        owned: names of the tensors that are needed.
        config: the model.

    Raises:
        ModelError: a tensor is missing or unknown.
    """
    known = model_shapes(config)
    for name, path in files.items():
        if name not in known and name not in OPTIONAL_SHAPES:
            raise ModelError(f"{path}: found the tensor {name}, which this model's {CONFIG_FILE} doesn't have; {CURE}")
    for name in owned:
        if name not in files:
            raise ModelError(f"{folder}: lacks the tensor {name} of shape {list(known[name])}; {CURE}")


def check_shape(path: Path, name: str, found: Sequence[int], expected: Shape) -> None:
    """Check one tensor's shape.

    Args:
        path: its file, for the message.
        name: its name.
        found: the shape in the file.
        expected: the shape by the configuration.

    Raises:
        ModelError: it isn't the expected one.
    """
    if tuple(found) != expected:
        raise ModelError(f"{path}: the tensor {name} has shape {list(found)}, expected {list(expected)}; {CURE}")


def _parse_header(path: Path, text: bytes) -> dict[str, _HeaderItem]:
    try:
        tree = json.loads(text)
        if isinstance(tree, dict):
            tree.pop("__metadata__", None)
        return _HEADER.validate_python(tree)
    except ValidationError as error:
        raise ModelError(f"{path}: broken safetensors header ({describe(error):.200}); fetch it again") from None
    except ValueError as error:
        raise ModelError(f"{path}: broken safetensors header ({error}); fetch it again") from None
