"""What an index is tuned and judged with: the archive's captions; where it has none, queries that lie as texts do.

An index that is tuned with the pictures themselves fails the people who search it with texts. Any words the model knows
tell where its texts lie and in which directions they vary (`index.queries.text_like_queries`).
"""

import json
from typing import Any

import numpy as np

from embedder.engine.job import Model, open_model
from embedder.engine.query_encoder import QueryEncoder
from embedder.errors import EmbedderError
from embedder.store.layout import StoreInfo
from embedder.store_index.rows import Floats, IndexRows
from index.queries import CAPTIONS, SAMPLED, TEXT_LIKE, text_like_queries
from shards.errors import ModelError

NUM_WORDS = 512
MIN_LETTERS = 3
MAX_PICTURES = 4000


def recall_queries(rows: IndexRows, info: StoreInfo, *, load_model: bool = True) -> tuple[Floats | None, str]:
    """Find or make queries for the pictures of a version.

    Args:
        rows: the pictures, at least one.
        info: whose vectors those are.
        load_model: where there are no captions, load the model to make queries that lie as its texts do.

    Returns:
        float32 (Q, E), L2-normalised, and what they are. None where there are no captions and the model is not loaded,
        or not to be had: vectors of the table itself have to do then.
    """
    captions = rows.queries()
    if captions is not None:
        return captions, CAPTIONS
    texts = _texts(info) if load_model else None
    if texts is None:
        return None, SAMPLED
    return text_like_queries(_pictures(rows), texts), TEXT_LIKE


def _texts(info: StoreInfo) -> Floats | None:
    """Vectors of words of the model's vocabulary, float32 (T, E); other weights' texts lie elsewhere and are no use."""
    try:
        model = open_model(info.model)
        words = _words(model)
        return QueryEncoder(model).encode_text(words) if model.fingerprint == info.model_fingerprint and words else None
    except (EmbedderError, ModelError):
        return None


def _words(model: Model) -> list[str]:
    """Words of the model's vocabulary, from all parts of it."""
    vocabulary: Any = json.loads(model.tokenizer_json)["model"].get("vocab", [])
    tokens = list(vocabulary) if isinstance(vocabulary, dict) else [piece for piece, _ in vocabulary]
    words = sorted({word for token in tokens if (word := token.strip("▁#Ġ")).isalpha() and len(word) >= MIN_LETTERS})
    return words[:: -(-len(words) // NUM_WORDS)] if words else []


def _pictures(rows: IndexRows) -> Floats:
    chosen = np.unique(np.linspace(0, rows.ids.num_rows - 1, min(MAX_PICTURES, rows.ids.num_rows)).astype(np.int64))
    return np.concatenate(list(rows.vectors_at(chosen)))
