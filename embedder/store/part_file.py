"""Part file: Parquet that a write task has made, before it is in a table's log."""

from typing import Any

from pydantic import BaseModel, ConfigDict

from shards.file_schema import parse_json


class PartFile(BaseModel):
    """Parquet file in a table's folder, not yet in its log."""

    model_config = ConfigDict(frozen=True, defer_build=True)

    table: str
    path: str
    num_rows: int
    size_bytes: int
    stats: str
    session: str
    kept: bool = False  # item records whose published rows of embeddings stay as they are

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
        num_null = (self._statistics.get("nullCount") or {}).get(column)
        return None if num_null is None else int(num_null)

    @property
    def _statistics(self) -> dict[str, Any]:
        try:
            return dict(parse_json(self.stats))
        except ValueError:
            return {}

    def _bounds(self, column: str) -> tuple[str, str] | None:
        least, greatest = ((self._statistics.get(name) or {}).get(column) for name in ("minValues", "maxValues"))
        return None if least is None or greatest is None else (least, greatest)
