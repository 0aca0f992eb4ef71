"""An index of what is published, without a run."""

from contextlib import suppress
from typing import TYPE_CHECKING

from embedder.config import RunConfig
from embedder.errors import StoreError, check_argument
from embedder.executors.cluster_address import find_cluster
from embedder.store.files import StoreFiles

if TYPE_CHECKING:
    from index.manifest import Manifest


def build_index(
    config: RunConfig,
    *,
    model: str = "",
    kind: str | None = None,
    force: bool = False,
    measure_all: bool = False,
) -> "tuple[int, Manifest]":
    """Build and publish an index of a store, as `embedder index build` does; returns its number and manifest.

    Args:
        config: names the store; its `index` section has kind, constraints and the recall it must reach.
        model: name of a further model whose vectors are indexed; by default those of the main one are.
        kind: overrides `config.index.kind`.
        force: publish it even if its recall is lower than that of the last one, as other constraints may require. The
            floor still applies: below `index.min_recall` no index is published.
        measure_all: measure all designs, even if exact search suffices.

    Raises:
        ConfigError: the configuration names no store, or no cluster answers at its address.
        StoreError: nothing is published yet, there is no such model or it has no vectors, or no image is published.
        RetrievalError: no design keeps the constraints, and `config.index.on_missed` is `fail`, or nothing is published
            that could be kept.
        GateRefusedError: the recall of the index is too low; the published one stays.
    """
    check_argument("embedder.build_index: config", config, RunConfig, "one of embedder.load_config")
    from embedder.retrieval.store_api import keep_row_files
    from embedder.store.lock import write_lock
    from embedder.store_index.keep_index import build_published_index

    store, wanted = StoreFiles(config.required_store), config.index
    if force:
        wanted = wanted.model_copy(update={"max_drop": 1.0})
    address = find_cluster(config.ray_address, config.engine)
    made = build_published_index(store, wanted, address, model=model, kind=kind, measure_all=measure_all)
    with suppress(StoreError), write_lock(store):  # another process has taken it, and searches make their own
        keep_row_files(store)
    return made
