"""The store's files, by path relative to its root; every write appears whole or not at all."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError
from obstore.store import LocalStore

from embedder.errors import StoreError


class FileInfo(NamedTuple):
    """One file of the store."""

    path: str
    size_bytes: int


class StoreFiles:
    """A store's root folder; pickles by its path, so that tasks on other machines open their own."""

    def __init__(self, root: str | Path) -> None:
        """Open the root, making the folder only when something is written.

        Raises:
            StoreError: the root is on an object store.
        """
        text = str(root)
        if len(urlsplit(text).scheme) > 1:  # one letter would be a drive
            raise StoreError(
                f"store {text}: stores on object storage are not supported yet (sources and models are); "
                "give a local or mounted folder"
            )
        self.root = Path(text).expanduser().absolute()
        self._open: LocalStore | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root, "_open": None}

    @property
    def _store(self) -> LocalStore:
        if self._open is None:
            self._open = LocalStore(prefix=self.root, mkdir=True)
        return self._open

    def uri(self, path: str) -> str:
        """The address under which other readers (Delta, FAISS) find `path`."""
        return str(self.root / path)

    def exists(self, path: str) -> bool:
        """Whether there is such a file."""
        return (self.root / path).is_file()

    def read(self, path: str) -> bytes:
        """The file's content.

        Raises:
            FileNotFoundError: there is no such file.
        """
        return bytes(obstore.get(self._store, path).bytes())

    def write(self, path: str, data: bytes) -> int:
        """Write or replace the file atomically (temporary file, then rename); returns its size in bytes."""
        obstore.put(self._store, path, data)
        return len(data)

    def create(self, path: str, data: bytes) -> bool:
        """Write the file unless it is there already; says whether this call wrote it."""
        try:
            obstore.put(self._store, path, data, mode="create")
        except AlreadyExistsError:
            return False
        return True

    def list(self, folder: str) -> Iterator[FileInfo]:
        """All files below `folder`, at any depth; none where there is no such folder."""
        if not self.root.exists():
            return
        for chunk in obstore.list(self._store, folder):
            for meta in chunk:
                yield FileInfo(meta["path"], meta["size"])

    def delete(self, path: str) -> None:
        """Delete the file; one that is not there is no error."""
        if self.exists(path):
            obstore.delete(self._store, path)
