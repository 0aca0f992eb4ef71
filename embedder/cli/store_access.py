"""Store that a configuration names: its files, what it has published, and the lock for writing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from embedder.cli.terminal import TerminalWatcher
from embedder.config import IndexConfig, RunConfig
from embedder.store.files import StoreFiles

if TYPE_CHECKING:
    from embedder.retrieval.store_api import Store


def open_files(config: RunConfig) -> StoreFiles:
    """Files of the store that the configuration names.

    Raises:
        ConfigError: it names none.
    """
    return StoreFiles(config.required_store)


def open_published(config: RunConfig, version: str | None = None) -> "Store":
    """The newest publication of that store, or the one of run `version`."""
    from embedder.retrieval.store_api import Store

    return Store(open_files(config), config.model, version)


@contextmanager
def write_access(files: StoreFiles, index_config: IndexConfig) -> Iterator[Callable[[str], None]]:
    """Hold the lock of a store, and finish a publication that was cut off; yields a function that shows a message.

    Args:
        files: the store.
        index_config: constraints on the index of that publication.

    Raises:
        StoreError: there is no store (none is made), its format is unknown, or another process holds it.
    """
    from embedder.store.lock import write_lock
    from embedder.store.publish import finish_publication
    from embedder.store.store_info import read_store_info
    from embedder.store_index.keep_index import keep_index

    read_store_info(files)
    say = TerminalWatcher().say
    with write_lock(files, say):
        if finish_publication(files, lambda version, info: keep_index(files, version, info, say, index_config)):
            say("the last publication was cut off; now it is whole")
        yield say
