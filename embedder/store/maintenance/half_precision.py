"""Vectors in half precision: what rounding would cost a store, measured on its own vectors, and who rounds.

Delta has no 16-bit float, so the table's type stays `list<float>`: values are rounded and written byte by byte,
compressed, of which two in four are nearly constant (`embedder.storage.vector_pages`). Readers that were tried
are in docs/rollback-and-purge.md.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from embedder.quantities import plural
from embedder.store.files import StoreFiles
from embedder.store.layout import MAIN, STORE_FILE, Current, StoreInfo, read_record, swap_record
from embedder.store.publish.current import versions_of
from embedder.store.schema import VECTOR_COLUMNS
from embedder.store.store_info import read_store_info, served_info
from embedder.store.tables.arrow_tensors import is_half, round_vectors
from embedder.store.tables.tables import RecordTable

LOG = logging.getLogger(__name__)

VectorType = Literal["float32", "float16"]
Floats = np.ndarray[Any, np.dtype[np.float32]]

K = 10
MAX_CANDIDATES, MAX_QUERIES, QUERIES_AT_ONCE = 50_000, 2000, 64
NUM_FILES = 32
MAX_LOST_NEIGHBOURS, MAX_LOST_RECALL = 0.005, 0.001
"""Shares that rounding may cost, on the sample: of the ten nearest of a query, and of R@10."""
TIE = 1e-6
"""Difference of scores of unit vectors that says nothing: float32 errs by a few 1e-7, by the order of the rows."""
HALF_SHARE = 0.44
"""Bytes of rounded vectors, compressed, over those of float32 (docs/decisions.md)."""


@dataclass(frozen=True)
class RoundingLoss:
    """What rounding would cost the sample: shares of the ten nearest that lower ones replace, and of R@10."""

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
                f"{100 * self.lost_neighbours:.2f} % of the ten nearest of {self.num_queries:,} queries would be lost"
            )
            return f"{found}, {100 * MAX_LOST_NEIGHBOURS:g} % at most may be"
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


def models_to_round(files: StoreFiles, current: Current, wanted: VectorType | None) -> dict[str, list[str]]:
    """Return the part files whose vectors are to be rounded, by model; empty is the main one.

    Notes their models before anything is rounded: if the caller is killed, the next compaction finds what is left. For
    float32, later runs no longer round; what was rounded stays so. Logs why a model's vectors can't be rounded.
    """
    found = {}
    for model, (view, own) in versions_of(files, current).items() if wanted else ():
        fingerprint = served_info(read_store_info(view), own).model_fingerprint
        is_marked = is_half_store(view, fingerprint)
        if wanted == "float32" and is_marked:
            mark_half(view, None)
            LOG.warning(f"store {files.address}: new vectors are recorded in float32; those that were rounded stay so")
        if wanted == "float32" or own.has_vectors is False:
            continue
        table = RecordTable(view, "embeddings", own.embeddings)
        paths = _unrounded_files(table) if is_marked else table.paths()
        loss = measure_loss(view, own) if paths else None
        if loss is None:
            continue
        if loss.refusal is None:
            found[model] = paths
            mark_half(view, fingerprint)
        else:
            LOG.warning(f'{model or MAIN}: vectors = "float16": those in float32 stay so, as {loss.refusal}')
            if is_marked:
                mark_half(view, None)
    return found


def _unrounded_files(table: RecordTable) -> list[str]:
    """Return the files with vectors that rounding would change: those of a rollback, say. Few are read for that."""

    def is_unrounded(path: str) -> bool:
        split = table.split_columns(path, VECTOR_COLUMNS)
        own = table.read([name for name in VECTOR_COLUMNS if name not in split], [path])
        return any(not is_half(column) and is_half(round_vectors(column)) for column in own.columns)

    paths = table.paths()
    return [path for path, is_found in zip(paths, table.files.each(is_unrounded, paths), strict=True) if is_found]


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
    return _compare((queries, asked), (vectors, rounded), right if has_captions else None)


def _compare(
    queries: tuple[Floats, Floats], vectors: tuple[Floats, Floats], right: "np.ndarray[Any, np.dtype[np.int64]] | None"
) -> RoundingLoss:
    """Compare exact search with the same over rounded values, the second of each pair; `right`: rows to be found."""
    num, k, length = len(queries[0]), min(K, len(vectors[0])), float(np.linalg.norm(vectors[0], axis=1).mean())
    lost, hits = 0, np.zeros(2)
    for start in range(0, num, QUERIES_AT_ONCE):
        part = slice(start, start + QUERIES_AT_ONCE)
        exact, rough = (asked[part] @ own.T for asked, own in zip(queries, vectors, strict=True))
        tie = TIE * length * np.linalg.norm(queries[0][part], axis=1, keepdims=True)
        nearest = np.argpartition(-rough, k - 1, axis=1)[:, :k]
        lost += int((np.take_along_axis(exact, nearest, axis=1) < _last_of(exact, k) - tie).sum())
        if right is not None:
            hits += [
                (np.take_along_axis(scores, right[part, None], axis=1) >= _last_of(scores, k) - tie).sum()
                for scores in (exact, rough)
            ]
    lost_recall = float(hits[0] - hits[1]) / num if right is not None else None
    return RoundingLoss(lost / (num * k), lost_recall, num, in_range=True)


def _last_of(scores: Floats, k: int) -> Floats:
    """Return the k-th highest score of each query: (Q, 1). Scores are compared, as rows that tie are in no order."""
    return np.partition(scores, -k, axis=1)[:, -k, None]


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
        return f"float16, by the first of {plural(len(paths), 'part file')}"
    num_bytes = sum(sizes) / max(first.num_rows, 1) * table.num_rows()
    saved = (1 - HALF_SHARE) * num_bytes
    return f'float32, about {num_bytes / 1e9:.2f} GB; `vectors = "float16"` would save about {saved / 1e9:.2f} GB'
