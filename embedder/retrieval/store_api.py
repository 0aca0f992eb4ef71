"""A store as notebooks and services use it: read it, encode queries, search, look at pictures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.compat.locked_property import locked_cached_property
from embedder.engine.job import open_model
from embedder.engine.query_encoder import QueryEncoder
from embedder.errors import ConfigError, StoreError
from embedder.retrieval.hits import Answers, Hits
from embedder.retrieval.options import SearchOptions
from embedder.retrieval.queries import Images, Query, QueryBatch, read_queries
from embedder.retrieval.search import Searcher
from embedder.store.files import StoreFiles
from embedder.store.history import check_readable, find_publication
from embedder.store.layout import Current
from embedder.store.store_info import differing, published, read_store_info, served_info
from embedder.store.tables import RecordTable
from embedder.store_index.versions import has_version

Floats = np.ndarray[Any, np.dtype[np.float32]]


class SearchKeywords(TypedDict, total=False):
    """Options of `Store.search`, for type checkers."""

    where: str | None
    group: bool
    fold: float | None
    hybrid: bool
    min_score: float | None


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
    """One published version of a store; for a later one open it again, or follow it (`embedder.follow_store`)."""

    def __init__(self, files: StoreFiles, model: str | None = None, version: str | None = None) -> None:
        self.files = files
        self.current: Current = published(files)
        if version is not None and version != self.current.run_id:
            self.current = find_publication(files, version)
            check_readable(files, self.current)
            if self.current.index is not None and not has_version(files, self.current.index):
                self.current = self.current.model_copy(update={"index": None})  # vacuumed: its vectors are still there
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

    @overload
    def search(self, query: str, k: int = 10, **options: Unpack[SearchKeywords]) -> Hits: ...
    @overload
    def search(
        self, query: Query | None = None, k: int = 10, *, image: Images | None = None, **options: Unpack[SearchKeywords]
    ) -> Any: ...
    def search(
        self,
        query: Query | None = None,
        k: int = 10,
        *,
        image: Images | None = None,
        where: str | None = None,
        group: bool = True,
        fold: float | None = None,
        hybrid: bool = False,
        min_score: float | None = None,
    ) -> Hits | Answers:
        """The k pictures and videos that fit a text, a picture or a vector best.

        Args:
            query: a text, or a vector float32 (E,) from `encode_text` or `encode_image`; several texts as a list, or
                vectors float32 (Q, E), are searched at once.
            k: how many hits each query gets.
            image: a picture to search with instead: a path or a file's content, or several as a list.
            where: SQL condition over the columns of `to_arrow()` but the vectors, as `"price < 10"`; k hits that
                fulfil it are found wherever k exist.
            group: one hit a video, its best segment, with the others' times in `Hit.segments`; else a hit a segment.
            fold: fold hits under a better one where the cosine of their vectors reaches this, as 0.98.
            hybrid: rank by the words of captions, too; for texts only.
            min_score: least cosine of a hit.

        Returns:
            The hits, best first; of several queries, a list of them. A notebook shows them as pictures.

        Raises:
            ConfigError: an option can't be fulfilled, a query is empty, or a picture can't be read.
            index.RetrievalError: k is below 1, a vector is none of this model, or the index is damaged.
        """
        options = SearchOptions(k=k, where=where, group=group, fold=fold, hybrid=hybrid, min_score=min_score)
        queries = read_queries(query, image)
        if hybrid and queries.kind != "text":
            raise ConfigError(f"hybrid search ranks by words, and a {queries.kind} has none; search with a text")
        answers = self.searcher.search_batch(
            self._vectors(queries),
            options,
            texts=queries.values if queries.kind == "text" else None,
            profile="image" if queries.kind == "picture" else "text",
        )
        for name, hits in zip(queries.names, answers, strict=True):
            hits.query, hits.version = name, self.version
        return answers[0] if queries.is_single else Answers(answers)

    def _vectors(self, queries: QueryBatch) -> Floats:
        """All of some queries as vectors, float32 (Q, E); the model is run once, and not loaded for vectors."""
        if queries.kind == "text":
            return self.encode_text(queries.values)
        if queries.kind == "picture":
            return self.encode_image(queries.values)
        vectors: Floats = queries.values
        return vectors

    @property
    def version(self) -> str:
        """What is open: the run that published it, and its index."""
        return f"{self.current.run_id}/{'exact' if self.current.index is None else f'index {self.current.index}'}"

    def prepare(self, before: "Store | None" = None) -> None:
        """Read what searches need, so that none has to wait for it, or misses what a vacuum deleted.

        Args:
            before: a store whose queries this one takes over: what they made it load is loaded here too, and its model
                shared where that is the same.
        """
        self.searcher.prepare(before.searcher if before is not None else None)
        if before is None or "encoder" not in vars(before):
            return
        if not differing(before.info, self.info):
            vars(self)["encoder"] = before.encoder  # as if it had been made here
        else:
            self.encoder.load_like(before.encoder)

    @locked_cached_property
    def searcher(self) -> Searcher:
        """Searches this version."""
        return Searcher(self.files, self.current, self.info.model_fingerprint)

    @locked_cached_property
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
