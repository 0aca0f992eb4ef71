"""The proof that contestants did the same work: their vectors are equal."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline_bench.task import SIDES, VECTORS_FOLDER

MIN_COSINE = 0.999
BLOCK = 1024  # rows that are compared with all others at once


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


def check_equal(vectors: Mapping[str, Vectors], *, centred: bool = False) -> dict[str, float]:
    """Compare all contestants with the first.

    An untrained tower sends all inputs to nearly one place, where a cosine says nothing; so each vector must also be
    nearer to its own in the first contestant than to that of any other content among its neighbours by id.

    Returns:
        The least cosine of each.
    """
    (first, reference), *_ = vectors.items()
    least = {}
    for name, other in vectors.items():
        if other.ids != reference.ids:
            missing = len(set(reference.ids) - set(other.ids))
            raise UnequalVectorsError(
                f"{name}: {len(other.ids)} items, {missing} of the {len(reference.ids)} of {first} are missing"
            )
        least[name] = min(
            _least_cosine(
                f"{name} against {first}, {side}", *(vars(each)[side] for each in (reference, other)), centred=centred
            )
            for side in ("images", "texts")
        )
    return least


def _least_cosine(who: str, a: np.ndarray, b: np.ndarray, *, centred: bool) -> float:
    """The least cosine of rows of the same number; (N, E) each."""
    if a.shape != b.shape:
        raise UnequalVectorsError(f"{who}: shapes {a.shape} and {b.shape}")
    if centred:
        mean = a.mean(axis=0)
        a, b = a - mean, b - mean
    cosines = np.sum(a * b, axis=1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))
    least = float(cosines.min())
    if not least >= MIN_COSINE:  # a NaN is no success
        raise UnequalVectorsError(f"{who}: row {int(cosines.argmin())} has a cosine of {least:.6f}, not {MIN_COSINE}")
    stray = _nearest_is_another(a, b) if centred else _neighbour_is_nearer(a, b)
    if stray.any():
        raise UnequalVectorsError(
            f"{who}: row {int(stray.argmax())} is nearer to another item's vector than to its own: is the order kept?"
        )
    return least


def _neighbour_is_nearer(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Which rows of b are nearer to the row before their own in a, unless a's two are the same; bool (N,)."""
    neighbours = np.roll(a, 1, axis=0)
    differs = np.linalg.norm(neighbours - a, axis=1) > 0
    return (np.linalg.norm(b - neighbours, axis=1) < np.linalg.norm(b - a, axis=1)) & differs


def _nearest_is_another(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Which rows of b have another row of a nearest by cosine than their own; bool (N,).

    Items of the same content, such as equal captions, are the same row: a's vectors of them are equal, within what
    counts as equal here.
    """
    a, b = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (a, b))
    nearest = np.concatenate([(b[start : start + BLOCK] @ a.T).argmax(axis=1) for start in range(0, len(b), BLOCK)])
    return np.sum(a * a[nearest], axis=1) < MIN_COSINE
