"""The store's files, by path relative to its root; every write appears whole or not at all.

This is the only access to a store on a disk or in a bucket; nothing else knows where it is. `embedder.store.backends`
says what file systems and servers do, `docs/store-protocol.md` what may be written when.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from embedder.errors import StoreError
from embedder.storage.object_ranges import PIECE_BYTES
from embedder.storage.object_stores import ObjectStoreError, is_remote, split_place
from embedder.storage.printable import is_text
from embedder.storage.vector_pages import Place, VectorColumn, read_vector_pages
from embedder.store.backends import Backend, DiskBackend, FileInfo, Tag, WriteConflictError
from embedder.store.bucket_backend import BucketBackend
from embedder.store.environment import REAL_ENVIRONMENT, Environment, HeldLock
from embedder.store.store_errors import local_problem
from embedder.store.tables.arrow_tensors import unpack_vectors
from embedder.store.trace import trace_backend

NUM_READERS = 16
SMALL_BYTES = 1 << 16
"""Size of a part file on a disk below which Arrow reads vectors sooner: in 0.3 ms, where a footer takes us 0.5."""
NUM_RECORD_READERS = 64  # for small files of one request each: 10,000 at 20 ms are read in 3 s

S = TypeVar("S")
T = TypeVar("T")


class StoreFiles:
    """A store's root; pickled as its address, so that tasks on other machines open their own with their credentials.

    Attributes:
        address: name of the store in messages, without credentials.
        folder: its folder if it is on a disk, else None.
        backend: access to its files.
        environment: clocks and the like of its writers.
        lease: the lock that this process holds on it, if any (`embedder.store.lock`); not pickled.
    """

    def __init__(self, root: str | Path) -> None:
        """Set the root; StoreError if the URI's kind is unknown, or it isn't UTF-8 or has credentials."""
        text = str(root)
        if not is_text(text):
            raise StoreError(f"store {text}: its name is not valid UTF-8, which its tables are named in; rename it")
        self.folder: Path | None = None
        self.lease: HeldLock | None = None
        self.environment: Environment = REAL_ENVIRONMENT
        self._seen: dict[str, tuple[float, bool]] = {}
        if is_remote(text):
            self.address = _bucket_address(text)
            self.backend: Backend = trace_backend(BucketBackend(self.address), self.address)
            return
        if len(urlsplit(text).scheme) > 1:  # one letter would be a drive
            scheme = urlsplit(text).scheme
            raise StoreError(
                f"store {scheme}://...: no store can be kept there; give a local or mounted folder, s3://, gs:// or az://"
            )
        self.folder = Path(text).expanduser().absolute()
        self.address = str(self.folder)
        self.backend = trace_backend(DiskBackend(self.folder), self.address)
        try:
            file = next((each for each in (self.folder, *self.folder.parents) if each.is_file()), None)
        except OSError as error:
            raise local_problem(error, self.address) from error
        if file is not None:
            raise StoreError(f"store {self.address}: {file} is a file; give the folder that holds the results")

    def __reduce__(self) -> tuple[Any, ...]:
        return StoreFiles, (self.address,)

    @property
    def main(self) -> "StoreFiles":
        """Return the store itself; for a model's view (`store.tables.models`), the store that it belongs to."""
        return self

    @property
    def model(self) -> str:
        """Name of the model whose view this is; empty for the store itself."""
        return ""

    @property
    def option(self) -> str:
        """Command line options that select this store."""
        return f"--store {quote(self.address)}"

    def confirm_lease(self) -> None:
        """Check before a commit that this process still holds the lock, if it took one; else raise LeaseLostError."""
        if self.lease is not None:
            self.lease.confirm()

    def uri(self, path: str) -> str:
        """Return the address of `path` for other readers and for messages."""
        return f"{self.address}/{path}"

    def exists(self, path: str, max_age_s: float = 0.0) -> bool:
        """Return whether the file exists; in a bucket, an answer up to `max_age_s` old saves a request."""
        if self.folder is not None or not max_age_s:
            return self.backend.exists(path)
        clock_s = self.environment.clock_s
        asked_s, answer = self._seen.get(path, (-1e9, False))
        if clock_s() - asked_s > max_age_s:
            answer = self.backend.exists(path)
            self._seen[path] = (clock_s(), answer)
        return answer

    def open(self, path: str) -> Any:
        """Open the file for random access (memory-mapped or by ranges), as pyarrow takes it.

        Raises FileNotFoundError if there is none. Read rows with `read_table` instead: Arrow's threads must not hold a
        bucket's Python file when the process ends.
        """
        return self.backend.open(path)

    def read_table(self, path: str, columns: list[str] | None = None) -> pa.Table:
        """Read a Parquet file, or those of some columns that it has; FileNotFoundError if there is no file."""
        return self.backend.read_table(path, columns)

    def read_vectors(self, path: str, column: str, place: Place | None = None) -> VectorColumn:
        """Read the vectors of a Parquet file's column, which may lack it; FileNotFoundError if there is no file.

        `place` gives the memory, float32 (P, E), for P vectors. From a bucket checksums are compared: the bytes have
        come a long way; on a disk that takes as long as all the rest, and `read_table` does it (`store check --deep`).
        Raises OSError or `pyarrow.ArrowException` if the file is damaged.
        """
        with self.open(path) as file:
            is_small = self.folder is not None and file.size() < SMALL_BYTES
            check_sums = self.folder is None
            found = None if is_small else read_vector_pages(file, column, place, check_sums=check_sums)
        return self._take_vectors(path, column, place) if found is None else found

    def _take_vectors(self, path: str, column: str, place: Place | None) -> VectorColumn:
        """Read vectors by Arrow: the file is small, older than the layout, or another program has written it."""
        rows = self.read_table(path, [column])
        if column not in rows.column_names:
            return VectorColumn(np.empty((0, 0), np.float32), np.zeros(rows.num_rows, np.bool_))
        values = unpack_vectors(rows[column].drop_null())
        if place is not None:
            own, values = values, place(*values.shape)
            values[:] = own
        return VectorColumn(values, pc.is_valid(rows[column]).to_numpy())

    def each(self, read: Callable[[T], S], of: Iterable[T], num_readers: int = NUM_READERS) -> list[S]:
        """Apply `read` to each file, in order; in a bucket many run at once, since each waits for its answer."""
        if self.folder is not None:
            return [read(each) for each in of]
        with ThreadPoolExecutor(num_readers) as pool:
            return list(pool.map(read, of))

    def stream(self, read: Callable[[T], S], of: Sequence[T], num_ahead: int = NUM_RECORD_READERS) -> Iterator[S]:
        """Apply `read` to each file, in order like `each`, with only a few results waiting to be taken."""
        for start in range(0, len(of), num_ahead):
            yield from self.each(read, of[start : start + num_ahead], num_ahead)

    def read_ahead(self, read: Callable[[T], S], of: Sequence[T], num_ahead: int) -> Iterator[S]:
        """Apply `read` to each file, in order; in a bucket the next ones are read while the last one is used."""
        if self.folder is not None:
            yield from map(read, of)
            return
        waiting: deque[Future[S]] = deque()
        with ThreadPoolExecutor(num_ahead) as pool:
            try:
                for each in of:
                    waiting.append(pool.submit(read, each))
                    if len(waiting) == num_ahead:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def read(self, path: str) -> bytes:
        """Read the file; FileNotFoundError if there is none."""
        return self.read_tagged(path)[0]

    def read_tagged(self, path: str) -> tuple[bytes, Tag]:
        """Read the file's content and its version, for `replace`; FileNotFoundError if there is none."""
        return self.backend.read(path)

    def write(self, path: str, data: bytes) -> int:
        """Write or replace the file atomically; return its size in bytes.

        Use this for names that nobody else writes, and `replace` for records that are read, changed and written.
        """
        self.backend.put(path, data, None)
        return len(data)

    def write_table(self, path: str, content: pa.Table, **options: Any) -> int:
        """Write a table atomically as a Parquet file (options as for pyarrow); return its size in bytes."""
        return self.write(path, parquet_bytes(content, **options))

    def upload(self, source: Path, path: str) -> None:
        """Write a local file of any size as `path`, whole or not at all."""
        self.backend.put(path, source, None)

    def download(self, path: str, target: Path) -> None:
        """Copy a file of any size to a local one piece by piece, so that no request has to carry all of it in its time.

        Raises FileNotFoundError if there is no such file.
        """
        with self.open(path) as source, target.open("wb") as file:
            while piece := source.read(PIECE_BYTES):
                file.write(piece)

    def create(self, path: str, data: bytes) -> bool:
        """Write the file unless it exists; return whether this call wrote it."""
        try:
            self.replace(path, data, None)
        except WriteConflictError:
            return False
        return True

    def replace(self, path: str, data: bytes, tag: Tag | None) -> Tag:
        """Write the file if it still is the version that was read, `tag` (None: no file); return its new version.

        Raises WriteConflictError, with nothing written, if the file has another version by now.
        """
        return self.backend.put(path, data, "absent" if tag is None else tag)

    def folders(self, folder: str) -> list[str]:
        """Return the sorted names of the folders directly in `folder`, without listing their content."""
        return self.backend.folders(folder)

    def list(self, folder: str, after: str | None = None) -> Iterator[FileInfo]:
        """Yield all files below `folder`, at any depth, that sort after `after`; none if there is no such folder."""
        return self.backend.list(folder, after)

    def delete(self, path: str) -> None:
        """Delete the file; a missing one is no error."""
        self.backend.delete([path])

    def delete_each(self, paths: Iterable[str]) -> None:
        """Delete files in any order; in a bucket, many with one request."""
        self.backend.delete(paths)


def parquet_bytes(content: pa.Table, **options: Any) -> bytes:
    """Return a table as the bytes of a Parquet file."""
    buffer = BytesIO()
    pq.write_table(content, buffer, **{"compression": "zstd", **options})
    return buffer.getvalue()


def is_same_place(files: StoreFiles, path: str) -> bool:
    """Return whether the store's folder or URI is that of a source."""
    if files.folder is not None:
        return "://" not in path and files.folder.resolve() == Path(path).expanduser().resolve()
    return files.address == path.rstrip("/")


def _bucket_address(uri: str) -> str:
    try:
        root, key = split_place(uri)
    except ObjectStoreError as error:
        raise StoreError(f"store: {error.message}") from None
    if any(sign in uri for sign in "?#"):
        raise StoreError(
            f"store {root}/...: the URI holds '?' or '#'; a store's address has neither query nor fragment"
        )
    return f"{root}/{key}".rstrip("/")
