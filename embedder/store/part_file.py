"""Part file: Parquet that a write task has made, before it is in a table's log."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from embedder.store.tables.deletion_vectors import DeletionVector
from shards.file_schema import parse_json

PartKey = tuple[str, DeletionVector | None]
"""Path and deletion vector of a part file, which together say what rows of a table it has."""


class PartFile(BaseModel):
    """Parquet file in a table's folder, and in its log or not yet there.

    `num_rows` counts its rows without those that have left by `deletion_vector`; `size_bytes` and `stats` are of the
    whole file.
    """

    model_config = ConfigDict(frozen=True, defer_build=True)

    table: str
    path: str
    num_rows: int
    size_bytes: int
    stats: str
    session: str
    kept: bool = False  # item records whose published rows of embeddings stay as they are
    deletion_vector: DeletionVector | None = Field(None, exclude=True)  # which a log says, and no journal

    @property
    def key(self) -> PartKey:
        """Path and deletion vector."""
        return self.path, self.deletion_vector

    @property
    def num_stored(self) -> int:
        """Number of rows in the file, with those that have left."""
        return self.num_rows + (self.deletion_vector.cardinality if self.deletion_vector is not None else 0)

    @property
    def marked_share(self) -> float:
        """Share of the file's rows that have left."""
        return (self.num_stored - self.num_rows) / max(1, self.num_stored)

    @property
    def id_range(self) -> tuple[str, str] | None:
        """Lowest and highest id of its rows by its statistics; None if unknown."""
        return self._bounds("item_id")

    @property
    def state(self) -> str | None:
        """State that all items in a file of records share, by its statistics; None if unknown."""
        bounds = self._bounds("state")
        return None if bounds is None or bounds[0] != bounds[1] else bounds[0]

    @property
    def num_pictures(self) -> int | None:
        """Number of embeddings with an image's vector, by its statistics; None if unknown, as in older files."""
        num_null = self.num_null("image_embedding")
        return None if num_null is None else self.num_rows - num_null

    def num_null(self, column: str) -> int | None:
        """Return the number of nulls in a vector column by its statistics; None if unknown."""
        num_null = self.null_counts.get(column)
        if num_null is None or self.deletion_vector is None:
            return None if num_null is None else int(num_null)
        if num_null in (0, self.num_stored):
            return self.num_rows if num_null else 0
        marked = (self._statistics.get("markedNullCount") or {}).get(column)
        return None if marked is None else int(num_null) - int(marked)

    @property
    def null_counts(self) -> dict[str, int]:
        """Number of nulls by column, in the file with the rows that have left."""
        return dict(self._statistics.get("nullCount") or {})

    @property
    def _statistics(self) -> dict[str, Any]:
        try:
            return dict(parse_json(self.stats))
        except ValueError:
            return {}

    def _bounds(self, column: str) -> tuple[str, str] | None:
        least, greatest = ((self._statistics.get(name) or {}).get(column) for name in ("minValues", "maxValues"))
        return None if least is None or greatest is None else (least, greatest)
