"""The proof that contestants did the same work: their vectors are equal."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline_bench.task import SIDES, VECTORS_FOLDER

MIN_COSINE = 0.999


class UnequalVectorsError(Exception):
    """Contestants that are measured against each other did not compute the same."""


@dataclass(frozen=True)
class Vectors:
    """Of all items, in the order of their ids: float32 (N, E), length 1."""

    ids: tuple[str, ...]
    images: np.ndarray
    texts: np.ndarray


def read_files(out: Path) -> Vectors:
    """What a contestant wrote, in whatever files."""
    files = sorted((out / VECTORS_FOLDER).rglob("*.parquet"))
    tables = [pq.read_table(file) for file in files]
    if "vectors" in tables[0].schema.names:  # both sides in one list
        both = from_table(pa.concat_tables(tables), ("vectors", "vectors"))
        width = both.images.shape[1] // 2
        return Vectors(both.ids, both.images[:, :width], both.texts[:, width:])
    return from_table(pa.concat_tables(tables))


def from_table(table: pa.Table, sides: tuple[str, str] = SIDES) -> Vectors:
    """Sort by id; columns are lists of any kind, or tensors of Ray."""
    table = table.select(dict.fromkeys(("item_id", *sides))).sort_by("item_id")
    images, texts = (_matrix(table[side]) for side in sides)
    return Vectors(tuple(table["item_id"].to_pylist()), images, texts)


def _matrix(column: pa.ChunkedArray) -> np.ndarray:
    array = column.combine_chunks()
    if isinstance(array.type, pa.ExtensionType):
        array = array.storage
    return array.flatten().to_numpy(zero_copy_only=False).astype(np.float32).reshape(len(array), -1)


def check_equal(vectors: Mapping[str, Vectors]) -> dict[str, float]:
    """Compare all contestants with the first.

    An untrained tower sends all inputs to nearly one place, where a cosine says nothing; so each vector must also be
    nearer to its own in the first contestant than to that of any other content among its neighbours by id.

    Returns:
        The least cosine of each.

    Raises:
        UnequalVectorsError: ids differ, a cosine lies below 0.999, or a vector is nearer to another item's.
    """
    (first, reference), *_ = vectors.items()
    least = {}
    for name, other in vectors.items():
        if other.ids != reference.ids:
            missing = len(set(reference.ids) - set(other.ids))
            raise UnequalVectorsError(
                f"{name}: {len(other.ids)} items, {missing} of the {len(reference.ids)} of {first} are missing"
            )
        pairs = ((reference.images, other.images), (reference.texts, other.texts))
        least[name] = min(_least_cosine(f"{name} against {first}", ours, theirs) for ours, theirs in pairs)
    return least


def _least_cosine(who: str, a: np.ndarray, b: np.ndarray) -> float:
    """The least cosine of rows of the same number; (N, E) each."""
    if a.shape != b.shape:
        raise UnequalVectorsError(f"{who}: shapes {a.shape} and {b.shape}")
    cosines = np.sum(a * b, axis=1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))
    least = float(cosines.min())
    if not least >= MIN_COSINE:  # a NaN is no success
        raise UnequalVectorsError(f"{who}: row {int(cosines.argmin())} has a cosine of {least:.6f}, not {MIN_COSINE}")
    neighbours = np.roll(a, 1, axis=0)
    differs = np.linalg.norm(neighbours - a, axis=1) > 0
    is_nearer = np.linalg.norm(b - neighbours, axis=1) < np.linalg.norm(b - a, axis=1)
    if (is_nearer & differs).any():
        row = int((is_nearer & differs).argmax())
        raise UnequalVectorsError(
            f"{who}: row {row} is nearer to another item's vector than to its own: is the order kept?"
        )
    return least
