"""Queries with their right items: the store's own captions, or a file of queries."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.errors import ConfigError, StoreError
from embedder.evaluation.exact import Ints
from embedder.retrieval.store_api import Store
from embedder.store.arrow_tensors import unpack_vectors
from embedder.store.hash_sample import SampledPart, lowest_keys, published_pieces
from embedder.store.tables import RecordTable
from index.vectors import Floats

OWN_CAPTIONS = "captions of the store"
NO_GROUP = "(none)"


@dataclass(frozen=True)
class QuerySet:
    """Q queries and R right answers.

    Attributes:
        source: for reports.
        texts: the queries, each once.
        vectors: float32 (Q, E), L2-normalised.
        queries: int64 (R,), the query of each answer.
        item_ids: R ids, the item that is right for it.
        groups: R names, the group that the answer puts its query in; None without groups.
    """

    source: str
    texts: list[str]
    vectors: Floats
    queries: Ints
    item_ids: list[str]
    groups: list[str] | None = None


def own_captions(store: Store, num_queries: int, group: str | None = None) -> QuerySet:
    """Take the captions of the store's own images as queries.

    Identical ones are one query, for which any of their images is right. Of more than `num_queries` those with the
    lowest hashes are taken: the same for every version, but for new captions.

    Args:
        store: published.
        num_queries: most queries.
        group: column to group by.

    Raises:
        ConfigError: the table has no such column to group by.
        StoreError: no image has a caption.
    """
    parts = list(published_pieces(store.files, store.current.embeddings))
    if group is not None:
        check_group(group, table_columns(store))
    positions = lowest_keys((_captions(part) for part in parts), num_queries)
    if not positions:
        raise StoreError(
            f"store {store.files.address}: no image in it has a caption to ask with; give --queries FILE with the "
            "columns query and item_id"
        )
    numbers = {text: number for number, text in enumerate(positions)}
    collected = _Answers(numbers)
    for position in sorted(set().union(*positions.values())):
        collected.add(parts[position], group)
    vectors = np.stack([collected.vectors[number] for number in range(len(numbers))])
    return QuerySet(OWN_CAPTIONS, list(numbers), vectors, *collected.columns(), collected.groups(group))


def group_names(values: Sequence[Any]) -> list[str]:
    """Values of any column as names of groups."""
    return [NO_GROUP if value is None or value == "" else str(value) for value in values]


def item_groups(store: Store, item_ids: list[str], group: str) -> list[str]:
    """Group of each item, from a column of the embeddings table; of a clip, its first segment's.

    Args:
        store: published.
        item_ids: the items.
        group: the column.
    """
    rows = store.to_arrow(["item_id", group])
    rows = rows.filter(pc.is_in(rows["item_id"], value_set=pa.array(item_ids, pa.string())))
    by_id = dict(zip(reversed(rows["item_id"].to_pylist()), reversed(rows[group].to_pylist()), strict=True))
    return group_names([by_id.get(item_id) for item_id in item_ids])


def check_group(group: str, columns: list[str]) -> None:
    """Refuse to group by a column that is missing, or holds vectors.

    Raises:
        ConfigError: there is no such column.
    """
    fit = [name for name in columns if not name.endswith("_embedding")]
    if group not in fit:
        raise ConfigError(f"--group {group}: there is no such column; group by one of {', '.join(fit)}")


def table_columns(store: Store) -> list[str]:
    """Names of the embeddings table's columns."""
    schema = RecordTable(store.files, "embeddings", store.current.embeddings).schema
    return [] if schema is None else list(schema.names)


def _captions(part: SampledPart) -> Iterator[str]:
    """Captions of one part file's images."""
    rows = _complete(part.read(["caption", "image_embedding", "text_embedding"]))
    return iter(rows["caption"].to_pylist())


def _complete(rows: pa.Table) -> pa.Table:
    """Rows that have a caption's and an image's vector."""
    names = ("caption", "image_embedding", "text_embedding")
    for name in names:
        rows = rows.filter(pc.is_valid(rows[name]))
    return rows


class _Answers:
    """Collector of the chosen captions' right items, and of one vector of each."""

    def __init__(self, numbers: dict[str, int]) -> None:
        self._numbers = numbers
        self._wanted = pa.array(list(numbers), pa.string())
        self._found: dict[tuple[int, str], Any] = {}
        self.vectors: dict[int, Floats] = {}

    def add(self, part: SampledPart, group: str | None) -> None:
        """Add the rows of one part file."""
        columns = ["item_id", "caption", "image_embedding", "text_embedding"]
        rows = _complete(part.read([*columns, *([group] if group and group not in columns else [])]))
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
        """Groups of the answers; None without a column to group by."""
        return None if group is None else group_names(list(self._found.values()))
