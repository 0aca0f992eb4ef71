"""Queries for tuning and judging an index: the store's captions; without any, queries distributed as texts are.

An index tuned with the images themselves has low recall for texts. Any words that the model knows show where its texts
are and in which directions they vary (`index.held_out_queries.text_like_queries`).
"""

from typing import Any

import numpy as np

from embedder.encoders.query_encoder import QueryEncoder
from embedder.errors import EmbedderError
from embedder.models.model_folder import Model, open_model
from embedder.store.layout import StoreInfo
from embedder.store_index.indexed_rows import IndexRows
from index.held_out_queries import CAPTIONS, SAMPLED, TEXT_LIKE, text_like_queries
from index.vectors import Floats
from shards.file_schema import parse_json
from shards.model_errors import ModelError

NUM_WORDS = 512
MIN_LETTERS = 3
MAX_IMAGES = 4000


def recall_queries(rows: IndexRows, info: StoreInfo, *, load_model: bool = True) -> tuple[Floats | None, str]:
    """Return queries for the images of a version, float32 (Q, E), L2-normalised, and their kind.

    `rows` has at least one image. Without captions, `load_model` loads the model to make queries distributed as its
    texts are. Returns None instead if it is not loaded or not found: vectors of the table itself are used then.
    """
    if info.searched == "text":  # captions are the table itself
        return None, SAMPLED
    captions = rows.queries()
    if captions is not None:
        return captions, CAPTIONS
    texts = _texts(info) if load_model else None
    if texts is None:
        return None, SAMPLED
    return text_like_queries(_sample_vectors(rows), texts), TEXT_LIKE


def _texts(info: StoreInfo) -> Floats | None:
    """Return vectors of words in the model's vocabulary, float32 (T, E); other weights place texts elsewhere."""
    try:
        model = open_model(info.model)
        words = _words(model)
        return QueryEncoder(model).encode_text(words) if model.fingerprint == info.model_fingerprint and words else None
    except (EmbedderError, ModelError):
        return None


def _words(model: Model) -> list[str]:
    if model.tokenizer_json is None:  # a model without a text tower is queried only with images
        return []
    try:
        vocabulary: Any = parse_json(model.tokenizer_json)["model"].get("vocab", [])
        tokens = list(vocabulary) if isinstance(vocabulary, dict) else [piece for piece, _ in vocabulary]
    except (ValueError, TypeError, LookupError):  # damaged, which is reported when somebody encodes with it
        return []
    words = sorted({word for token in tokens if (word := token.strip("▁#Ġ")).isalpha() and len(word) >= MIN_LETTERS})
    return words[:: -(-len(words) // NUM_WORDS)] if words else []


def _sample_vectors(rows: IndexRows) -> Floats:
    chosen = np.unique(np.linspace(0, rows.ids.num_rows - 1, min(MAX_IMAGES, rows.ids.num_rows)).astype(np.int64))
    return np.concatenate(list(rows.vectors_at(chosen)))
