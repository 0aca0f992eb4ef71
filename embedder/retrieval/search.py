"""Search over what a store has published: through its index, or exactly where it has none."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.retrieval.index_store import open_version
from embedder.retrieval.indexing import pictures
from embedder.steps.tensors import unpack_vectors
from embedder.store.files import StoreFiles
from embedder.store.layout import Current
from embedder.store.schema import EMBEDDINGS
from embedder.store.tables import RecordTable

if TYPE_CHECKING:
    from index.search import Index

Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Hit:
    """One picture or video segment that was found."""

    score: float
    item_id: str
    segment: int
    modality: str
    uri: str
    start_s: float | None
    end_s: float | None
    caption: str | None
    carryover: dict[str, Any]

    @property
    def middle_s(self) -> float | None:
        """Middle of a video's segment, in seconds from its start; none for a picture."""
        return None if self.start_s is None or self.end_s is None else (self.start_s + self.end_s) / 2


class Searcher:
    """Searches one published version; what it reads stays in memory for the next query."""

    def __init__(self, files: StoreFiles, current: Current, model_fingerprint: str) -> None:
        self.files, self.current, self.model_fingerprint = files, current, model_fingerprint

    def search(self, vector: Floats, k: int) -> list[Hit]:
        """The k pictures and video segments nearest to a vector, best first; fewer where there are fewer.

        Args:
            vector: float32 (E,), L2-normalised, of the store's model.
            k: at least 1.

        Raises:
            index.RetrievalError: k is below 1, or the index is damaged or of another model.
        """
        scores, keys = self._through_index(vector, k) if self._index is not None else self._exact(vector, k)
        rows = self._rows(keys)
        return [_hit(score, row) for score, row in zip(scores, rows, strict=True)]

    @cached_property
    def _index(self) -> "Index | None":
        if self.current.index is None:
            return None
        return open_version(self.files, self.current.index, self.model_fingerprint)

    def _through_index(self, vector: Floats, k: int) -> tuple[list[float], pa.Table]:
        index = self._index
        if index is None:
            raise RuntimeError("asked for an index that is not there")
        hits = index.search(vector[None], k)
        return hits.scores[0].tolist(), index.ids.take(pa.array(hits.rows[0]))

    def _exact(self, vector: Floats, k: int) -> tuple[list[float], pa.Table]:
        """Compare with every vector; as right as can be, and fast enough for some hundred thousand."""
        table = self._pictures
        if table.num_rows == 0:
            return [], table
        scores = unpack_vectors(table["image_embedding"]) @ vector
        best = np.argsort(-scores, kind="stable")[:k]
        return scores[best].tolist(), table.select(["item_id", "segment"]).take(pa.array(best))

    @cached_property
    def _pictures(self) -> pa.Table:
        return pictures(self._table.read(["item_id", "segment", "image_embedding"])).combine_chunks()

    @cached_property
    def _table(self) -> RecordTable:
        return RecordTable(self.files, "embeddings", self.current.embeddings)

    @cached_property
    def _descriptions(self) -> pa.Table:
        """All columns but the vectors."""
        schema = self._table.schema
        names = schema.names if schema is not None else []
        return self._table.read([name for name in names if not name.endswith("_embedding")])

    def _rows(self, keys: pa.Table) -> list[dict[str, Any]]:
        """The table's rows for some (item_id, segment), in the order of the keys."""
        near = self._descriptions.filter(
            pc.is_in(self._descriptions["item_id"], value_set=keys["item_id"].combine_chunks())
        )
        by_key = {(row["item_id"], row["segment"]): row for row in near.to_pylist()}
        return [by_key[key["item_id"], key["segment"]] for key in keys.select(["item_id", "segment"]).to_pylist()]


def _hit(score: float, row: dict[str, Any]) -> Hit:
    own = ("item_id", "segment", "modality", "uri", "start_s", "end_s", "caption")
    carried = {name: value for name, value in row.items() if name not in EMBEDDINGS.names}
    return Hit(score=score, carryover=carried, **{name: row[name] for name in own})
