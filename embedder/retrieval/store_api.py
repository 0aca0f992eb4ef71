"""Python API of a store, for notebooks and services: read it, encode queries, search."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.compat.locked_property import locked_cached_property
from embedder.errors import (
    ArgumentTypeError,
    ConfigError,
    EmbedderError,
    RunFailedError,
    StoreError,
    check_argument,
)
from embedder.retrieval.hits import Hits, Searchable
from embedder.retrieval.model_columns import ModelColumns
from embedder.retrieval.queries import QueryBatch, SearchOptions
from embedder.retrieval.rerank import RERANK_RULE
from embedder.retrieval.row_files import add_row_files
from embedder.retrieval.snapshot import Snapshot
from embedder.retrieval.snapshot_search import Searcher
from embedder.store.files import StoreFiles
from embedder.store.layout import MAIN, Current, Published, is_model_name, read_current
from embedder.store.lock import LeaseLostError
from embedder.store.publish.history import check_readable, find_publication
from embedder.store.publish.query_towers import find_towers, has_towers
from embedder.store.store_info import differing, read_published, read_store_info, served_info
from embedder.store.tables.models import check_has_vectors, find_model, model_names
from embedder.store.tables.tables import RecordTable
from embedder.store_index.index_versions import has_version
from index.index_errors import RetrievalError
from index.vectors import Floats
from shards.model_errors import ModelError
from shards.model_settings import address_as_recorded, split_address

if TYPE_CHECKING:  # encoders are imported once a text or an image is encoded
    from embedder.encoders.encode_queries import BaseQueryEncoder
    from embedder.encoders.query_encoder import QueryEncoder
    from embedder.encoders.servable_encoder import CodeSources, ServableEncoder
    from embedder.media.given_inputs import GivenImage
    from embedder.models.model_folder import Model
    from embedder.servables.servable import Servable

LOG = logging.getLogger(__name__)


def open_store(
    uri: str | Path,
    *,
    model: str | None = None,
    version: str | None = None,
    servables: "Sequence[Servable | Mapping[str, Any]]" = (),
    allow_store_code: bool = False,
) -> "Store":
    """Open the published snapshot of a store.

    Args:
        uri: folder or address of the store.
        model: name of a further model (`Store.models`), whose vectors are searched; or a model folder to encode queries
            with, if the store's own has moved; its fingerprint must be the store's.
        version: run id of an earlier publication (`embedder history`), which may have had another model.
        servables: your own [[model]] sections, whose code encodes queries of further models: a store is only data.
        allow_store_code: also run code that the store names. Anyone who can write to the store can then do here
            whatever you can.

    Raises:
        StoreError: there is no store, nothing is published yet, its format is unknown, that version can no longer be
            read, or it has no model of that name.
    """
    check_argument("embedder.open_store: uri", uri, (str, Path), "the folder or address of a store")
    return Store(StoreFiles(uri), model, version, code=code_sources(servables, allow_store_code))


def code_sources(
    servables: "Sequence[Servable | Mapping[str, Any]]" = (), allow_store_code: bool = False
) -> "CodeSources | None":
    """Return where code of further models may come from, as `open_store` takes it; None for nowhere."""
    if not (servables or allow_store_code):
        return None
    from embedder.encoders.servable_encoder import CodeSources

    return CodeSources.of(servables, allow_store_code)


class Store(Searchable[Hits]):
    """One published snapshot of a store; for a later one open it again, or follow it (`embedder.follow_store`).

    Attributes:
        files: files of the store; for a further model, the view of its folder.
        publication: versions of all models.
        current: version of the model that is searched.
        info: description of that model.
    """

    def __init__(
        self,
        files: StoreFiles,
        model: str | None = None,
        version: str | None = None,
        publication: Current | None = None,
        code: "CodeSources | None" = None,
    ) -> None:
        """Read what is published; see `open_store`.

        Args:
            files: files of the store.
            model: name of a further model, or a model folder.
            version: run id of an earlier publication.
            publication: a publication that was read before, instead of `version`.
            code: where code of further models is taken from; None for nowhere.
        """
        self._code = code
        self.publication = read_published(files.main) if publication is None else publication
        if version is not None and version != self.publication.run_id:
            self.publication = find_publication(files.main, version)
            check_readable(files.main, self.publication)
        name, self._given_model = _name_and_folder(self.publication, model)
        self.files, self.current = find_model(files, self.publication, name)
        is_earlier = publication is not None or isinstance(self.publication, Published)
        if is_earlier and self.current.index is not None and not has_version(self.files, self.current.index):
            self.current = self.current.model_copy(update={"index": None})  # vacuumed; its vectors still exist
        self.info = served_info(read_store_info(self.files), self.current)

    @property
    def model(self) -> str:
        """Name of the model that is searched; empty for the main one."""
        return self.files.model

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the further models of this publication."""
        return model_names(self.publication)

    def of_model(self, name: str) -> "Store":
        """Open another model of the same publication.

        Args:
            name: one of `models`, or `main` for the main one.

        Raises:
            StoreError: the publication has no such model.
        """
        if name in (self.model, self.model or MAIN):
            return self
        find_model(self.files, self.publication, name)
        return Store(self.files.main, name or MAIN, publication=self.publication, code=self._code)

    def to_arrow(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Read the embeddings table, or some of `columns`.

        Columns of other models follow as NAME.COLUMN, null if a model has no such row. Vectors without such a prefix
        are those of the model that is searched.

        Raises:
            ConfigError: there is no such column.
            ArgumentTypeError: the columns are no list of names.
        """
        return self._columns.read(None if columns is None else self._known_columns(columns))

    def _known_columns(self, columns: Sequence[str]) -> list[str]:
        if isinstance(columns, str) or not isinstance(columns, Iterable):
            expected = 'a list of names, as ["item_id", "caption"]'
            raise ArgumentTypeError(f"to_arrow: columns: found {type(columns).__name__}; give {expected}")
        names, known = list(columns), self.columns
        unknown = [name for name in names if name not in known] if known else []  # none where nothing was written
        if unknown:
            raise ConfigError(f"to_arrow: there is no column {unknown[0]!r}; columns are {', '.join(known)}")
        return names

    @property
    def columns(self) -> list[str]:
        """Columns of `to_arrow`, including those of other models."""
        return [*self._columns.own, *self._columns.joined]

    @locked_cached_property
    def _columns(self) -> ModelColumns:
        return ModelColumns(self.files.main, self.publication, self.model)

    def items(self) -> pa.Table:
        """Read the items table: one row for each input item, as the model that is searched embedded it."""
        return RecordTable(self.files, "items", self.current.items).read()

    def rejects(self) -> pa.Table:
        """Read the items that could not be embedded, or only in part, with the reason."""
        items = self.items()
        return items.filter(pc.equal(items["state"], "rejected"))

    def encode_text(self, texts: Sequence[str], instruction: str | None = None) -> Floats:
        """Encode texts with the store's model; float32 (Q, E), L2-normalised.

        `instruction` is as in `SearchOptions`.
        """
        return self.encoder.encode_text(texts, instruction)

    def encode_image(self, images: "Sequence[GivenImage]") -> Floats:
        """Encode images with the store's model: paths, file contents, Pillow images, arrays uint8 (H, W, 3).

        Returns:
            float32 (Q, E), L2-normalised.
        """
        return self.encoder.encode_image(images)

    def _answer(self, queries: QueryBatch, options: SearchOptions) -> list[Hits]:
        if options.rerank:
            raise ConfigError(RERANK_RULE)
        if queries.is_combined:
            vectors, away = self._combine(queries, options)
        else:
            vectors, away = self._vectors(queries, options.instruction), None
        answers = self.searcher.search_batch(
            vectors,
            options,
            texts=queries.values if queries.kind == "text" else None,
            profile="image" if queries.kind == "image" else "text",
            away=[away] * len(vectors),
        )
        if queries.kind == "text" and not queries.is_combined and self.info.searched == "image":
            for hits in answers:
                hits[:] = [replace(hit, probability=self.encoder.probability(hit.score)) for hit in hits]
        for parts, hits in zip(queries.parts, answers, strict=True):
            hits.version = self.version
            hits.carried = self.searcher.snapshot.metadata.carried
            for hit in hits:
                vars(hit)["files"] = self.searcher.snapshot.embedded_files
            texts = [*([] if parts.text is None else [parts.text]), *parts.away.texts]
            lines = [self.encoder.warning(text, options.instruction) for text in texts]
            hits.warnings = [line for line in lines if line is not None]
        return answers

    def _vectors(self, queries: QueryBatch, instruction: str | None) -> Floats:
        """Return the vectors of queries, float32 (Q, E); the model runs once, and is not loaded for vectors."""
        if queries.kind == "text":
            return self.encode_text(queries.values, instruction)
        if queries.kind == "image":
            return self.encode_image(queries.values)
        vectors: Floats = queries.values
        return vectors

    def _combine(self, queries: QueryBatch, options: SearchOptions) -> tuple[Floats, Floats | None]:
        """Return the vectors of queries with several parts, float32 (Q, E), and of the negative examples, (N, E)."""
        wanted = [(1.0, self._vectors(queries, options.instruction))]
        if queries.images is not None:
            once = list(dict.fromkeys(queries.images))  # one image may go with many texts
            images = self.encode_image(once)[[once.index(image) for image in queries.images]]
            wanted = [(options.text_weight, wanted[0][1]), (1 - options.text_weight, images)]
        examples = [
            *([self.encode_text(queries.away.texts, options.instruction)] if queries.away.texts else []),
            *([self.encode_image(queries.away.images)] if queries.away.images else []),
        ]
        away = np.concatenate(examples) if examples else None
        return self.searcher.combine(wanted, away, options), away

    @property
    def version(self) -> str:
        """Name of the snapshot: the run that published it, its model if it is a further one, and its index."""
        index = "exact" if self.current.index is None else f"index {self.current.index}"
        return f"{self.publication.run_id}/{f'{self.model} ' if self.model else ''}{index}"

    def find_damage(self, timeout_s: float = 0.0) -> RetrievalError | None:
        """Check the whole hashes of what is mapped, on its own thread; return the error that it has found so far.

        Args:
            timeout_s: seconds to wait for its end; 0 leaves it to begin some seconds after the store was opened.
        """
        check = self.searcher.snapshot.check
        if check is None:
            return None
        if timeout_s > 0:
            check.wait(timeout_s)
        return check.problem

    def prepare(self, before: "Store | None" = None) -> None:
        """Load all that searches need, so that none waits for it, or misses files that a vacuum deleted.

        Args:
            before: a store that this one replaces: the parts that it has loaded are loaded here too, and its model is
                shared if it is the same.
        """
        self.searcher.snapshot.prepare(before.searcher.snapshot if before is not None else None)
        if before is None or "encoder" not in vars(before):
            return
        is_asked_alike = split_address(before.info.model)[1] == split_address(self.info.model)[1]
        if is_asked_alike and not differing(before.info, self.info):
            vars(self)["encoder"] = before.encoder  # as if it had been created here
        else:
            self.encoder.load_like(before.encoder)

    @locked_cached_property
    def searcher(self) -> Searcher:
        """Searcher of this snapshot.

        Raises:
            StoreError: the model has no vectors.
        """
        check_has_vectors(self.files, self.current)
        return Searcher(Snapshot(self.files, self.current, self.info, self._columns))

    @locked_cached_property
    def encoder(self) -> "BaseQueryEncoder | ServableEncoder":
        """Encoder with the store's model: its query towers, or the model folder and torch if it has none.

        For a further model without towers, the servable encodes what it accepts.

        Raises:
            StoreError: the model folder now holds another model, or the store names code that is not allowed.
            ServableError: a further model's file is missing, or of another framework.
        """
        if self.model:
            from embedder.encoders.servable_encoder import DATA_ALONE, open_servable_encoder

            return self._query_towers() or open_servable_encoder(self.info, self.model, self._code or DATA_ALONE)
        if self._given_model is not None:
            from embedder.encoders.query_encoder import QueryEncoder
            from embedder.encoders.query_tower_export import preprocessing_of

            model = self._open_model()
            if preprocessing_of(model, self.info) != self.info.preprocess_fingerprint:
                return QueryEncoder(model, self.info.colour)
        return self._query_towers() or self._torch_encoder()

    def _query_towers(self) -> "BaseQueryEncoder | None":
        """Return the encoder of the store's query towers; None, with a log line, if there are none that can be used."""
        if self.model and not has_towers(self.files, self.info):  # only towers have query encoders in the store
            return None
        if find_spec("onnxruntime") is None:
            LOG.info(f"store {self.files.address}: onnxruntime isn't installed, so torch encodes queries")
            return None
        towers = find_towers(self.files, self.info)
        if towers is None:
            LOG.info(
                f"store {self.files.address}: it has no query towers, so torch encodes queries; "
                f"`embedder export-query-towers {self.files.option}` writes them"
            )
            return None
        from embedder.encoders.onnx_encoder import OnnxQueryEncoder

        try:
            return OnnxQueryEncoder(towers, self._model_address, self._torch_encoder)
        except (StoreError, ModelError) as error:
            LOG.warning(f"store {self.files.address}: torch encodes queries, its query towers can't be used: {error}")
            return None

    def _torch_encoder(self) -> "QueryEncoder":
        from embedder.encoders.query_encoder import QueryEncoder
        from embedder.encoders.servable_encoder import open_towers

        return open_towers(self.info, self.model) if self.model else QueryEncoder(self._open_model(), self.info.colour)

    @property
    def _model_address(self) -> str:
        return address_as_recorded(self._given_model, self.info.model)

    def _open_model(self) -> "Model":
        from embedder.models.model_folder import open_model

        model = open_model(self._model_address)
        if model.fingerprint != self.info.model_fingerprint:
            raise StoreError(
                f"model {model.folder}: its fingerprint is {model.fingerprint}, the store's vectors are of "
                f"{self.info.model_fingerprint}; give the model that made them with --model"
            )
        return model


def keep_row_files(files: StoreFiles) -> None:
    """Write the row files of what is published, for each model with an index, unless they are there.

    The caller holds the write lock. Searches make their own if it fails, so that only leaves a line in the log.
    """
    current = read_current(files)
    for name in () if current is None else ("", *current.models):
        try:
            store = Store(files.main, name or MAIN, publication=current)
            if store.current.index is None or store.current.has_vectors is False:
                continue
            snapshot = store.searcher.snapshot
            if snapshot.has_row_files:
                add_row_files(snapshot.files, snapshot.row_files_path, snapshot.write_row_files)
        except LeaseLostError:
            raise
        except (EmbedderError, RunFailedError, RetrievalError, OSError, pa.ArrowException) as error:
            LOG.warning(f"store {files.address}: searches make their own row files, as none could be written: {error}")


def _name_and_folder(publication: Current, model: str | None) -> tuple[str, str | None]:
    """Distinguish a model's name from a model folder; what can only be a name is one, known or not."""
    if model is None:
        return "", None
    is_name = model == MAIN or model in publication.models or (is_model_name(model) and not Path(model).exists())
    return (model, None) if is_name else ("", model)
