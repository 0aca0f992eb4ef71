"""Publications that are served: the newest one, which is followed, and earlier ones that requests ask for."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

from embedder.errors import USER_MISTAKES, StoreError
from embedder.plugins.serve.serve_errors import RequestError, refuse_version
from embedder.plugins.serve.serve_settings import ServeSettings
from embedder.plugins.serve.served_publication import WARM_UP_TEXT, ServedPublication
from embedder.redaction import mask
from embedder.retrieval.store_api import Store, code_sources
from embedder.retrieval.store_follower import FollowingStore
from embedder.store.files import StoreFiles
from embedder.store.layout import Published
from embedder.store.publish.history import find_publication, publications, readable
from embedder.store.store_errors import TRANSIENT_ERRORS
from index.index_errors import RetrievalError

LOG = logging.getLogger(__name__)


class Publications:
    """The newest publication that could be opened (`current`) and some earlier ones; safe for several threads."""

    def __init__(self, settings: ServeSettings, on_change: Callable[[ServedPublication], None]) -> None:
        """Open the newest publication, and follow later ones; `on_change` is called with each once it is served.

        Raises `StoreError` if there is no store, or nothing is published yet.
        """
        self._settings, self._on_change = settings, on_change
        self._files = StoreFiles(settings.store)
        self._earlier: OrderedDict[str, ServedPublication] = OrderedDict()
        self._lock, self._generation = threading.Lock(), 0
        self._code = code_sources(settings.servables, settings.allow_store_code)
        self._following = FollowingStore(
            self._files, settings.follow_s, settings.model, self._tell_error, self._take_over, self._code
        )
        self.current = self._publication(self._following.snapshot, is_current=True)

    @property
    def address(self) -> str:
        """Name of the store, without credentials."""
        return self._files.address

    @property
    def last_error(self) -> Exception | None:
        """Reason why a newer publication is not served, if there is one."""
        return self._following.last_error

    def look(self) -> bool:
        """Look for a newer publication now; return whether there was one."""
        return self._following.look()

    def warm_up(self) -> None:
        """Load what the first requests need; a store whose model is gone is served without its texts."""
        store = self.current.store
        _ = store.searcher.snapshot.metadata.ids
        self.current.files.load()
        if self.current.text_problem() is None:  # else items, images and vectors are served all the same
            with suppress(*USER_MISTAKES):
                store.search(WARM_UP_TEXT, k=1)

    def at(self, version: str | None) -> ServedPublication:
        """Return a publication by name, None for the newest; RequestError if it is unknown or no longer readable."""
        run_id = version.partition("/")[0] if version is not None else None
        current = self.current
        if run_id is None or run_id == current.run_id:
            return current
        with self._lock:
            if run_id in self._earlier:
                self._earlier.move_to_end(run_id)
                return self._earlier[run_id]
            generation = self._generation
        opened = self._open(run_id, current)
        with self._lock:
            if generation == self._generation:  # else what was purged in the meantime might stay
                self._earlier[run_id] = opened
                while len(self._earlier) > self._settings.max_versions:
                    self._earlier.popitem(last=False)
        return opened

    def forget(self, publication: ServedPublication) -> None:
        """Open an earlier publication again the next time, as its files can't be read."""
        with self._lock:
            self._earlier.pop(publication.run_id, None)

    def history(self) -> list[tuple[Published, bool]]:
        """Publications that can be read, newest first, and whether each is the one that is served."""
        records = publications(self._files)
        whole = readable(self._files, records)
        return [(each, each.run_id == self.current.run_id) for each in reversed(records) if each.run_id in whole]

    def close(self) -> None:
        """Stop following."""
        self._following.close()

    def _open(self, run_id: str, current: ServedPublication) -> ServedPublication:
        try:
            find_publication(self._files, run_id)
        except StoreError:
            raise RequestError(
                404, "version", f"no publication {run_id!r}", "a publication of the store", "choose one of /versions"
            ) from None
        try:
            store = Store(self._files, None, run_id, code=self._code)
            store.searcher.snapshot.prepare(current.store.searcher.snapshot)
        except TRANSIENT_ERRORS:
            raise
        except (StoreError, RetrievalError) as error:
            LOG.warning(f"publication {run_id} can't be opened: {mask(str(error))}")
            raise refuse_version(run_id) from None
        with suppress(*USER_MISTAKES, ImportError, OSError):  # of its encoder: a search by a text gets the reason
            store.prepare(current.store)
        return self._publication(store, is_current=False)

    def _publication(self, store: Store, *, is_current: bool) -> ServedPublication:
        return ServedPublication(
            store, is_current=is_current, show_uris=self._settings.show_uris, latest=lambda: self.current
        )

    def _take_over(self, store: Store) -> None:
        """Serve a newer publication, and forget the earlier ones: a purge may have changed them."""
        newer = self._publication(store, is_current=True)
        for model in self.current.opened_models:
            try:
                newer.of_model(model)
            except (RequestError, *USER_MISTAKES) as error:  # the next request for it gets the reason
                LOG.warning(f"model {model} of the new publication can't be opened: {error}")
        self.current = newer
        with self._lock:
            self._generation += 1
            self._earlier.clear()
        LOG.info(f"serving publication {self.current.version}")
        self._on_change(self.current)

    def _tell_error(self, error: Exception) -> None:
        LOG.warning(f"a newer publication can't be served, the old one is: {error}")
