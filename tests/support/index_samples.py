"""Seeded vectors and ids for the tests of the index."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from index.build import build_index
from index.manifest import Manifest

DIM = 16
Build = Callable[..., tuple[Path, Manifest]]


def unit(values: np.ndarray) -> np.ndarray:
    return (values / np.linalg.norm(values, axis=1, keepdims=True)).astype(np.float32)


def make_vectors(num_vectors: int, dim: int = DIM, seed: int = 0) -> np.ndarray:
    return unit(np.random.default_rng(seed).standard_normal((num_vectors, dim)))


def make_images_and_captions(num_images: int, num_captions: int, dim: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Images are meaning and appearance, captions only the meaning and an offset: hard to find for an index."""
    rng = np.random.default_rng(0)
    meaning_map, look_map = rng.standard_normal((8, dim)), rng.standard_normal((24, dim))
    meaning = rng.standard_normal((num_images, 8))
    look = rng.standard_normal((200, 24))[rng.integers(0, 200, num_images)] + 0.4 * rng.standard_normal(
        (num_images, 24)
    )
    owners = rng.integers(0, num_images, num_captions)
    offset = unit(rng.standard_normal((1, dim)))
    return unit(meaning @ meaning_map + look @ look_map), unit(unit(meaning[owners] @ meaning_map) + offset)


def ids_of(numbers: np.ndarray, run_id: str = "run-1") -> pa.Table:
    return pa.table(
        {
            "item_id": [f"{number:05d}" for number in numbers],
            "segment": np.zeros(len(numbers), np.int32),
            "run_id": [run_id] * len(numbers),
        }
    )


def make_ids(num_vectors: int, run_id: str = "run-1") -> pa.Table:
    """Rows 2n and 2n+1 are segments 0 and 1 of clip n: neither column names a row by itself."""
    return pa.table(
        {
            "item_id": [f"clips/{row // 2:05d}.mp4" for row in range(num_vectors)],
            "segment": pa.array([row % 2 for row in range(num_vectors)], pa.int32()),
            "run_id": [run_id] * num_vectors,
        }
    )


def index_builder(folder: Path) -> Build:
    """Factory of indexes of 300 vectors of 16 dimensions; any argument of `build_index` may be given instead."""

    def build_with(vectors: Any = None, **changes: Any) -> tuple[Path, Manifest]:
        vectors = make_vectors(300) if vectors is None else vectors
        arguments: dict[str, Any] = {
            "out": folder / "index" / "000001",
            "model_fingerprint": "model-a",
            "embeddings_version": 7,
            "num_threads": 1,
        } | changes
        if "ids" not in arguments:
            arguments["ids"] = make_ids(len(vectors))
        return arguments["out"], build_index(vectors, **arguments)

    return build_with


def exact_rows(queries: np.ndarray, vectors: np.ndarray, k: int = 10, among: np.ndarray | None = None) -> np.ndarray:
    """Rows of the k nearest vectors of each query by brute force, of all rows or among some."""
    rows = np.arange(len(vectors)) if among is None else among
    return rows[np.argsort(-(queries @ vectors[rows].T), axis=1, kind="stable")[:, :k]]


def share_found(found: np.ndarray, wanted: np.ndarray) -> float:
    """Mean share of the wanted rows that were found."""
    return float(np.mean([len(set(a) & set(b)) / len(b) for a, b in zip(found.tolist(), wanted.tolist(), strict=True)]))
