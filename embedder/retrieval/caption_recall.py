"""Exact R@k of a store's texts over its own images; the only right answer to a text is its own item."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.retrieval.rank_metrics import retrieval_at
from embedder.store.tables.arrow_tensors import unpack_vectors
from index.vectors import Floats, Mask

KS = (1, 5, 10)


@dataclass(frozen=True)
class Recall:
    """R@k of some queries over all images of a store."""

    queries: str
    num_queries: int
    recall: dict[int, float]


def caption_recall(rows: pa.Table, name: str = "caption", among: Mask | None = None) -> Recall:
    """Compute R@k with the items' own captions as queries, over all `rows`, each of which must have an image.

    `among` (bool (rows,)) selects the rows whose captions are queries; None means all that have a caption.
    """
    is_query = pc.is_valid(rows["text_embedding"]).to_numpy()
    if among is not None:
        is_query = is_query & among
    return text_recall(rows, name, unpack_vectors(rows["text_embedding"].filter(pa.array(is_query))), is_query)


def text_recall(rows: pa.Table, name: str, queries: Floats, is_query: Mask) -> Recall:
    """Compute R@k with other texts as queries over `rows`, each of which must have an image.

    `queries` is float32 (Q, E). `is_query` is bool (rows,) with Q rows true: the items that the texts belong to.
    """
    numbers = np.arange(rows.num_rows)
    found = retrieval_at(queries, numbers[is_query], unpack_vectors(rows["image_embedding"]), numbers, KS)
    return Recall(name, len(queries), found)
