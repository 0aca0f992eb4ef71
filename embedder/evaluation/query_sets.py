"""What is asked, and which items are right: the store's own captions, or a file of queries."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.errors import ConfigError, StoreError
from embedder.retrieval.store_api import Store
from embedder.store.arrow_tensors import unpack_vectors
from embedder.store.hash_sample import SampledPart, lowest_keys, published_pieces
from embedder.store.tables import RecordTable

Floats = np.ndarray[Any, np.dtype[np.float32]]
Ints = np.ndarray[Any, np.dtype[np.int64]]

OWN_CAPTIONS = "captions of the store"
NO_GROUP = "(none)"


@dataclass(frozen=True)
class QuerySet:
    """Q queries and R right answers.

    Attributes:
        source: what they are, for reports.
        texts: the queries, each once.
        vectors: float32 (Q, E), L2-normalised.
        queries: int64 (R,), the query of each answer.
        item_ids: R ids, the item that is right for it.
        groups: R names, the group that the answer puts its query in; none where nobody asked for groups.
    """

    source: str
    texts: list[str]
    vectors: Floats
    queries: Ints
    item_ids: list[str]
    groups: list[str] | None = None


def own_captions(store: Store, num_queries: int, group: str | None = None) -> QuerySet:
    """The captions of the store's own pictures; identical ones are one query, for which any of their pictures is right.

    Of more than `num_queries` those with the lowest hashes are taken: the same every night, but for what is new.

    Raises:
        ConfigError: the table has no such column to group by.
        StoreError: no picture has a caption.
    """
    pieces = list(published_pieces(store.files, store.current.embeddings))
    if group is not None:
        check_group(group, table_columns(store))
    places = lowest_keys((_captions(piece) for piece in pieces), num_queries)
    if not places:
        raise StoreError(
            f"store {store.files.address}: no picture in it has a caption to ask with; give --queries FILE with the "
            "columns query and item_id"
        )
    numbers = {text: number for number, text in enumerate(places)}
    collected = _Answers(numbers)
    for place in sorted(set().union(*places.values())):
        collected.add(pieces[place], group)
    vectors = np.stack([collected.vectors[number] for number in range(len(numbers))])
    return QuerySet(OWN_CAPTIONS, list(numbers), vectors, *collected.columns(), collected.groups(group))


def group_names(values: Sequence[Any]) -> list[str]:
    """Values of any column as names of groups."""
    return [NO_GROUP if value is None or value == "" else str(value) for value in values]


def item_groups(store: Store, item_ids: list[str], group: str) -> list[str]:
    """The group of each item, from a column of the embeddings table; of a clip, its first segment's."""
    rows = store.to_arrow(["item_id", group])
    rows = rows.filter(pc.is_in(rows["item_id"], value_set=pa.array(item_ids, pa.string())))
    by_id = dict(zip(reversed(rows["item_id"].to_pylist()), reversed(rows[group].to_pylist()), strict=True))
    return group_names([by_id.get(item_id) for item_id in item_ids])


def check_group(group: str, columns: list[str]) -> None:
    """Refuse to group by what is no column, or holds vectors.

    Raises:
        ConfigError: there is no such column.
    """
    fit = [name for name in columns if not name.endswith("_embedding")]
    if group not in fit:
        raise ConfigError(f"--group {group}: there is no such column; group by one of {', '.join(fit)}")


def table_columns(store: Store) -> list[str]:
    """The columns of the embeddings table."""
    schema = RecordTable(store.files, "embeddings", store.current.embeddings).schema
    return [] if schema is None else list(schema.names)


def _captions(piece: SampledPart) -> Iterator[str]:
    """Captions of one part file's pictures."""
    rows = _asking(piece.read(["caption", "image_embedding", "text_embedding"]))
    return iter(rows["caption"].to_pylist())


def _asking(rows: pa.Table) -> pa.Table:
    """Rows whose caption can ask and whose picture can answer."""
    names = ("caption", "image_embedding", "text_embedding")
    for name in names:
        rows = rows.filter(pc.is_valid(rows[name]))
    return rows


class _Answers:
    """Collects the right items of the chosen captions, and one vector of each."""

    def __init__(self, numbers: dict[str, int]) -> None:
        self._numbers = numbers
        self._wanted = pa.array(list(numbers), pa.string())
        self._found: dict[tuple[int, str], Any] = {}
        self.vectors: dict[int, Floats] = {}

    def add(self, piece: SampledPart, group: str | None) -> None:
        """Take what one part file has of them."""
        columns = ["item_id", "caption", "image_embedding", "text_embedding"]
        rows = _asking(piece.read([*columns, *([group] if group and group not in columns else [])]))
        rows = rows.filter(pc.is_in(rows["caption"], value_set=self._wanted))
        values = rows[group].to_pylist() if group else [None] * rows.num_rows
        texts, ids = rows["caption"].to_pylist(), rows["item_id"].to_pylist()
        for text, item_id, value, vector in zip(
            texts, ids, values, unpack_vectors(rows["text_embedding"]), strict=True
        ):
            number = self._numbers[text]
            self.vectors.setdefault(number, vector)
            self._found.setdefault((number, item_id), value)

    def columns(self) -> tuple[Ints, list[str]]:
        """Queries and item ids of the answers."""
        return np.array([number for number, _ in self._found], np.int64), [item_id for _, item_id in self._found]

    def groups(self, group: str | None) -> list[str] | None:
        """Groups of the answers, where they are asked for."""
        return None if group is None else group_names(list(self._found.values()))
