"""Embed images, videos and captions with a twin tower cut into stages on Ray Data, and search them.

    import embedder

    config = embedder.load_config("nightly.toml", {"store": "runs/photos"})
    embedder.embed(config)
    store = embedder.open_store("runs/photos")
    hits = store.search("cat with heart eyes", k=10)
    hits[0].image()

Everything else is private. Importing this package loads neither torch nor Ray: each name imports its module when first
used. Messages are logged by the standard `logging`, below the logger `embedder`.
"""

import logging
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embedder.config import RunConfig, load_config
    from embedder.engine.progress import RunWatcher
    from embedder.evaluation.evaluate import evaluate
    from embedder.planning.answer import plan
    from embedder.predictor import BatchPredictor
    from embedder.report.schema import Report
    from embedder.retrieval.options import SearchOptions
    from embedder.retrieval.store_api import Store, open_store
    from embedder.retrieval.store_follower import FollowingStore, follow_store
    from embedder.store_index.keep_index import build_index
    from embedder.training.config import load_train_config
    from embedder.training.run import train

__version__ = "0.1.0"

__all__ = [
    "BatchPredictor",
    "FollowingStore",
    "SearchOptions",
    "Store",
    "build_index",
    "embed",
    "evaluate",
    "follow_store",
    "load_config",
    "load_train_config",
    "open_store",
    "plan",
    "refresh",
    "train",
]

_HOMES = {
    "BatchPredictor": "embedder.predictor",
    "FollowingStore": "embedder.retrieval.store_follower",
    "SearchOptions": "embedder.retrieval.options",
    "Store": "embedder.retrieval.store_api",
    "build_index": "embedder.store_index.keep_index",
    "evaluate": "embedder.evaluation.evaluate",
    "follow_store": "embedder.retrieval.store_follower",
    "load_config": "embedder.config",
    "load_train_config": "embedder.training.config",
    "open_store": "embedder.retrieval.store_api",
    "plan": "embedder.planning.answer",
    "train": "embedder.training.run",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'embedder' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def embed(
    config: "RunConfig",
    watcher: "RunWatcher | None" = None,
    *,
    retry_rejects: bool = False,
    forced: Collection[str] = (),
) -> "Report":
    """Embed what the store lacks, and publish it, as `embedder embed` does; nothing leaves the store.

    Args:
        config: the run; `model`, `store` and at least one source must be set.
        watcher: receives messages and progress; by default messages are logged.
        retry_rejects: embed again what was rejected before, changed or not.
        forced: names of guards that are overridden.

    Raises:
        ConfigError, SourceError, StoreError: the configuration, a source or the store can't be used.
        RunFailedError: a signal came, or a guard refused what would have been published.
    """
    from embedder.ingest.embed import embed as run

    return run(config, watcher or _LogWatcher(), retry_rejects=retry_rejects, forced=forced)


def refresh(config: "RunConfig", watcher: "RunWatcher | None" = None, **options: Any) -> "Report":
    """Bring the store to the state of its sources, as `embedder refresh` does: new, changed and deleted items.

    Args:
        config: the run; `model`, `store` and at least one source must be set.
        watcher: receives messages and progress; by default messages are logged.
        options: fields of `embedder.ingest.work.IngestOptions`: `limit=1000, max_hours=2`.

    Raises:
        ConfigError, SourceError, StoreError: the configuration, a source or the store can't be used.
        RunFailedError: a signal came, or a guard refused the listing or what would have been published.
    """
    from embedder.ingest.embed import refresh as run
    from embedder.ingest.work import IngestOptions

    return run(config, watcher or _LogWatcher(), IngestOptions(kind="refresh", **options))


class _LogWatcher:
    """Watcher of a run that logs messages and shows no progress."""

    def say(self, message: str) -> None:
        """Log one line."""
        logging.getLogger(__name__).info(message)

    def progress(self, num_items: int) -> AbstractContextManager[Callable[[int], None]]:
        """Show nothing."""
        return nullcontext(lambda num_done: None)
