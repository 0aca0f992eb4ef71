"""Backend of a store in a bucket."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import obstore
import pyarrow as pa
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

from embedder.storage.file_adapter import RangeFile
from embedder.storage.object_ranges import TAIL_BYTES, ObjectRanges
from embedder.storage.object_stores import ObjectStoreError, explain, open_place
from embedder.storage.parquet_ranges import read_parquet
from embedder.store.backends import Condition, FileInfo, Tag, WriteConflictError
from embedder.store.environment import lease_s
from embedder.store.store_errors import remote_problem


class BucketBackend:
    """Folder in a bucket. Object stores other than S3 use the same code but are not tested here.

    Conditional writes are small and are abandoned within a lease, so none outlives the lease under which it was sent.
    """

    def __init__(self, address: str) -> None:
        self._address = address

    @cached_property
    def _client(self) -> Any:
        with self._named_errors(""):
            return open_place(self._address)

    @cached_property
    def _quick_client(self) -> Any:
        with self._named_errors(""):
            return open_place(self._address, within_s=lease_s())

    def _ranges(self, path: str) -> ObjectRanges:
        return ObjectRanges(self._client, path, partial(self._named_errors, path), tail_bytes=TAIL_BYTES)

    def read(self, path: str) -> tuple[bytes, Tag]:
        """See `Backend`."""
        with self._named_errors(path):
            got = self._client.get(path)
            return bytes(got.bytes()), _tag(got.meta)

    def open(self, path: str) -> Any:
        """See `Backend`; reads by ranges."""
        return pa.PythonFile(RangeFile(self._ranges(path)), mode="r")

    def read_table(self, path: str, columns: list[str] | None) -> pa.Table:
        """See `Backend`."""
        return read_parquet(self._ranges(path), columns)

    def exists(self, path: str) -> bool:
        """See `Backend`."""
        try:
            with self._named_errors(path):
                self._client.head(path)
        except FileNotFoundError:
            return False
        return True

    def folders(self, folder: str) -> list[str]:
        """See `Backend`."""
        with self._named_errors(folder):
            found = obstore.list_with_delimiter(self._client, folder)["common_prefixes"]
        return sorted(prefix.rstrip("/").rpartition("/")[2] for prefix in found)

    def list(self, folder: str, after: str | None) -> Iterator[FileInfo]:
        """See `Backend`."""
        with self._named_errors(folder):
            for chunk in obstore.list(self._client, folder, offset=after):
                for meta in chunk:
                    yield FileInfo(meta["path"], meta["size"])

    def put(self, path: str, data: bytes | Path, condition: Condition) -> Tag:
        """See `Backend`."""
        client = self._client if condition is None else self._quick_client
        options: Any = {} if condition is None else {"mode": "create" if condition == "absent" else condition}
        try:
            with self._named_errors(path):
                return _tag(obstore.put(client, path, data, **options))
        except FileNotFoundError:
            raise WriteConflictError(path) from None
        except (AlreadyExistsError, PreconditionError):
            return self._written_before(path, data)

    def _written_before(self, path: str, data: bytes | Path) -> Tag:
        """Return the version if an earlier try of this request wrote the file and its answer was lost: no conflict."""
        with suppress(FileNotFoundError):
            found, tag = self.read(path)
            if found == data:
                return tag
        raise WriteConflictError(path)

    def delete(self, paths: Iterable[str]) -> None:
        """See `Backend`; deletes many with one request."""
        if paths := [*paths]:
            with self._named_errors(paths[0]):
                obstore.delete(self._client, paths)

    def below(self, folder: str) -> "BucketBackend":
        """See `Backend`."""
        return BucketBackend(f"{self._address}/{folder}")

    @contextmanager
    def _named_errors(self, path: str) -> Iterator[None]:
        """Turn client errors into errors for the user; failed conditions pass through, as they are answers."""
        try:
            yield
        except (AlreadyExistsError, PreconditionError):
            raise
        except ObjectStoreError as error:
            raise remote_problem(error) from None
        except (BaseError, OSError) as error:
            raise self._problem(error, path) from None

    def _problem(self, error: Exception, path: str) -> Exception:
        where = f"{self._address}/{path}"
        problem = explain(error, where)
        if problem.kind == "NoBucket":
            problem = explain(error, self._address)
        return FileNotFoundError(where) if problem.kind == "FileNotFound" else remote_problem(problem)


def _tag(meta: Any) -> Tag:
    """Return the fields that S3 (`e_tag`) and Google (`version`) compare."""
    return {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}
