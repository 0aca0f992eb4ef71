"""Summary of a model folder from its configuration and the headers of its weight files; no torch."""

from collections import defaultdict
from dataclasses import dataclass
from math import prod
from pathlib import Path

from shards.config import TOKENIZER_FILE, ModelConfig, load_model_config
from shards.fingerprint import model_fingerprint, tokenizer_fingerprint
from shards.tensor_shapes import OPTIONAL_SHAPES, PARTS, model_shapes, part_of
from shards.weights import TensorEntry, check_names, check_shape, read_entries


@dataclass(frozen=True)
class PartSummary:
    """Parameters of one part of a model, and their bytes on disk."""

    name: str
    num_parameters: int
    size_bytes: int


@dataclass(frozen=True)
class ModelSummary:
    """Summary of a model, as `embedder model info` shows it.

    Attributes:
        folder: the model folder.
        config: towers, embedding width, preprocessing.
        parts: front, layers and head of each tower.
        dtypes: dtypes on disk, as safetensors names them (`F32`, `BF16`), sorted.
        num_files: number of weight files.
        num_parameters: number of parameters of all parts.
        size_bytes: bytes of all weights on disk.
        model_fingerprint: fingerprint of the weights and towers; None where it wasn't asked for.
        tokenizer_fingerprint: fingerprint of tokenizer.json; None where there is none.
    """

    folder: Path
    config: ModelConfig
    parts: tuple[PartSummary, ...]
    dtypes: tuple[str, ...]
    num_files: int
    num_parameters: int
    size_bytes: int
    model_fingerprint: str | None
    tokenizer_fingerprint: str | None


def describe_model(folder: str | Path, *, fingerprint: bool = True) -> ModelSummary:
    """Summarise a model folder; apart from the fingerprint, only headers are read.

    Args:
        folder: the model folder.
        fingerprint: whether to hash the weights, too, which reads them once.

    Raises:
        ModelError: the folder is no model folder, or its weights aren't those of its configuration.
    """
    folder = Path(folder)
    config = load_model_config(folder)
    entries = read_entries(folder)
    expected = model_shapes(config)
    check_names({name: entry.path for name, entry in entries.items()}, folder, expected, config)
    for name, entry in entries.items():
        check_shape(entry.path, name, entry.shape, (expected | OPTIONAL_SHAPES)[name])
    parts = _summarise_parts(entries)
    tokenizer = folder / TOKENIZER_FILE
    return ModelSummary(
        folder=folder,
        config=config,
        parts=parts,
        dtypes=tuple(sorted({entry.dtype for entry in entries.values()})),
        num_files=len({entry.path for entry in entries.values()}),
        num_parameters=sum(part.num_parameters for part in parts),
        size_bytes=sum(part.size_bytes for part in parts),
        model_fingerprint=model_fingerprint(folder) if fingerprint else None,
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer.read_bytes()) if tokenizer.is_file() else None,
    )


def _summarise_parts(entries: dict[str, TensorEntry]) -> tuple[PartSummary, ...]:
    num_parameters: defaultdict[str, int] = defaultdict(int)
    size_bytes: defaultdict[str, int] = defaultdict(int)
    for name, entry in entries.items():
        if name in OPTIONAL_SHAPES:
            continue
        part = part_of(name)
        num_parameters[part] += prod(entry.shape)
        size_bytes[part] += entry.stop - entry.start
    return tuple(PartSummary(part, num_parameters[part], size_bytes[part]) for part in PARTS)
