"""Thumbnails on disk, within a number of bytes; those of items that left the store go with its next publication."""

import logging
import shutil
import threading
from collections import OrderedDict
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from embedder.retrieval.snapshot import IdRows
from embedder.storage.atomic_write import atomic_write

LOG = logging.getLogger(__name__)


class ThumbnailKey(NamedTuple):
    """Name of a thumbnail: the item, and the digest of content, segment and size."""

    item_id: str
    name: str


class ThumbnailCache:
    """Files `<digest of the item's id>/<name>`, the least recently used of which are deleted; safe for several threads.

    Until `keep_only` has compared the folder with the store, nothing that an earlier process left is given out.

    Attributes:
        num_bytes: size of all files.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Name the folder; it is made for the first thumbnail.

        Args:
            folder: of one store.
            max_bytes: of all files.
        """
        self._folder, self._max_bytes = folder, max_bytes
        self._sizes: OrderedDict[ThumbnailKey, int] = OrderedDict()
        self._ids: IdRows | None = None
        self._is_read = False
        self.num_bytes = 0
        # Who writes a file holds the first, so that a publication can't pass between the check and the file.
        self._writing, self._lock = threading.Lock(), threading.Lock()

    def get(self, key: ThumbnailKey) -> bytes | None:
        """Read a thumbnail; None where there is none."""
        with self._lock:
            if key not in self._sizes:
                return None
            self._sizes.move_to_end(key)
        try:
            return self._path(key).read_bytes()
        except OSError:  # another process has deleted it
            self._forget(key)
            return None

    def put(self, key: ThumbnailKey, content: bytes) -> None:
        """Keep a thumbnail, unless its item has left the store meanwhile."""
        with self._writing:
            if self._ids is None or not len(self._ids.rows(key.item_id)) or len(content) > self._max_bytes:
                return
            path = self._path(key)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with atomic_write(path) as file:
                    file.write(content)
            except OSError as error:
                LOG.warning(f"thumbnails can't be kept in {self._folder}: {error}")
                return
            with self._lock:
                self._add(key, len(content))

    def keep_only(self, ids: IdRows) -> None:
        """Delete the thumbnails of all items but some: those of a publication."""
        with self._writing, self._lock:
            self._ids = ids
            if not self._is_read:
                self._is_read = True
                self._read_folder(ids)
            for item_id in {key.item_id for key in self._sizes}:
                if not len(ids.rows(item_id)):
                    for key in [key for key in self._sizes if key.item_id == item_id]:
                        self.num_bytes -= self._sizes.pop(key)
                    shutil.rmtree(self._item_folder(item_id), ignore_errors=True)

    def _read_folder(self, ids: IdRows) -> None:
        """Take over what an earlier process left of these items, and delete the rest."""
        try:
            folders = {path.name: path for path in self._folder.iterdir()}
        except OSError:  # there is none, or not for this user
            return
        known = (
            {digest: item_id for item_id in ids.values() if (digest := _digest(item_id)) in folders} if folders else {}
        )
        for name, path in folders.items():
            if name not in known:
                shutil.rmtree(path, ignore_errors=True)
                continue
            for file in path.iterdir():
                self._add(ThumbnailKey(known[name], file.name), file.stat().st_size)

    def _add(self, key: ThumbnailKey, size: int) -> None:
        self.num_bytes += size - self._sizes.pop(key, 0)
        self._sizes[key] = size
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._sizes)))

    def _drop(self, key: ThumbnailKey) -> None:
        self.num_bytes -= self._sizes.pop(key)
        with suppress(OSError):
            self._path(key).unlink()

    def _forget(self, key: ThumbnailKey) -> None:
        with self._lock:
            self.num_bytes -= self._sizes.pop(key, 0)

    def _path(self, key: ThumbnailKey) -> Path:
        return self._item_folder(key.item_id) / key.name

    def _item_folder(self, item_id: str) -> Path:
        return self._folder / _digest(item_id)


def _digest(item_id: str) -> str:
    return blake2b(item_id.encode(), digest_size=16).hexdigest()
