"""Build, update and publish the index of a store's embeddings table."""

import logging
from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from embedder.config import IndexConfig, RunConfig
from embedder.errors import StoreError
from embedder.store.current import swap_index
from embedder.store.files import StoreFiles
from embedder.store.layout import Current, StoreInfo, read_current
from embedder.store.lock import write_lock
from embedder.store.store_info import check_writable, published, read_store_info, served_info
from embedder.store_index.build_or_update import IndexJob, build_anew, make_index
from embedder.store_index.versions import has_version
from index.manifest import Manifest

LOG = logging.getLogger(__name__)
Say = Callable[[str], None]
DEFAULT_INDEX_CONFIG = IndexConfig()


def build_index(
    config: RunConfig, *, kind: str | None = None, force: bool = False, measure_all: bool = False, say: Say = LOG.info
) -> tuple[int, Manifest]:
    """Build and publish an index of a store, as `embedder index build` does; returns its number and manifest.

    Args:
        config: names the store; its `index` section has kind, constraints and the recall it must reach.
        kind: instead of `config.index.kind`.
        force: see `build_store_index`.
        measure_all: measure all designs, even where exact search will do.
        say: receives progress messages; by default they are logged.

    Raises:
        ConfigError: the configuration names no store.
        StoreError: nothing is published yet, or there is no image among it.
        RetrievalError: no design keeps the constraints.
        GateRefusedError: the recall of the index is too low; the published one stays.
    """
    return build_store_index(
        StoreFiles(config.required_store),
        kind=kind,
        config=config.index,
        force=force,
        measure_all=measure_all,
        ray_address=config.ray_address,
        say=say,
    )


def build_store_index(
    files: StoreFiles,
    *,
    kind: str | None = None,
    config: IndexConfig = DEFAULT_INDEX_CONFIG,
    force: bool = False,
    measure_all: bool = False,
    ray_address: str | None = None,
    say: Say = lambda message: None,
) -> tuple[int, Manifest]:
    """Build an index of the published embeddings and publish it; returns its number and manifest.

    Args:
        files: the store.
        kind: instead of `config.kind`.
        config: kind, constraints, and the recall it must reach to be published.
        force: publish it though its recall is lower than that of the last one, as other constraints may ask for. The
            floor stays: below `index.min_recall` no index is published.
        measure_all: measure all designs, even where exact search will do.
        ray_address: of a cluster that fills inverted lists, where the index has such and the store is large.
        say: receives progress messages.

    Raises:
        StoreError: nothing is published yet, or there is no image among it.
        RetrievalError: no design keeps the constraints.
        GateRefusedError: the recall of the index is too low; the published one stays.
    """
    published(files)  # before the lock makes a folder
    with write_lock(files):
        current = published(files)
        info = read_store_info(files)
        check_writable(files, info)
        if force:
            config = config.model_copy(update={"max_drop": 1.0})
        job = IndexJob(files, current.embeddings, served_info(info, current), current.index, config, say, ray_address)
        if job.rows.ids.num_rows == 0:
            raise StoreError(f"store {files.address}: no image or video is in it; an index needs at least one")
        number, manifest = build_anew(job, kind, measure_all=measure_all)
        swap_index(files, number)
    return number, manifest


def update_store_index(
    files: StoreFiles, config: IndexConfig = DEFAULT_INDEX_CONFIG, say: Say = lambda message: None
) -> int:
    """Bring the published index up to the published rows, if it is behind them; returns its number.

    Args:
        files: the store, held by the write lock.
        config: the recall it must reach, and the kind to build where an update will not do.
        say: receives progress messages.

    Raises:
        StoreError: there is no index yet, or no image any more.
        RunFailedError: no index may be published.
    """
    current = published(files)
    info = read_store_info(files)
    check_writable(files, info)
    if current.index is None:
        raise StoreError(
            f"store {files.address}: it has no index; `embedder index build --store {files.address}` makes one"
        )
    number = make_index(IndexJob(files, current.embeddings, served_info(info, current), current.index, config, say))
    if number is None:
        raise StoreError(f"store {files.address}: no image or video is in it; an index needs at least one")
    if number != current.index:
        swap_index(files, number)
    return number


def keep_index(
    files: StoreFiles,
    embeddings_version: int,
    info: StoreInfo | None,
    say: Say,
    config: IndexConfig = DEFAULT_INDEX_CONFIG,
    *,
    may_update: bool = True,
    ray_address: str | None = None,
) -> int | None:
    """Make the index of an embeddings version about to be published; returns its number.

    A store that has an index keeps one: updated, or built anew where that will not do. One that has none gets its
    first, unless `index.build` is false. Without an index, as where there is no image, search compares with every
    vector.

    Args:
        files: the store.
        embeddings_version: about to be published.
        info: model of its vectors; by default the one that is served now.
        say: receives progress messages.
        config: kind, constraints, and the recall it must reach to be published.
        may_update: go on from the published index, in whose file removed vectors stay.
        ray_address: of a cluster that fills inverted lists, where the index has such and the store is large.

    Raises:
        RunFailedError: no index may be published.
    """
    current = read_current(files)
    previous = current.index if current is not None else None
    if previous is None and not config.build:
        return None
    if previous is not None and may_update and current is not None and current.embeddings == embeddings_version:
        return previous
    info = info or served_info(read_store_info(files), current)
    job = IndexJob(files, embeddings_version, info, previous, config, say, ray_address, load_model=False)
    return make_index(job, may_update=may_update)


def make_first_index(
    files: StoreFiles, say: Say, config: IndexConfig = DEFAULT_INDEX_CONFIG, ray_address: str | None = None
) -> int | None:
    """Give the published version its first index, where it has none: a store from before each publication made one.

    Args:
        files: the store, held by the write lock.
        say: receives progress messages.
        config: kind, constraints, and the recall it must reach to be published.
        ray_address: of a cluster that fills inverted lists, where the index has such and the store is large.

    Returns:
        Its number; None where there is an index, `index.build` is false, or no image is published.

    Raises:
        RunFailedError: no index may be published.
    """
    current = read_current(files)
    if current is None or current.index is not None:
        return None
    number = keep_index(files, current.embeddings, None, say, config, ray_address=ray_address)
    if number is not None:
        swap_index(files, number)
    return number


def kept_or_built(
    files: StoreFiles, say: Say, config: IndexConfig = DEFAULT_INDEX_CONFIG
) -> Callable[[Current], int | None]:
    """Function that chooses the index of an earlier publication: its own where it is there, else `keep_index`.

    Args:
        files: the store.
        say: receives progress messages.
        config: of an index that has to be built.
    """

    def choose(candidate: Current) -> int | None:
        if candidate.index is not None and has_version(files, candidate.index):
            return candidate.index
        return keep_index(files, candidate.embeddings, _info_of(files, candidate), say, config)

    return choose


def built_without(
    files: StoreFiles, say: Say, config: IndexConfig = DEFAULT_INDEX_CONFIG
) -> Callable[[Current], int | None]:
    """Function that builds the index of a publication from which items were purged: a new one, never masked.

    Args:
        files: the store.
        say: receives progress messages.
        config: of the index.
    """

    def choose(candidate: Current) -> int | None:
        return keep_index(files, candidate.embeddings, _info_of(files, candidate), say, config, may_update=False)

    return choose


def _info_of(files: StoreFiles, publication: Current) -> StoreInfo:
    return served_info(read_store_info(files), publication)


def rows_with_images(rows: pa.Table) -> pa.Table:
    """Rows that have the vector of an image or a video segment."""
    return rows.filter(pc.is_valid(rows["image_embedding"]))
