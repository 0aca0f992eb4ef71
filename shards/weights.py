"""Locations of tensors in weight files (file, dtype, shape, byte range), from headers only, without torch.

Source: the safetensors format (8 bytes little-endian header length, a JSON header, then the tensors), and the
`model.safetensors.index.json` that transformers writes next to several files.
"""

import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import NonNegativeInt, TypeAdapter, ValidationError, field_validator

from shards.file_schema import ModelSection, describe, parse_json, read_json
from shards.model_config import CONFIG_FILE, ModelConfig
from shards.model_errors import ModelError
from shards.tensor_shapes import OPTIONAL_SHAPES, model_shapes
from shards.towers.base import Shape

WEIGHTS_FILE = "model.safetensors"
INDEX_SUFFIX = ".index.json"
WEIGHTS_INDEX_FILE = f"{WEIGHTS_FILE}{INDEX_SUFFIX}"

# The safetensors library refuses longer headers, too.
MAX_HEADER_BYTES = 100_000_000

CURE = f"weights and {CONFIG_FILE} belong together, import the model again"
CHECKPOINT_CURE = f"weights and {CONFIG_FILE} belong together, fetch both again from one model"
POSITIONS_CURE = (
    f"set the image size, or the length of captions, in {CONFIG_FILE} to that of this table of positions, or fetch "
    "both again from one model"
)


FOREIGN_SUFFIXES = {
    ".gguf": "a GGUF of llama.cpp",
    ".ggml": "a GGML of llama.cpp",
    ".onnx": "an ONNX program",
    ".tflite": "a program of TensorFlow Lite",
    ".h5": "weights for TensorFlow",
    ".msgpack": "weights for Flax",
    ".mlmodel": "a program of Core ML",
    ".engine": "a program of TensorRT",
    ".npz": "arrays of NumPy or JAX",
}
FOREIGN_CURE = "give the folder with the safetensors of the model that it was made of"


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

    @field_validator("data_offsets")
    @classmethod
    def _rising(cls, value: tuple[int, int]) -> tuple[int, int]:
        if value[0] > value[1]:
            raise ValueError("it ends before it begins")
        return value


_HEADER = TypeAdapter(dict[str, _HeaderItem])


def find_weights(folder: Path, file_name: str = WEIGHTS_FILE) -> dict[str, Path]:
    """Find the file of each tensor of a model folder or checkpoint; with an index, weight files are not opened.

    `file_name` is that of a single weight file; the index's name begins with it. Raises a ModelError if there are no
    weights or the index is broken.
    """
    if (folder / file_name).is_file():
        return dict.fromkeys(read_header(folder / file_name), folder / file_name)
    index = folder / f"{file_name}{INDEX_SUFFIX}"
    if not index.is_file():
        raise ModelError(
            f"{folder}: found neither {file_name} nor {index.name}; weights are read from safetensors "
            "only, so turn other formats into them with `embedder model import`"
        )
    return {name: folder / each for name, each in read_index(index, "safetensors").items()}


def describe_foreign(path: Path) -> str | None:
    """Say what a file of weights, or a file in a folder, is that no import reads; None if there is none."""
    files = [path] if path.is_file() else sorted(each for each in (*path.glob("*"), *path.glob("onnx/*")))
    for file in files:
        if (kind := FOREIGN_SUFFIXES.get(file.suffix.lower())) is not None:
            return f"{file.name} is {kind}, which can't be imported; {FOREIGN_CURE}"
    return None


def stored_names(folder: Path, file_name: str = WEIGHTS_FILE) -> dict[str, Path]:
    """Like `find_weights`, but return nothing for a folder without weights; a broken header raises a ModelError."""
    names = (file_name, f"{file_name}{INDEX_SUFFIX}")
    return find_weights(folder, file_name) if any((folder / name).is_file() for name in names) else {}


def read_index(index: Path, suffix: str) -> dict[str, str]:
    """Read which file, all with `suffix` (without the dot), holds each tensor; raises a ModelError if it is broken."""
    weight_map = read_json(index, "fetch it again").get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{index}: found no weight_map of names to files; fetch it again")
    for file_name in sorted(set(weight_map.values())):
        # A name that leaves the folder could read any file on this machine.
        if not re.fullmatch(rf"[\w.-]+\.{suffix}", file_name):
            raise ModelError(
                f"{index}: names the file {file_name!r}; expected the plain name of a .{suffix} file, fetch it again"
            )
    return weight_map


def read_entries(folder: Path, file_name: str = WEIGHTS_FILE) -> dict[str, TensorEntry]:
    """Read the headers of all weight files of a folder; `file_name` is as for `find_weights`.

    Raises a ModelError if there are no weights, a header is broken, or a file lacks a tensor that the index puts there.
    """
    files = find_weights(folder, file_name)
    check_present(files, folder / f"{file_name}{INDEX_SUFFIX}")
    headers = {path: read_header(path) for path in sorted(set(files.values()))}
    for name, path in files.items():
        if name not in headers[path]:
            raise ModelError(f"{path}: lacks the tensor {name} that the index puts there; fetch both again")
    return {name: headers[path][name] for name, path in files.items()}


def check_present(files: Mapping[str, Path], index: Path) -> None:
    """Raise a ModelError unless the file of each tensor exists."""
    for path in sorted(set(files.values())):
        if not path.is_file():
            raise ModelError(f"{path}: there is no such file, but {index.name} puts tensors there; fetch it, too")


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Read the header of a safetensors file; raises a ModelError if the file is missing, malformed or truncated."""
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
    """Raise a ModelError unless the weight files hold all of `owned`, and nothing that the model doesn't have."""
    known = model_shapes(config)
    for name, path in files.items():
        if name not in known and name not in OPTIONAL_SHAPES:
            raise ModelError(f"{path}: found the tensor {name}, which this model's {CONFIG_FILE} doesn't have; {CURE}")
    for name in owned:
        if name not in files:
            raise ModelError(f"{folder}: lacks the tensor {name} of shape {list(known[name])}; {CURE}")


def check_shape(path: Path, name: str, found: Sequence[int], expected: Shape, cure: str = CURE) -> None:
    """Raise a ModelError unless a tensor has the configured shape; `cure` is advice for the message."""
    if tuple(found) != expected:
        raise ModelError(f"{path}: the tensor {name} has shape {list(found)}, expected {list(expected)}; {cure}")


def _parse_header(path: Path, text: bytes) -> dict[str, _HeaderItem]:
    try:
        tree = parse_json(text)
        if isinstance(tree, dict):
            tree.pop("__metadata__", None)
        return _HEADER.validate_python(tree)
    except ValidationError as error:
        raise ModelError(f"{path}: broken safetensors header ({describe(error):.200}); fetch it again") from None
    except ValueError as error:
        raise ModelError(f"{path}: broken safetensors header ({error}); fetch it again") from None
