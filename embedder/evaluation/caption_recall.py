"""How well a store's texts find its own pictures: exact R@k, each item its own only right answer."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.store.arrow_tensors import unpack_vectors
from shards.training.metrics import retrieval_at

KS = (1, 5, 10)

Floats = np.ndarray[Any, np.dtype[np.float32]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class Recall:
    """R@k of some queries over all pictures of a store."""

    queries: str
    num_queries: int
    recall: dict[int, float]


def caption_recall(pictures: pa.Table, name: str = "caption", among: Mask | None = None) -> Recall:
    """R@k with the items' own captions as queries.

    Args:
        pictures: rows of an embeddings table that have a picture.
        name: what these queries are called in reports.
        among: which rows ask; all rows answer. By default those that have a caption.
    """
    asks = pc.is_valid(pictures["text_embedding"]).to_numpy()
    if among is not None:
        asks = asks & among
    return text_recall(pictures, name, unpack_vectors(pictures["text_embedding"].filter(pa.array(asks))), asks)


def text_recall(pictures: pa.Table, name: str, queries: Floats, asks: Mask) -> Recall:
    """R@k with other texts as queries.

    Args:
        pictures: rows of an embeddings table that have a picture.
        name: what these queries are called in reports.
        queries: float32 (Q, E), the texts' vectors.
        asks: bool (rows,), with Q rows true: whose texts they are.
    """
    numbers = np.arange(pictures.num_rows)
    found = retrieval_at(queries, numbers[asks], unpack_vectors(pictures["image_embedding"]), numbers, KS)
    return Recall(name, len(queries), found)
