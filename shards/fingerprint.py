"""Fingerprints: 16 hexadecimal digits, equal if two models, or two preprocessings, give the same vectors."""

import hashlib
import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from pydantic import BaseModel

from shards.model_config import ACTIVATED, load_model_config
from shards.preprocess import UNHASHED, PreprocessConfig
from shards.weights import TensorEntry, find_weights, read_entries

FINGERPRINT_DIGITS = 16
CHUNK_BYTES = 8 << 20
RAW = "raw"


def model_fingerprint(folder: str | Path) -> str:
    """Hash a model's weights and towers, regardless of how weights are split into files; may raise a ModelError.

    Names, training state and preprocessing don't count. Weights are read through a buffer of 8 MiB; a second call in
    the same process rereads them only if a file's size or time has changed.
    """
    folder = Path(folder)
    config = load_model_config(folder)
    paths = sorted(set(find_weights(folder).values()))
    stamps = tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths if path.exists())
    towers: dict[str, object] = {side: _settings(tower) for side, tower in config.towers.items()}
    towers["embedding_dim"] = config.embedding_dim
    if config.dimensions is not None:
        towers["dimensions"] = config.dimensions
    if config.text_projection in ACTIVATED:  # weights and sizes don't show it
        towers["text_projection"] = config.text_projection
    return short_hash([_canonical(towers), _weights_digest(folder, stamps)])


def preprocess_fingerprint(
    preprocess: PreprocessConfig, tokenizer: bytes, segment_s: float, frames_per_segment: int, colour: str = RAW
) -> str:
    """Hash the whole preprocessing, from an input's bytes to the model.

    `tokenizer` is the content of tokenizer.json, `segment_s` the length of a video segment in seconds, and `colour`
    says how pixel values are read; "raw" adds nothing, because older stores were made before there was a choice.
    """
    video = {"segment_s": float(segment_s), "frames_per_segment": frames_per_segment}
    parts = [_canonical(_settings(preprocess)), tokenizer, _canonical(video)]
    return short_hash(parts if colour == RAW else [*parts, colour.encode()])


def tokenizer_fingerprint(tokenizer: bytes) -> str:
    """Hash the content of tokenizer.json."""
    return short_hash([tokenizer])


def _settings(section: BaseModel) -> dict[str, object]:
    """Dump a section without its defaults: a new key whose default keeps the meaning changes no hash."""
    return section.model_dump(mode="json", exclude_defaults=True, exclude=UNHASHED)


@lru_cache(maxsize=16)
def _weights_digest(folder: Path, stamps: tuple[tuple[str, int, int], ...]) -> bytes:
    """Hash all tensors in the order of their names; `stamps` (path, size, mtime) make the cache forget old files."""
    del stamps
    hasher = hashlib.sha256()
    for name, entry in sorted(read_entries(folder).items()):
        hasher.update(_canonical([name, entry.dtype, entry.shape]))
        _hash_tensor(hasher, entry)
    return hasher.digest()


def _hash_tensor(hasher: "hashlib._Hash", entry: TensorEntry) -> None:
    buffer = memoryview(bytearray(min(CHUNK_BYTES, entry.stop - entry.start)))
    num_left = entry.stop - entry.start
    with entry.path.open("rb", buffering=0) as file:
        file.seek(entry.start)
        while num_left and (num_read := file.readinto(buffer[:num_left])):
            hasher.update(buffer[:num_read])
            num_left -= num_read


def short_hash(parts: Iterable[bytes]) -> str:
    """Hash parts to a fingerprint; different sequences of parts never hash the same bytes."""
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(hashlib.sha256(part).digest())
    return hasher.hexdigest()[:FINGERPRINT_DIGITS]


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
