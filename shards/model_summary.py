"""Summaries of model folders and of deltas, from their JSON and the headers of their weight files; no torch.

A delta holds the layers of a model that were trained over a base:

delta.json           format version, name, the base's fingerprint
model.safetensors    the trained tensors, under their names in the base

`embedder train` writes it with what = "layers"; `shards.delta.apply_delta` merges it with its base.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from shards.file_schema import describe, read_json
from shards.fingerprint import model_fingerprint, tokenizer_fingerprint
from shards.model_config import TOKENIZER_FILE, ModelConfig, load_model_config
from shards.model_errors import ModelError
from shards.tensor_shapes import OPTIONAL_SHAPES, PARTS, model_shapes, part_of
from shards.weights import TensorEntry, check_names, check_shape, read_entries

DELTA_FILE = "delta.json"
DELTA_FORMAT = 1
IMPORT_FILE = "import.json"  # what `embedder model import` did with each file of the checkpoint

# The first number in a tensor's name is the layer, for every family of towers.
_LAYER = re.compile(r"(vision|text)\.\D*\.(\d+)\.")

_ONES = {"F64": b"\0\0\0\0\0\0\xf0\x3f", "F32": b"\0\0\x80\x3f", "F16": b"\0\x3c", "BF16": b"\x80\x3f"}
"""The value 1 by dtype, as safetensors stores it."""


class _ImportedFile(BaseModel):
    file: str
    use: str
    what: str


class _ImportRecord(BaseModel):
    files: list[_ImportedFile]
    decisions: list[str]


@dataclass(frozen=True)
class PartSummary:
    """Parameters of one part of a model, and their bytes on disk."""

    name: str
    num_parameters: int
    size_bytes: int


@dataclass(frozen=True)
class ModelSummary:
    """Summary of a model, as `embedder model info` shows it.

    `parts` are front, layers and head of each tower; `dtypes` are sorted names as in safetensors (`F32`, `BF16`);
    `tokenizer_fingerprint` is None without tokenizer.json; `untrained` says why vectors mean nothing yet, or is None.
    """

    folder: Path
    config: ModelConfig
    parts: tuple[PartSummary, ...]
    dtypes: tuple[str, ...]
    num_files: int
    num_parameters: int
    size_bytes: int
    model_fingerprint: str
    tokenizer_fingerprint: str | None
    untrained: str | None


def describe_model(folder: str | Path) -> ModelSummary:
    """Summarise a model folder, by headers and the fingerprint; raises a ModelError if it is broken."""
    folder = Path(folder)
    config = load_model_config(folder)
    entries = read_entries(folder)
    expected = model_shapes(config)
    check_names({name: entry.path for name, entry in entries.items()}, folder, expected, config)
    for name, entry in entries.items():
        check_shape(entry.path, name, entry.shape, (expected | OPTIONAL_SHAPES)[name])
    parts = _summarise_parts(config, entries)
    tokenizer = folder / TOKENIZER_FILE
    return ModelSummary(
        folder=folder,
        config=config,
        parts=parts,
        dtypes=tuple(sorted({entry.dtype for entry in entries.values()})),
        num_files=len({entry.path for entry in entries.values()}),
        num_parameters=sum(part.num_parameters for part in parts),
        size_bytes=sum(part.size_bytes for part in parts),
        model_fingerprint=model_fingerprint(folder),
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer.read_bytes()) if tokenizer.is_file() else None,
        untrained=untrained_reason(folder),
    )


def untrained_reason(folder: str | Path) -> str | None:
    """Say why a model's vectors mean nothing yet (random towers, fresh projections); None for a trained model."""
    sides = fresh_towers(folder)
    if sides:
        what = f"its {sides[0]} tower has" if len(sides) == 1 else f"its {' and '.join(sides)} towers have"
        return f"{what} random weights, as before any training"
    return None if load_model_config(folder).trained else "its projections are fresh"


def fresh_towers(folder: str | Path) -> tuple[str, ...]:
    """Find untrained towers by their norms: libraries initialise scales to 1 and shifts to 0.

    One norm of a trained tower is read; a tower without norms counts as trained. Raises a ModelError if weights are
    missing or broken.
    """
    entries = read_entries(Path(folder))
    return tuple(side for side in ("vision", "text") if _is_fresh(entries, f"{side}."))


def _is_fresh(entries: dict[str, TensorEntry], prefix: str) -> bool:
    """Whether all norms of a tower have their initial values; only norms have one-dimensional weights."""
    names = [name for name, entry in entries.items() if name.startswith(prefix) and len(entry.shape) == 1]
    norms = [name for name in names if name.endswith(".weight")]
    shifts = [f"{name.removesuffix('weight')}bias" for name in norms]
    return (
        bool(norms)
        and all(_holds_only(entries[name], _ONES.get(entries[name].dtype, b"")) for name in norms)
        and all(_holds_only(entries[name], b"\0") for name in shifts if name in entries)
    )


def _holds_only(entry: TensorEntry, value: bytes) -> bool:
    with entry.path.open("rb") as file:
        file.seek(entry.start)
        stored = file.read(entry.stop - entry.start)
    return bool(value) and stored == value * (len(stored) // len(value))


def _summarise_parts(config: ModelConfig, entries: dict[str, TensorEntry]) -> tuple[PartSummary, ...]:
    num_parameters: defaultdict[str, int] = defaultdict(int)
    size_bytes: defaultdict[str, int] = defaultdict(int)
    for name, entry in entries.items():
        if name in OPTIONAL_SHAPES:
            continue
        part = part_of(config, name)
        num_parameters[part] += prod(entry.shape)
        size_bytes[part] += entry.stop - entry.start
    parts = [part for part in PARTS if part.partition(" ")[0] in config.towers]
    return tuple(PartSummary(part, num_parameters[part], size_bytes[part]) for part in parts)


def read_import_record(folder: Path) -> dict[str, Any]:
    """Read what an import did with the checkpoint's `files`, and its `decisions`; empty without a record.

    Raises a ModelError if it is no such record.
    """
    path = folder / IMPORT_FILE
    if not path.is_file():
        return {}
    record = read_json(path, "")
    try:
        _ImportRecord.model_validate(record)
    except ValidationError as error:
        raise ModelError(
            f"{path}: {describe(error)}; it only says how the model was imported: delete it, or import again"
        ) from None
    return record


@dataclass(frozen=True)
class DeltaSummary:
    """Summary of a delta, as `embedder model info` shows it; `parameters` by part, where each layer is one."""

    folder: Path
    name: str
    base_fingerprint: str
    parameters: dict[str, int]
    dtypes: tuple[str, ...]
    size_bytes: int

    @property
    def num_parameters(self) -> int:
        """Number of parameters of all parts."""
        return sum(self.parameters.values())


def is_delta(folder: str | Path) -> bool:
    """Whether a folder holds a delta."""
    return (Path(folder) / DELTA_FILE).is_file()


def describe_delta(folder: str | Path) -> DeltaSummary:
    """Summarise a delta; raises a ModelError if it is no delta, of an unknown format, or broken."""
    folder = Path(folder)
    name, base_fingerprint = read_delta(folder)
    entries = read_entries(folder)
    parameters: defaultdict[str, int] = defaultdict(int)
    for tensor, entry in entries.items():
        parameters[_layer_of(tensor)] += prod(entry.shape)
    return DeltaSummary(
        folder=folder,
        name=name,
        base_fingerprint=base_fingerprint,
        parameters=dict(parameters),
        dtypes=tuple(sorted({entry.dtype for entry in entries.values()})),
        size_bytes=sum(entry.stop - entry.start for entry in entries.values()),
    )


def read_delta(folder: Path) -> tuple[str, str]:
    """Read a delta's name and its base's fingerprint; raises a ModelError if it is no delta or of an unknown format."""
    about = read_json(folder / DELTA_FILE, 'name a delta that `embedder train` wrote with what = "layers"')
    if about.get("format_version") != DELTA_FORMAT:
        raise ModelError(
            f"{folder / DELTA_FILE}: format_version is {about.get('format_version')!r}, and this version reads "
            f"{DELTA_FORMAT}; upgrade embedder"
        )
    return str(about.get("name")), str(about.get("base_fingerprint"))


def _layer_of(tensor: str) -> str:
    found = _LAYER.match(tensor)
    return f"{found[1]} layer {found[2]}" if found else tensor
