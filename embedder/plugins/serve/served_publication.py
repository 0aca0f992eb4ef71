"""One publication as requests see it, and what is kept of it until another replaces it."""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from embedder.compat.locked_property import locked_cached_property
from embedder.errors import USER_MISTAKES, CodeNotAllowedError, ConfigError
from embedder.media.sandbox import SandboxedDecoder
from embedder.medium_columns import BY_NAME
from embedder.plugins.serve.serve_errors import STORE_RETRY_S, RequestError
from embedder.redaction import mask
from embedder.retrieval.ranking import RowNumbers
from embedder.retrieval.row_metadata import EmbeddedFiles, IdRows
from embedder.retrieval.store_api import Store
from embedder.storage.printable import readable
from embedder.store.layout import MAIN
from embedder.store.tables.tables import RecordTable
from index.vectors import Floats, Rows

LOG = logging.getLogger(__name__)

WARM_UP_TEXT = "a photo"
NOT_TRIED = "no text was encoded yet"
LONG_TRY_S = 1.0
REST = 10  # after a long attempt to encode a text, none is made for this many times as long
HIDDEN = ("uri",)  # unless the server shows them
_SERIALS = itertools.count()


class ServedPublication:
    """One publication as requests see it; what is read of it is kept until another replaces it.

    `serial` numbers this opening, as a purge changes what an earlier publication of the same name holds. `hidden`
    columns are neither described nor read by conditions: a path could be guessed letter by letter. Facets are kept by
    condition, duplicates by condition and cosine. `encodes_texts` says whether a text was encoded since the last
    failure.
    """

    def __init__(
        self,
        store: Store,
        *,
        is_current: bool,
        show_uris: bool,
        latest: "Callable[[], ServedPublication] | None" = None,
    ) -> None:
        self.store, self.version, self.is_current = store, store.version, is_current
        self._latest = latest
        places = [name for name in store.publication.medium_columns if BY_NAME[name].group == "gps"]
        self.hidden = () if show_uris else (*HIDDEN, *places)
        self.serial = next(_SERIALS)
        self.run_id, self.model = store.publication.run_id, store.info.model_fingerprint
        self.facets: dict[str | None, bytes] = {}
        self.orders: dict[tuple[str, int], RowNumbers] = {}
        self.duplicates: dict[tuple[str | None, float], list[Rows] | None] = {}
        self._show_uris, self._further = show_uris, dict[str, ServedPublication]()
        self._opening, self._trying = threading.Lock(), threading.Lock()
        self.encodes_texts, self._text_problem, self._next_try_s = False, NOT_TRIED, 0.0

    def find_open(self, model: str | None) -> "ServedPublication | None":
        """Return the publication for a model if it is open; the main model's (None or `main`) always is."""
        return self if model in (None, "", MAIN) else self._further.get(model or "")

    def of_model(self, model: str) -> "ServedPublication":
        """Open a further model of the publication, once; RequestError if it doesn't exist or has no vectors."""
        with self._opening:
            if model not in self._further:
                self._further[model] = self._open_model(model)
            return self._further[model]

    def _open_model(self, model: str) -> "ServedPublication":
        where, own = "body.model", self.store.publication.models.get(model)
        names = [name for name, each in sorted(self.store.publication.models.items()) if each.has_vectors is not False]
        rule = f"one of {', '.join([MAIN, *names])}"
        if own is None:
            raise RequestError(404, where, f"no model {model!r}", rule, "choose one of `models` of /status")
        if own.has_vectors is False:
            cure = f"search another one, with conditions over {model}'s columns"
            raise RequestError(422, where, f"{model} has no vectors", rule, cure)
        store = self.store.of_model(model)
        store.prepare()
        return ServedPublication(store, is_current=self.is_current, show_uris=self._show_uris, latest=self._latest)

    @property
    def opened_models(self) -> list[str]:
        """Names of the further models that are open."""
        return list(self._further)

    def has_condition(self, where: str) -> bool:
        """Whether a condition was evaluated already."""
        metadata = self.store.searcher.snapshot.metadata
        return "filter" in vars(metadata) and metadata.filter.has_mask(where)

    def remember_condition(self, where: str, timeout_s: float) -> None:
        """Evaluate an untrusted condition, whose result later searches find.

        Raises `ConfigError` if it is no condition over the columns, does more than that, or takes too long.
        """
        self.store.searcher.snapshot.metadata.filter.remember(where, timeout_s, self.hidden)

    @property
    def files(self) -> EmbeddedFiles:
        """What its items' files must match."""
        return self.store.searcher.snapshot.embedded_files

    @property
    def encoder(self) -> str | None:
        """Kind of the encoder of queries; None until one was needed."""
        encoder = vars(self.store).get("encoder")
        return None if encoder is None else str(getattr(encoder, "kind", "torch"))

    @property
    def instruction(self) -> str | None:
        """Instruction of queries that give none; None if the model takes none, or its encoder was not needed yet."""
        return None if self.encoder is None else self.store.encoder.instruction

    def encode_texts(self, texts: Sequence[str], instruction: str | None = None) -> Floats:
        """Encode texts; float32 (Q, E), L2-normalised.

        Raises `ConfigError` if a text can't be encoded, the model has no text tower, or it takes no instruction;
        `CodeNotAllowedError` if the encoder of a further model may not run; `RequestError` if no text can be encoded,
        as the encoder can't be loaded.
        """
        try:
            _ = self.store.encoder
        except CodeNotAllowedError:
            raise
        except Exception as error:  # noqa: BLE001  # whatever it lacks
            raise self.no_texts(error) from None
        try:
            if instruction is not None and self.store.encoder.instruction is None:
                raise ConfigError("instruction: the model of this store takes none; leave it out")
            vectors = self.store.encode_text(texts, instruction)
        except ConfigError as error:
            raise self._without_places(error) from None
        except (*USER_MISTAKES, ImportError) as error:  # of a tower, or of torch, which is loaded with the first text
            raise self.no_texts(error) from None
        self.encodes_texts = True
        return vectors

    def encode_image(self, content: bytes, decoder: SandboxedDecoder) -> Floats:
        """Encode an image file; float32 (E,), L2-normalised.

        Raises `ConfigError` if it can't be decoded, or the model has no vision tower; `CodeNotAllowedError` if the
        encoder of a further model may not run; `RequestError` if it can't be loaded; OSError of the model's files.
        """
        try:
            vector: Floats = self.store.encoder.encode_image([content], decoder)[0]
        except CodeNotAllowedError:
            raise
        except ConfigError as error:
            raise self._without_places(error) from None
        except USER_MISTAKES as error:
            raise _refuse_encoding("image", error) from None
        return vector

    def _without_places(self, error: ConfigError) -> ConfigError:
        """Return the error without the place of the model, which the server may not show."""
        encoder, text = vars(self.store).get("encoder"), str(error)
        places = [self.store.info.model, (self.store.info.servable or {}).get("uri")]
        for place in [*places, getattr(getattr(encoder, "model", None), "uri", None)]:
            if place is not None and "/" in place:
                text = text.replace(place, "of the store")
        return ConfigError(text)

    def no_texts(self, error: Exception) -> RequestError:
        """Note that a text couldn't be encoded, so that the next probe tries; return the refusal of the request."""
        refusal = _refuse_encoding("text", error)
        self.encodes_texts, self._text_problem = False, refusal.what
        return refusal

    def text_problem(self) -> str | None:
        """Return the reason why no text can be encoded, in one sentence; None if one can be, or there is no text tower.

        It encodes a text to find out, unless that has worked since the last failure; if it takes long, not every time.
        """
        if self.encodes_texts or not self._trying.acquire(blocking=False):
            return None if self.encodes_texts else self._text_problem
        try:
            if (began_s := time.monotonic()) >= self._next_try_s:
                self._try_text()
                took_s = (ended_s := time.monotonic()) - began_s
                self._next_try_s = ended_s + (REST * took_s if took_s > LONG_TRY_S else 0)
        finally:
            self._trying.release()
        return None if self.encodes_texts else self._text_problem

    def _try_text(self) -> None:
        try:
            self.encode_texts([WARM_UP_TEXT])
        except RequestError:
            pass
        except ConfigError:  # it has no text tower, and nobody expects one
            self.encodes_texts = True
        except Exception as error:  # noqa: BLE001  # reported, whatever it is
            self.no_texts(error)

    @property
    def index_recall(self) -> float:
        """Recall@10 of its index, measured when it was built; 1 if search is exact."""
        manifest = getattr(self.store.searcher.snapshot.vectors, "manifest", None)
        return 1.0 if manifest is None else float(manifest.recall_at_10)

    def rows_of(self, item_id: str) -> Rows:
        """Rows of an item in the embeddings table without vectors (`Snapshot.metadata`)."""
        return self.store.searcher.snapshot.metadata.ids.rows(item_id)

    def has_picture(self, item_id: str) -> bool:
        """Whether there is a vector of its image or video, not only of its caption."""
        return bool((self.store.searcher.snapshot.vector_rows[self.rows_of(item_id)] >= 0).any())

    def changed_since(self, item_id: str) -> str | None:
        """What became of an item since this publication: `changed`, `removed`, or None if it is unchanged."""
        if self.is_current or self._latest is None:
            return None
        latest = self._latest()
        now, then = (_contents(each, item_id) for each in (latest, self))
        return None if now & then else "changed" if now else "removed"

    def item_row(self, item_id: str) -> dict[str, Any] | None:
        """Row of an item in the items table; None if there is no such item."""
        table, ids = self._items
        rows = ids.rows(item_id)
        return table.slice(int(rows[0]), 1).to_pylist()[0] if len(rows) else None

    def segment_row(self, item_id: str, segment: int | None) -> int:
        """Row of an item's segment, or of its first one; RequestError if there is no such item or segment."""
        rows = self.rows_of(item_id)
        segments = self.store.searcher.snapshot.metadata.take(rows, ["segment"])["segment"].to_pylist()
        if not segments:
            raise no_item(item_id, self.version)
        wanted = min(segments) if segment is None else segment
        if wanted not in segments:
            raise RequestError(
                404,
                "query.segment",
                f"{wanted}",
                f"a segment of the item, up to {max(segments)}",
                "ask /items/{id} for its segments",
            )
        return int(rows[segments.index(wanted)])

    def vector_of(self, item_id: str, segment: int | None) -> Floats:
        """Vector of an item's segment, float32 (E,), of unit norm; RequestError if there is none that is searched."""
        snapshot = self.store.searcher.snapshot
        row = snapshot.vector_rows[[self.segment_row(item_id, segment)]].astype(np.int64)
        if row[0] < 0:
            raise RequestError(
                422, "item", f"{item_id!r} has no vector", "an item with an image", "search with another item"
            )
        vector = snapshot.vectors.vectors(row)[0]
        unit: Floats = vector / np.linalg.norm(vector)  # an index that rounds gives norms of about 1
        return unit

    @property
    def dim(self) -> int | None:
        """Width of the vectors; None if there are none."""
        vectors = self.store.searcher.snapshot.vectors
        return vectors.dim if len(vectors) else None

    @locked_cached_property
    def num_items(self) -> int:
        """Number of input items, rejected ones included."""
        return RecordTable(self.store.files, "items", self.store.current.items).num_rows()

    @locked_cached_property
    def file_columns(self) -> pa.Table:
        """Columns of its rows' files, except their names; texts are dictionary-encoded."""
        row_filter = self.store.searcher.snapshot.metadata.filter
        table = row_filter.read([name for name in row_filter.computed if name != "file_name"])
        for number, name in enumerate(table.column_names):
            if pa.types.is_string(table[name].type):
                table = table.set_column(number, name, table[name].dictionary_encode())
        return table.combine_chunks()

    @locked_cached_property
    def item_numbers(self) -> RowNumbers:
        """Number of the item of each row."""
        numbers = self.store.searcher.snapshot.metadata.rows["item_id"].dictionary_encode().combine_chunks()
        whole = numbers.combine_chunks() if isinstance(numbers, pa.ChunkedArray) else numbers
        found: RowNumbers = whole.indices.to_numpy()
        return found

    @locked_cached_property
    def rejects(self) -> pa.Table:
        """Rows of the items that could not be embedded, or not whole, by their ids."""
        return self.store.rejects().sort_by("item_id").combine_chunks()

    @locked_cached_property
    def _items(self) -> tuple[pa.Table, IdRows]:
        table = self.store.items().combine_chunks()
        return table, IdRows(table["item_id"])


def _contents(publication: ServedPublication, item_id: str) -> set[str | None]:
    """Versions of an item's content, picture and caption together."""
    rows = publication.store.searcher.snapshot.metadata.take(publication.rows_of(item_id))
    has_versions = "content_version" in rows.column_names
    return set(rows["content_version"].to_pylist()) if has_versions else set(rows["item_id"].to_pylist())


def error_without_place(row: dict[str, Any]) -> str | None:
    """Error of an item, without its file's place, which the server may not show.

    The row needs the columns `item_id`, `uri` and `error` of the items table.
    """
    error: str | None = row["error"]
    for place in {row["uri"], readable(row["uri"] or "")} - {None, ""}:
        error = error and error.removeprefix(f"{place}: ").replace(place, row["item_id"])
    return error


def no_item(item_id: str, version: str) -> RequestError:
    """Refuse an id that the publication lacks."""
    return RequestError(
        404, "item", f"no item {item_id!r} in {version}", "the id of an item of the store", "take ids from answers"
    )


def _refuse_encoding(kind: str, error: Exception) -> RequestError:
    """Refuse a text or an image, as the encoder fails; the reason may name places, so it goes only to the log."""
    LOG.warning(f"{kind}s can't be encoded: {mask(str(error) or type(error).__name__)}")
    return RequestError(
        503,
        "query",
        f"no {kind} can be encoded, as the model's query encoder fails ({type(error).__name__})",
        "a store with query towers, or a model folder that can be read",
        "search by vectors or items meanwhile, and tell the operator: the log has the reason",
        retry_after=str(STORE_RETRY_S),
    )
