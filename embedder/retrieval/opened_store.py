"""A store as notebooks and services use it: read it, encode queries, search, look at pictures."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.errors import StoreError
from embedder.retrieval.hits import Hits
from embedder.retrieval.query import QueryEncoder
from embedder.retrieval.search import Searcher
from embedder.run.job import open_model
from embedder.store.binding import published, read_store_info, served_info
from embedder.store.files import StoreFiles
from embedder.store.history import check_readable, find_publication
from embedder.store.layout import Current
from embedder.store.tables import RecordTable

Floats = np.ndarray[Any, np.dtype[np.float32]]


def open_store(uri: str | Path, *, model: str | None = None, version: str | None = None) -> "Store":
    """Open what a store has published.

    Args:
        uri: the store's folder.
        model: model folder to encode queries with, where it has moved; its fingerprint must be the store's.
        version: run id of an earlier publication (`embedder history`), which may have had another model.

    Raises:
        StoreError: there is no store, nothing is published yet, its format is unknown, or that version can't be read
            any more.
    """
    return Store(StoreFiles(uri), model, version)


class Store:
    """One published version of a store; a later publication needs a new `open_store`."""

    def __init__(self, files: StoreFiles, model: str | None = None, version: str | None = None) -> None:
        self.files = files
        self.current: Current = published(files)
        if version is not None and version != self.current.run_id:
            self.current = find_publication(files, version)
            check_readable(files, self.current)
        self.info = served_info(read_store_info(files), self.current)
        self._model = model or self.info.model

    def to_arrow(self, columns: Sequence[str] | None = None) -> pa.Table:
        """The embeddings table, or some of its columns."""
        table = RecordTable(self.files, "embeddings", self.current.embeddings)
        return table.read(list(columns) if columns is not None else None)

    def items(self) -> pa.Table:
        """One row per input item."""
        return RecordTable(self.files, "items", self.current.items).read()

    def rejects(self) -> pa.Table:
        """The items that could not be embedded, or not whole, with the reason."""
        items = self.items()
        return items.filter(pc.equal(items["state"], "rejected"))

    def encode_text(self, texts: Sequence[str]) -> Floats:
        """Texts as vectors of the store's model; float32 (Q, E), L2-normalised."""
        return self.encoder.encode_text(texts)

    def encode_image(self, images: Sequence[str | Path | bytes]) -> Floats:
        """Pictures as vectors of the store's model; float32 (Q, E), L2-normalised."""
        return self.encoder.encode_image(images)

    def search(self, query: str | Floats, k: int = 10) -> Hits:
        """The k pictures and video segments that fit a text or a vector best.

        Args:
            query: a text, or a vector float32 (E,) from `encode_text` or `encode_image`.
            k: how many.

        Returns:
            The hits, best first; a notebook shows them as pictures.
        """
        vector = self.encode_text([query])[0] if isinstance(query, str) else np.asarray(query, np.float32)
        return Hits(self.searcher.search(vector, k))

    @cached_property
    def searcher(self) -> Searcher:
        """Searches this version."""
        return Searcher(self.files, self.current, self.info.model_fingerprint)

    @cached_property
    def encoder(self) -> QueryEncoder:
        """Encodes with the store's model.

        Raises:
            StoreError: the model folder now holds another model.
        """
        model = open_model(self._model)
        if model.fingerprint != self.info.model_fingerprint:
            raise StoreError(
                f"model {model.folder}: its fingerprint is {model.fingerprint}, the store's vectors are of "
                f"{self.info.model_fingerprint}; give the model that made them with --model"
            )
        return QueryEncoder(model)
