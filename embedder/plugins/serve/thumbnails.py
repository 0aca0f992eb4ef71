"""Thumbnails: an item's file, decoded in a sandbox, as WebP of a fixed size; no search waits for them."""

import asyncio
import logging
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple, TypeVar

from embedder.installation import MISSING_EXTRA
from embedder.media.decoder_process import Pixels
from embedder.media.limits import DecodeLimits
from embedder.media.media_errors import DecodeError
from embedder.media.resize import ResizeSpec
from embedder.media.sandbox import SandboxedDecoder
from embedder.plugins.serve.serve_errors import RequestError
from embedder.plugins.serve.serve_metrics import Metrics
from embedder.plugins.serve.task_threads import TaskThreads
from embedder.retrieval.row_metadata import EmbeddedFiles, IdRows
from embedder.sources.fetch import Fetcher, FetchError
from embedder.sources.uris import split_uri
from embedder.storage.atomic_write import atomic_write
from embedder.storage.item_error import ItemError
from embedder.storage.object_stores import is_remote
from embedder.storage.printable import printable
from embedder.storage.web_address import is_web

LOG = logging.getLogger(__name__)


class ThumbnailKey(NamedTuple):
    """Name of a thumbnail: the item, and the digest of content, segment and size."""

    item_id: str
    name: str


class ThumbnailCache:
    """Files `<digest of the item's id>/<name>`, the least recently used of which are deleted; safe for several threads.

    Until `keep_only` has compared the folder with the store, nothing from an earlier process is returned. `num_bytes`
    is the size of all files.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Set the folder; it is created for the first thumbnail."""
        self._folder, self._max_bytes = folder, max_bytes
        self._sizes: OrderedDict[ThumbnailKey, int] = OrderedDict()
        self._ids: IdRows | None = None
        self._is_read = False
        self.num_bytes = 0
        # A writer of a file holds the first, so that no publication can come between the check and the file.
        self._writing, self._lock = threading.Lock(), threading.Lock()

    def get(self, key: ThumbnailKey) -> bytes | None:
        """Read a thumbnail; None if there is none."""
        with self._lock:
            if key not in self._sizes:
                return None
            self._sizes.move_to_end(key)
        try:
            return self._path(key).read_bytes()
        except OSError:  # another process has deleted it
            with self._lock:
                self.num_bytes -= self._sizes.pop(key, 0)
            return None

    def put(self, key: ThumbnailKey, content: bytes) -> None:
        """Keep a thumbnail, unless its item has left the store in the meantime."""
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
        """Delete the thumbnails of all items except those of a publication."""
        with self._writing, self._lock:
            self._ids = ids
            if not self._is_read:
                self._is_read = True
                self._read_folder(ids)
            kept: dict[str, list[ThumbnailKey]] = {}
            for key in self._sizes:
                kept.setdefault(key.item_id, []).append(key)
            for item_id, keys in kept.items():
                if not len(ids.rows(item_id)):
                    for key in keys:
                        self.num_bytes -= self._sizes.pop(key)
                    shutil.rmtree(self._item_folder(item_id), ignore_errors=True)

    def _read_folder(self, ids: IdRows) -> None:
        """Take over an earlier process's thumbnails of these items, and delete the rest."""
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
            with suppress(OSError):  # another server that shares the folder deletes or renames some meanwhile
                for file in path.iterdir():
                    with suppress(OSError):
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

    def _path(self, key: ThumbnailKey) -> Path:
        return self._item_folder(key.item_id) / key.name

    def _item_folder(self, item_id: str) -> Path:
        return self._folder / _digest(item_id)


def _digest(item_id: str) -> str:
    return blake2b(item_id.encode(), digest_size=16).hexdigest()


CONTENT_TYPE = "image/webp"
QUALITY = 82
ENCODING = 1  # increased whenever thumbnails of the same content would look different
MAX_REMOTE_BYTES = 1 << 30  # of a video that is downloaded for one frame

OTHER_FILES = ("Changed", "TableChanged", "LinkOutsideRoot", "BrokenLink", "NotAFile")
"""Errors of files that differ from those that were embedded."""

T = TypeVar("T")


class Frame(NamedTuple):
    """Image of an item: the file, or the frame of a video in the middle of a segment.

    `time_s` is that of the frame, None for an image; `size_px` is of the longer side. `files` is what items' files must
    match; None if any will do.
    """

    item_id: str
    uri: str
    content_version: str | None
    time_s: float | None
    size_px: int
    files: EmbeddedFiles | None = None

    @property
    def digest(self) -> str:
        """Name from content, time and size; other content has another name."""
        parts = (self.item_id, self.uri, self.content_version, self.time_s, self.size_px, ENCODING)
        return blake2b(repr(parts).encode(errors="surrogatepass"), digest_size=16).hexdigest()


class DecoderThreads:
    """Threads with a sandbox each, and a bounded queue in front of them; used from one event loop."""

    def __init__(self, name: str, num_threads: int, max_waiting: int, limits: DecodeLimits) -> None:
        """Make the threads; the sandboxes start with the first file."""
        when_full = f"max_waiting_images = {max_waiting} allows no further image to wait"
        self._threads, self._limits = TaskThreads(name, num_threads, max_waiting, when_full), limits
        self._own = threading.local()
        self._all: list[SandboxedDecoder | Fetcher] = []

    async def run(self, task: Callable[[SandboxedDecoder, Fetcher], T]) -> T:
        """Call a function in one of the threads, with its sandbox; RequestError if too many wait already."""
        return await self._threads.run(self._run, task)

    def close(self) -> None:
        """End threads and sandboxes."""
        self._threads.close()
        for each in self._all:
            each.close()

    def _run(self, task: Callable[[SandboxedDecoder, Fetcher], T]) -> T:
        if not hasattr(self._own, "decoder"):
            self._own.decoder, self._own.fetcher = SandboxedDecoder(self._limits), Fetcher()
            self._all += [self._own.decoder, self._own.fetcher]
        return task(self._own.decoder, self._own.fetcher)


class Thumbnails:
    """Thumbnails from the cache, or newly made; equal requests at the same time make one."""

    def __init__(self, cache: ThumbnailCache, threads: DecoderThreads, metrics: Metrics, max_bytes: int) -> None:
        self.cache, self._threads, self._metrics, self._max_bytes = cache, threads, metrics, max_bytes
        self._making: dict[ThumbnailKey, asyncio.Task[bytes]] = {}

    async def get(self, frame: Frame, *, keep: bool) -> bytes:
        """Return a thumbnail, as a WebP file; with `keep` it may come from the cache and go there.

        Raises `RequestError` if the file is gone, can't be decoded, or too many wait.
        """
        key = ThumbnailKey(frame.item_id, f"{frame.digest}.webp")
        content = await asyncio.to_thread(self.cache.get, key) if keep else None
        kind = "hits" if content is not None else "misses"
        getattr(self._metrics, f"cache_{kind}").labels("thumbnails").inc()
        if content is not None:
            return content
        if key not in self._making:
            self._making[key] = asyncio.create_task(self._make(frame, key, keep=keep))
            self._making[key].add_done_callback(lambda done: self._make_thumbnail(key, done))
        return await asyncio.shield(self._making[key])

    async def _make(self, frame: Frame, key: ThumbnailKey, *, keep: bool) -> bytes:
        def make(decoder: SandboxedDecoder, fetcher: Fetcher) -> bytes:
            began = time.perf_counter()
            content = _encode(_decode(frame, decoder, fetcher, self._max_bytes))
            if keep:
                self.cache.put(key, content)
            self._metrics.thumbnail_seconds.observe(time.perf_counter() - began)
            return content

        return await self._threads.run(make)

    def _make_thumbnail(self, key: ThumbnailKey, done: "asyncio.Task[bytes]") -> None:
        del self._making[key]
        with suppress(asyncio.CancelledError):
            done.exception()  # retrieved, though nobody may be waiting for it any more


def _decode(frame: Frame, decoder: SandboxedDecoder, fetcher: Fetcher, max_bytes: int) -> Pixels:
    resize = ResizeSpec(image_size=frame.size_px, mode="fit", interpolation="lanczos", reduced_decode=True)
    path, _ = split_uri(frame.uri)
    max_file_bytes = MAX_REMOTE_BYTES if is_remote(path) or is_web(path) else decoder.limits.max_video_bytes
    try:
        embedded = None if frame.files is None else frame.files.of(frame.item_id, frame.uri, "image")
        with fetcher.fetch(frame.uri, max_bytes=max_bytes, max_file_bytes=max_file_bytes, embedded=embedded) as fetched:
            if fetched.content is None:
                raise FetchError("NoContent", "the item has no image")
            if frame.time_s is None:
                return decoder.image(fetched.content, resize)
            return decoder.frame_at(fetched.content, resize, frame.time_s)
    except ItemError as error:
        raise unreadable(frame.item_id, error) from None


def unreadable(item_id: str, error: ItemError) -> RequestError:
    """Refuse because an item's file is gone or broken, without saying where it is."""
    where = f"item {printable(item_id, 200)}"
    if error.transient:
        return RequestError(
            503, where, f"its file can't be read now ({error.error_type})", "a source that answers", "try again later",
            retry_after="5",
        )  # fmt: skip
    if error.error_type in OTHER_FILES:
        return RequestError(
            409,
            where,
            f"its file has changed since it was embedded ({error.error_type})",
            "the same file as then, in the folder of its source, and no link out of it",
            "run `embedder refresh` for the store, or put the file back",
        )
    if error.error_type == MISSING_EXTRA:
        rule, cure = "a format that the server's installation reads", "install the extra `formats` next to the server"
        return RequestError(422, where, f"its file can't be decoded here ({error.error_type})", rule, cure)
    if isinstance(error, DecodeError):
        return RequestError(
            422, where, f"its file can't be decoded ({error.error_type})", "a whole image or video", "restore the file"
        )
    return RequestError(
        404,
        where,
        f"its file can't be read ({error.error_type})",
        "a file as it was when it was embedded",
        "restore the file, or refresh the store",
    )


def _encode(pixels: Pixels) -> bytes:
    from embedder.media.contact_sheet import encode_webp

    return encode_webp(pixels, QUALITY)
