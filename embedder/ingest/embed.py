"""The main job: list, compare with the store, embed what is new or changed, publish. Creates a store or goes on."""

from collections.abc import Collection

from embedder.config import RunConfig
from embedder.engine.progress import RunWatcher
from embedder.ingest.flow import run_flow
from embedder.ingest.work import IngestOptions
from embedder.report.schema import Report


def embed(
    config: RunConfig, watcher: RunWatcher, *, retry_rejects: bool = False, forced: Collection[str] = ()
) -> Report:
    """Embed what the store lacks, and publish it; nothing ever leaves the store, and its model stays.

    Args:
        config: the run; `model`, `store` and at least one source must be set.
        watcher: is told what happens.
        retry_rejects: embed again what was rejected before, changed or not.
        forced: names of guards that are overridden.

    Raises:
        ConfigError: something needed is not set, the resources asked for do not exist, or int8 doesn't help here.
        SourceError: a source can't be listed, or nothing is in it.
        StoreError: the store is locked, or of another model.
        RunFailedError: a signal came, or a guard refused what would have been published.
    """
    return run_flow(config, watcher, IngestOptions(kind="embed", retry_rejects=retry_rejects, forced=tuple(forced)))
