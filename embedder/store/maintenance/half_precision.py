"""Vectors in half precision: what rounding would cost a store, measured on its own vectors, and who rounds.

Delta has no 16-bit float, so the table's type stays `list<float>`: values are rounded and written byte by byte,
compressed, of which two in four are nearly constant (`embedder.storage.vector_pages`). Every reader of Parquet reads
them. What reading finds is what any user of the vectors sees: index, evaluation, exact search.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from embedder.store.files import StoreFiles
from embedder.store.layout import MAIN, STORE_FILE, Current, StoreInfo, read_record, swap_record
from embedder.store.publish.current import versions_of
from embedder.store.store_info import read_store_info, served_info
from embedder.store.tables.arrow_tensors import is_half
from embedder.store.tables.tables import RecordTable

LOG = logging.getLogger(__name__)

VectorType = Literal["float32", "float16"]
Floats = np.ndarray[Any, np.dtype[np.float32]]

K = 10
MAX_CANDIDATES, MAX_QUERIES, QUERIES_AT_ONCE = 50_000, 2000, 64
NUM_FILES = 32
MAX_LOST_NEIGHBOURS, MAX_LOST_RECALL = 0.005, 0.001
"""Shares that rounding may cost: of the ten nearest of a query, and of R@10.

The index itself stays, so its recall can move by no more than the first.
"""
HALF_SHARE = 0.44
"""Bytes of rounded vectors, compressed, over those of float32 (docs/decisions.md)."""


@dataclass(frozen=True)
class RoundingLoss:
    """What rounding would cost: shares of the ten nearest that others take the place of, and of R@10."""

    lost_neighbours: float
    lost_recall: float | None  # None without captions
    num_queries: int
    in_range: bool  # whether half precision can hold all values that were looked at

    @property
    def refusal(self) -> str | None:
        """Why the vectors stay in float32; None if they may be rounded."""
        if not self.in_range:
            return "some values are beyond the range of half precision, 65,504"
        if self.lost_neighbours > MAX_LOST_NEIGHBOURS:
            found = (
                f"{100 * self.lost_neighbours:.2f} % of the ten nearest of {self.num_queries:,} queries would change"
            )
            return f"{found}, {100 * MAX_LOST_NEIGHBOURS:g} % at most may"
        if self.lost_recall is not None and self.lost_recall > MAX_LOST_RECALL:
            return f"R@10 would fall by {self.lost_recall:.4f}, {MAX_LOST_RECALL:g} at most is allowed"
        return None


def is_half_store(files: StoreFiles, fingerprint: str) -> bool:
    """Return whether a store, or the model of a view, records a model's vectors in half precision."""
    info = read_record(files, STORE_FILE, StoreInfo)
    return info is not None and info.half_of == fingerprint


def mark_half(files: StoreFiles, fingerprint: str | None) -> None:
    """Note in store.json whose vectors later runs round; None: nobody's."""
    update = {"half_of": fingerprint}
    swap_record(files, STORE_FILE, StoreInfo, lambda info: None if info is None else info.model_copy(update=update))


def models_to_round(files: StoreFiles, current: Current, wanted: VectorType | None) -> dict[str, str]:
    """Return the models whose published vectors are to be rounded, with their fingerprints; empty is the main one.

    For float32, later runs no longer round; what was rounded stays so. Logs why a model's vectors can't be rounded.
    """
    found = {}
    for model, (files_of_model, own) in versions_of(files, current).items() if wanted else ():
        fingerprint = served_info(read_store_info(files_of_model), own).model_fingerprint
        is_marked = is_half_store(files_of_model, fingerprint)
        if wanted == "float32" and is_marked:
            mark_half(files_of_model, None)
            LOG.warning(f"store {files.address}: new vectors are recorded in float32; those that were rounded stay so")
        if wanted == "float32" or is_marked or own.has_vectors is False:
            continue
        loss = measure_loss(files_of_model, own)
        if loss is None:
            continue
        if loss.refusal is None:
            found[model] = fingerprint
        else:
            LOG.warning(f'{model or MAIN}: vectors = "float16": they stay in float32, as {loss.refusal}')
    return found


def measure_loss(files: StoreFiles, current: Current) -> RoundingLoss | None:
    """Compare exact search over published vectors with the same over rounded ones; None if there are none to round."""
    table = RecordTable(files, "embeddings", current.embeddings)
    vectors, captions, right = _sample(table, "image_embedding")
    has_captions = len(captions) > 0
    if not len(vectors):
        vectors, _, _ = _sample(table, "text_embedding")
        has_captions = False
    if not len(vectors):
        return None
    queries = captions if has_captions else vectors[:MAX_QUERIES]
    with np.errstate(over="ignore"):
        rounded, asked = (each.astype(np.float16).astype(np.float32) for each in (vectors, queries))
    if not np.isfinite(rounded).all() or not np.isfinite(asked).all():
        return RoundingLoss(1.0, None, len(queries), in_range=False)
    lost, hits = 0, np.zeros(2)
    for start in range(0, len(queries), QUERIES_AT_ONCE):
        stop = start + QUERIES_AT_ONCE
        before, after = _nearest(queries[start:stop], vectors), _nearest(asked[start:stop], rounded)
        lost += sum(len(np.setdiff1d(a, b)) for a, b in zip(before, after, strict=True))
        if has_captions:
            hits += [(rows == right[start:stop, None]).any(axis=1).sum() for rows in (before, after)]
    lost_recall = float(hits[0] - hits[1]) / len(queries) if has_captions else None
    return RoundingLoss(lost / (len(queries) * min(K, len(vectors))), lost_recall, len(queries), in_range=True)


def _nearest(queries: Floats, vectors: Floats) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the rows of the ten nearest by inner product, in no order; int64 (Q, 10), of fewer vectors all."""
    scores = queries @ vectors.T
    if len(vectors) <= K:
        return np.tile(np.arange(len(vectors)), (len(queries), 1))
    return np.argpartition(-scores, K - 1, axis=1)[:, :K]


def _sample(table: RecordTable, column: str) -> "tuple[Floats, Floats, np.ndarray[Any, np.dtype[np.int64]]]":
    """Return vectors from files across the table, captions of some, and the rows of these captions' own vectors."""
    images, texts, right, num = list[Floats](), list[Floats](), [np.zeros(0, np.int64)], 0
    for path in _choose_spread(table.paths()):
        own, captions = table.read_vectors(column, [path]), table.read_vectors("text_embedding", [path])
        share = min(-(-MAX_CANDIDATES // min(NUM_FILES, len(table.paths()))), MAX_CANDIDATES - num)
        taken = own.values[:share]
        if not len(taken):
            continue
        rows = np.cumsum(own.present) - 1
        is_pair = own.present & captions.present & (rows < share)
        texts.append(captions.values[is_pair[captions.present]])
        right.append(rows[is_pair] + num)
        images.append(taken)
        num += len(taken)
    if not images:
        return np.empty((0, 0), np.float32), np.empty((0, 0), np.float32), right[0]
    return np.concatenate(images), np.concatenate(texts)[:MAX_QUERIES], np.concatenate(right)[:MAX_QUERIES]


def _choose_spread(paths: list[str]) -> Iterator[str]:
    step = -(-len(paths) // NUM_FILES)
    return iter(paths[:: max(1, step)])


def describe_saving(files: StoreFiles, current: Current) -> str:
    """Say in what precision the published vectors are recorded, and what half precision would save."""
    table = RecordTable(files, "embeddings", current.embeddings)
    paths = table.paths()
    if not paths:
        return "none are published"
    first = table.read(["image_embedding", "text_embedding"], paths[:1])
    sizes = [column.nbytes for column in first.columns]
    if all(is_half(column) for column in first.columns):
        return "float16: rounded to half precision"
    num_bytes = sum(sizes) / max(first.num_rows, 1) * table.num_rows()
    saved = (1 - HALF_SHARE) * num_bytes
    return f'float32, about {num_bytes / 1e9:.2f} GB; `vectors = "float16"` would save about {saved / 1e9:.2f} GB'
