"""Store that follows what is published, for services that run for weeks.

A separate thread polls and opens, so that no query waits while an index of gigabytes is read. The new publication is
opened next to the old one (both in memory meanwhile) and replaces it in one assignment: a query that began on the old
one ends on it. If the check of whole hashes finds an altered file, the publication before is served until there is
another one.
"""

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any, Self

from embedder.errors import StoreError, check_argument
from embedder.retrieval.row_files import DamagedCopyError
from embedder.retrieval.store_api import Store, code_sources
from embedder.store.files import StoreFiles
from embedder.store.layout import Current, read_current
from embedder.store.store_info import read_published
from index.index_errors import RetrievalError

if TYPE_CHECKING:
    from embedder.encoders.servable_encoder import CodeSources
    from embedder.servables.servable import Servable

LOG = logging.getLogger(__name__)
MAX_DOUBLINGS = 5  # a failed opening is retried after 2, 4, ... 32 times the usual wait: it may be large

OnError = Callable[[Exception], object]
OnChange = Callable[[Store], object]


def follow_store(
    uri: str | Path,
    *,
    every_s: float = 10.0,
    model: str | None = None,
    on_error: OnError | None = None,
    on_change: OnChange | None = None,
    servables: "Sequence[Servable | Mapping[str, Any]]" = (),
    allow_store_code: bool = False,
) -> "FollowingStore":
    """Open the published snapshot of a store, and replace it by each later one.

    Args:
        uri: folder or address of the store.
        every_s: seconds between two polls; each reads one file of a kilobyte.
        model: as in `open_store`; a publication of another model, or without one of that name, is then not served.
        on_error: called on the polling thread with the error of a publication that can't be opened, once for each.
        on_change: called there with each later publication, once it is served.
        servables: as in `open_store`.
        allow_store_code: as in `open_store`, for every later publication too.

    Raises:
        StoreError: there is no store, nothing is published yet, or its format is unknown.
        RetrievalError: the index is damaged.
    """
    check_argument("embedder.follow_store: uri", uri, (str, Path), "the folder or address of a store")
    code = code_sources(servables, allow_store_code)
    return FollowingStore(StoreFiles(uri), every_s, model, on_error, on_change, code)


class FollowingStore:
    """Newest publication that can be opened; has the methods of `Store`, each call on one publication.

    Close it, or use it in a `with` block. Make calls that belong together on one `snapshot`: a vector from
    `encode_text` must not meet a publication of another model.

    Attributes:
        snapshot: the publication that is served now.
        last_error: why a newer one is not served, if there is one.
    """

    def __init__(
        self,
        files: StoreFiles,
        every_s: float = 10.0,
        model: str | None = None,
        on_error: OnError | None = None,
        on_change: OnChange | None = None,
        code: "CodeSources | None" = None,
    ) -> None:
        self.snapshot = Store(files, model, code=code)
        self.snapshot.prepare()
        self.snapshot.find_damage()  # which begins the check
        self.last_error: Exception | None = None
        self._altered: Current | None = None  # the publication whose files were altered
        self._files, self._model, self._on_error, self._on_change = files, model, on_error, on_change
        self._code = code
        self._every_s, self._num_failures = every_s, 0
        self._looking, self._closed = Lock(), Event()
        self._thread = Thread(
            target=_poll, args=(weakref.ref(self), self._closed, every_s), name="follow-store", daemon=True
        )
        self._thread.start()

    def search(self, *arguments: Any, **options: Any) -> Any:
        """Search the publication that is served now, like `Store.search`; the hits' `version` names it."""
        return self.snapshot.search(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.snapshot, name)

    def look(self) -> bool:
        """Poll now, and serve a newer publication; returns whether there was one."""
        with self._looking:
            try:
                if self._altered is None and (damage := self.snapshot.find_damage()) is not None:
                    is_copy = isinstance(damage, DamagedCopyError)
                    return self._make_copy_anew(damage) if is_copy else self._go_back(damage)
                newer = self._open_newer()
            except Exception as error:  # noqa: BLE001  # after any error of the new one, the old one is still served
                is_known = self.last_error is not None and str(self.last_error) == str(error)
                self.last_error = error
                self._num_failures += 1
                if self._on_error is not None and not is_known:
                    self._on_error(error)
                return False
            if newer is None and self._altered is not None:
                return False  # what is published was altered, and `last_error` says so
            self.last_error, self._num_failures, self._altered = None, 0, None
            return newer is not None and self._serve(newer)

    def _make_copy_anew(self, damage: RetrievalError) -> bool:
        """Serve the same publication from other copies of its files; returns true."""
        if self._on_error is not None:
            self._on_error(damage)
        same = Store(self._files, self._model, code=self._code, publication=self.snapshot.publication)
        same.prepare(self.snapshot)
        return self._serve(same)

    def _go_back(self, damage: RetrievalError) -> bool:
        self._serve(self._open_before(damage))
        self.last_error = damage
        if self._on_error is not None:
            self._on_error(damage)
        return True

    def _serve(self, store: Store) -> bool:
        self.snapshot = store
        if self._on_change is not None:
            self._on_change(store)
        return True

    @property
    def wait_s(self) -> float:
        """Seconds until the next poll."""
        return self._every_s * (1 << min(self._num_failures, MAX_DOUBLINGS))

    def close(self) -> None:
        """Stop following, after a running poll has ended; the open snapshot stays usable."""
        self._closed.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_newer(self) -> Store | None:
        current = read_current(self._files) or read_published(self._files)  # which raises the reason
        held = current.model_copy(update={"hold": self.snapshot.publication.hold})
        if held == self.snapshot.publication:  # releasing a hold changes no row
            return None
        if self._altered is not None and _versions(current) == _versions(self._altered):
            return None
        newer = Store(self._files, self._model, code=self._code)
        newer.prepare(self.snapshot)
        return newer

    def _open_before(self, damage: RetrievalError) -> Store:
        """Open the publication before the served one, whose files were altered; raises `damage` if there is none."""
        self._altered = self.snapshot.publication
        previous = self._altered.previous
        try:
            if previous is None or self._altered.restores is not None:  # a rollback has taken back the one before
                raise damage
            before = Store(self._files, self._model, previous, code=self._code)
            if before.current.index is None:  # deleted by a vacuum: all its vectors would be read
                raise damage
            before.prepare(self.snapshot)
        except (StoreError, RetrievalError):
            raise damage from None
        return before


def _versions(current: Current) -> list[object]:
    return [(each.run_id, each.embeddings, each.items, each.index) for each in (current, *current.models.values())]


def _poll(following: "weakref.ref[FollowingStore]", closed: Event, wait_s: float) -> None:
    while not closed.wait(wait_s):
        store = following()
        if store is None:
            return
        try:
            store.look()
        except Exception:  # of a callback; later publications are served all the same
            LOG.exception("follow_store: a callback failed")
        wait_s = store.wait_s
        del store  # while it waits, the thread must not keep the store alive
