"""Derives ids from content for rows without their own; rows with equal content are one item."""

from hashlib import blake2b

from embedder.errors import SourceError
from embedder.sources.fetch import Fetcher
from embedder.sources.listing_schema import Row
from embedder.sources.parquet_cells import ParquetCells, cell_buffer, cell_reference
from embedder.sources.selection import LeftOut
from embedder.sources.source_errors import FetchError, listing_errors
from embedder.sources.uris import TableCell, split_uri
from embedder.storage.web_address import is_web, shown_address

DIGEST_BYTES = 16
MAX_BYTES = (1 << 31) - 1  # of one cell: the limit of Arrow's offsets


class ContentIds:
    """Hashes of a table's images, or of the captions of rows without one: 32 hexadecimal digits.

    Each listing reads all images once, in file order, and holds at most one row group's column
    (`embedder.sources.parquet_cells`). Each id keeps about 100 bytes in memory.
    """

    def __init__(self, left_out: LeftOut, way_out: str) -> None:
        self._left_out, self._way_out = left_out, way_out
        self._cells, self._fetcher = ParquetCells(), Fetcher()
        self._seen: set[str] = set()

    def identify(self, row: Row, place: str) -> Row | None:
        """Put the hash on a row; None if an earlier row has the same hash, which is counted.

        A row that holds nothing, or names a missing file, is a reject identified by its place. A file that may be
        readable later is a SourceError: leaving its rows out would retire their items.
        """
        if row.error_type is not None:
            return row._replace(item_id=place)
        try:
            digest = self._digest(row)
        except FetchError as error:
            if error.transient:
                raise SourceError(f"{error.message}; run again, as its hash is its id") from None
            return row._replace(item_id=place, error_type=error.error_type, error=error.message)
        if digest is None:
            return row._replace(item_id=place, error_type="Empty", error="neither an image nor a caption in this row")
        if digest in self._seen:
            self._left_out.repeated[self._way_out] += 1
            return None
        self._seen.add(digest)
        return row._replace(item_id=digest)

    def _digest(self, row: Row) -> str | None:
        path, cell = split_uri(row.uri)
        if isinstance(cell, TableCell):
            with listing_errors():
                value = self._cells.cell(path, cell)
            buffer = cell_buffer(value)
            if buffer is not None:
                return blake2b(buffer, digest_size=DIGEST_BYTES).hexdigest()
            reference = cell_reference(value, row.uri)
            if reference is not None and is_web(reference):
                raise FetchError(
                    "NotHashed",
                    f"{shown_address(reference)}: a listing fetches nothing from the web; set {self._way_out}",
                )
            with self._fetcher.fetch(row.uri, max_bytes=MAX_BYTES) as fetched:  # the file that a struct's `path` names
                if not fetched.is_null:
                    return self._fetcher.content_hash(fetched)
        return None if row.caption is None else blake2b(row.caption.encode(), digest_size=DIGEST_BYTES).hexdigest()

    def close(self) -> None:
        """Close the open files."""
        self._cells.close()
        self._fetcher.close()
