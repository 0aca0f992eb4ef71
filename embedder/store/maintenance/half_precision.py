"""Vectors in half precision: what rounding would cost a store, measured on its own vectors, and who rounds.

Delta has no 16-bit float, so the table's type stays `list<float>`: values are rounded and written byte by byte,
compressed, of which two in four are nearly constant (`embedder.storage.vector_pages`). Readers that were tried
are in docs/rollback-and-purge.md.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from embedder.quantities import plural
from embedder.store.files import StoreFiles
from embedder.store.layout import MAIN, STORE_FILE, Current, StoreInfo, read_record, swap_record
from embedder.store.publish.current import versions_of
from embedder.store.schema import VECTOR_COLUMNS
from embedder.store.store_info import read_store_info, served_info
from embedder.store.tables.arrow_tensors import is_half, round_vectors
from embedder.store.tables.tables import RecordTable
from index.vectors import Floats

LOG = logging.getLogger(__name__)

VectorType = Literal["float32", "float16"]

K = 10
BLOCK_ROWS, NUM_FILES = 2048, 32
MIN_QUERIES, MAX_QUERIES, MAX_PRODUCTS = 100, 2000, 1_000_000_000
"""Queries of the gate, and their products with published vectors: beyond the most, fewer queries are asked."""
MAX_LOST_NEIGHBOURS, MAX_LOST_RECALL = 0.005, 0.001
"""Shares that rounding may cost: of the ten nearest of a query, by which the index's recall moves at most; of R@10."""
TIE = 1e-6
"""Difference of scores of unit vectors that says nothing: float32 errs by a few 1e-7, by the order of the rows."""
HALF_SHARE = 0.44
"""Bytes of rounded vectors, compressed, over those of float32 (docs/decisions.md)."""


@dataclass(frozen=True)
class RoundingLoss:
    """What rounding would cost: shares of the ten nearest that lower ones replace, and of R@10.

    An index that stays finds what it has found, so its recall moves by the first share at most.
    """

    lost_neighbours: float
    lost_recall: float | None  # None without captions
    num_queries: int
    in_range: bool  # whether half precision can hold all values

    @property
    def refusal(self) -> str | None:
        """Why the vectors stay in float32; None if they may be rounded."""
        if not self.in_range:
            return "some values are beyond the range of half precision, 65,504"
        if self.lost_neighbours > MAX_LOST_NEIGHBOURS:
            found = (
                f"{100 * self.lost_neighbours:.2f} % of the ten nearest of {self.num_queries:,} queries would be lost, "
                "and of the index's recall as much"
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
            LOG.info(
                f"{model or MAIN}: rounding gives away {100 * loss.lost_neighbours:.2f} % of the ten nearest of "
                f"{loss.num_queries:,} queries, so the index's recall moves by no more"
            )
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
    """Compare exact search over all published vectors with the same over rounded ones; None if there are none."""
    table = RecordTable(files, "embeddings", current.embeddings)
    for column in VECTOR_COLUMNS:
        queries, right = _choose_queries(table, column)
        if len(queries):
            return _compare(_blocks(table, column), queries, right)
    return None


def _compare(blocks: Iterator[Floats], queries: Floats, right: Floats | None) -> RoundingLoss:
    """Compare exact search with the same over rounded values, block by block; `right` has the vectors to be found."""
    num, asked, num_vectors, lengths = len(queries), _round(queries), 0, 0.0
    best, rough_best, exact_of_rough = (np.full((num, K), -np.inf, np.float32) for _ in range(3))
    for vectors in blocks:
        rounded = _round(vectors)
        if not np.isfinite(rounded).all() or not np.isfinite(asked).all():
            return RoundingLoss(1.0, None, num, in_range=False)
        exact, rough = queries @ vectors.T, asked @ rounded.T
        num_vectors, lengths = num_vectors + len(vectors), lengths + float(np.linalg.norm(vectors, axis=1).sum())
        best = np.partition(np.hstack([best, exact]), -K, axis=1)[:, -K:]
        rough, exact = np.hstack([rough_best, rough]), np.hstack([exact_of_rough, exact])
        nearest = np.argpartition(rough, -K, axis=1)[:, -K:]
        rough_best, exact_of_rough = (np.take_along_axis(each, nearest, axis=1) for each in (rough, exact))
    k = min(K, num_vectors)
    tie = TIE * lengths / num_vectors * np.linalg.norm(queries, axis=1)
    least, rough_least = (np.sort(each, axis=1)[:, -k] - tie for each in (best, rough_best))
    lost = int(((exact_of_rough < least[:, None]) & np.isfinite(rough_best)).sum())
    lost_recall = None
    if right is not None:
        is_found = (queries * right).sum(axis=1) >= least
        lost_recall = float(is_found.mean() - ((asked * _round(right)).sum(axis=1) >= rough_least).mean())
    return RoundingLoss(lost / (num * k), lost_recall, num, in_range=True)


def _round(vectors: Floats) -> Floats:
    with np.errstate(over="ignore"):
        return vectors.astype(np.float16).astype(np.float32)


def _blocks(table: RecordTable, column: str) -> Iterator[Floats]:
    for path in table.paths():
        values = table.read_vectors(column, [path]).values
        yield from (values[start : start + BLOCK_ROWS] for start in range(0, len(values), BLOCK_ROWS))


def _choose_queries(table: RecordTable, column: str) -> tuple[Floats, Floats | None]:
    """Return captions from files across the table, with their vectors; only vectors where there are no captions."""
    num = max(MIN_QUERIES, min(MAX_QUERIES, MAX_PRODUCTS // max(table.num_rows(), 1)))
    paths = table.paths()
    paths = paths[:: max(1, -(-len(paths) // NUM_FILES))]  # spread over the table
    share = -(-num // max(len(paths), 1))
    vectors, texts, right = list[Floats](), list[Floats](), list[Floats]()
    for path in paths:
        own, captions = table.read_vectors(column, [path]), table.read_vectors("text_embedding", [path])
        if len(own.values):
            vectors.append(own.values[:share])
            is_pair = own.present & captions.present if column != "text_embedding" else np.zeros_like(own.present)
            texts.append(captions.values[is_pair[captions.present]][:share])
            right.append(own.values[is_pair[own.present]][:share])
    if any(map(len, texts)):
        return np.concatenate([each for each in texts if len(each)])[:num], np.concatenate(right)[:num]
    return (np.concatenate(vectors)[:num] if vectors else np.empty((0, 0), np.float32)), None


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
