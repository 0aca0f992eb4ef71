"""Read and write access to the store that a configuration names."""

from collections.abc import Iterator
from contextlib import contextmanager

from embedder.config import RunConfig
from embedder.errors import StoreError
from embedder.installation import require
from embedder.store.files import StoreFiles


def read_access(config: RunConfig) -> StoreFiles:
    """Return the files of the store for a command that only reads: it takes no lock, and works where none can be taken.

    Raises:
        ConfigError: no store is named.
        StoreError: there is no store, or its format is unknown.
    """
    from embedder.store.store_info import read_store_info

    files = StoreFiles(config.required_store)
    read_store_info(files)
    return files


def describe_vectors(config: RunConfig) -> str | None:
    """Return in what precision the configuration's store records vectors, and what float16 would save; None if unread.

    A store that is not there, or can't be read, is another command's to report.
    """
    from embedder.store.layout import read_current
    from embedder.store.maintenance.half_precision import describe_saving

    if config.store is None:
        return None
    try:
        files = StoreFiles(config.store)
        current = read_current(files)
        return None if current is None else describe_saving(files, current)
    except StoreError:
        return None


@contextmanager
def write_access(config: RunConfig, *, commits: str | None = None) -> Iterator[StoreFiles]:
    """Hold the lock of the store, and finish an interrupted publication; yields the store's files.

    `commits` names the command if it commits to the tables, which needs the extra `embed`.

    Raises:
        InstallationError: this installation can't commit.
        ConfigError: no store is named.
        StoreError: there is no store (none is made), its format is unknown, or another process holds it.
    """
    if commits is not None:
        require("embed", commits)

    from embedder.retrieval.store_api import keep_row_files
    from embedder.store.lock import write_lock
    from embedder.store.publish.publish import finish_publication
    from embedder.store_index.keep_index import index_builder

    files = read_access(config)
    with write_lock(files):
        finish_publication(files, index_builder(config.index))
        yield files
        keep_row_files(files)
