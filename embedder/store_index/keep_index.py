"""From the embeddings table to a numbered index version, and which version is published."""

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from embedder.config import IndexConfig
from embedder.errors import StoreError
from embedder.store.current import swap_index
from embedder.store.files import StoreFiles
from embedder.store.layout import Current, StoreInfo, read_current
from embedder.store.lock import write_lock
from embedder.store.store_info import check_writable, published, read_store_info, served_info
from embedder.store_index.build_or_update import IndexJob, build_anew, make_index
from embedder.store_index.versions import has_version
from index.manifest import Manifest

Say = Callable[[str], None]
NO_WISHES = IndexConfig()


def build_store_index(
    files: StoreFiles,
    *,
    kind: str | None = None,
    wishes: IndexConfig = NO_WISHES,
    force: bool = False,
    measure_all: bool = False,
    ray_address: str | None = None,
    say: Say = lambda message: None,
) -> tuple[int, Manifest]:
    """Build an index of the published embeddings and publish it; returns its number and manifest.

    Args:
        files: the store.
        kind: instead of `wishes.kind`.
        wishes: kind, constraints, and what it must reach to be published.
        force: publish it though it finds less than the last one: other constraints are meant to change that. The floor
            stays, for below it no index is of use; who wants to go lower lowers `index.min_recall`.
        measure_all: measure all designs, even where exact search will do.
        ray_address: of a cluster that fills inverted lists, where the index has such and the store is large.
        say: is told what is being measured and built.

    Raises:
        StoreError: nothing is published yet, or there is no picture among it.
        RetrievalError: no design keeps the constraints.
        GateRefusedError: the index is not good enough; what was published stays.
    """
    published(files)  # before the lock makes a folder
    with write_lock(files):
        current = published(files)
        info = read_store_info(files)
        check_writable(files, info)
        if force:
            wishes = wishes.model_copy(update={"max_drop": 1.0})
        making = IndexJob(
            files, current.embeddings, served_info(info, current), current.index, wishes, say, ray_address
        )
        if making.rows.ids.num_rows == 0:
            raise StoreError(f"store {files.address}: no picture or video is in it; an index needs at least one")
        number, manifest = build_anew(making, kind, measure_all=measure_all)
        swap_index(files, number)
    return number, manifest


def update_store_index(files: StoreFiles, wishes: IndexConfig = NO_WISHES, say: Say = lambda message: None) -> int:
    """Bring the published index up to the published rows, if it is behind them; returns its number.

    Args:
        files: the store, held by the write lock.
        wishes: what the index must reach, and what to build where an update will not do.
        say: is told how it came about.

    Raises:
        StoreError: there is no index yet, or no picture any more.
        RunFailedError: no index may be published.
    """
    current = published(files)
    info = read_store_info(files)
    check_writable(files, info)
    if current.index is None:
        raise StoreError(
            f"store {files.address}: it has no index; `embedder index build --store {files.address}` makes one"
        )
    number = make_index(IndexJob(files, current.embeddings, served_info(info, current), current.index, wishes, say))
    if number is None:
        raise StoreError(f"store {files.address}: no picture or video is in it; an index needs at least one")
    if number != current.index:
        swap_index(files, number)
    return number


def keep_index(
    files: StoreFiles,
    embeddings_version: int,
    info: StoreInfo | None,
    say: Say,
    wishes: IndexConfig = NO_WISHES,
    *,
    may_update: bool = True,
    ray_address: str | None = None,
) -> int | None:
    """Number of the index that goes with an embeddings version about to be published.

    A store that has an index keeps one: updated, or built anew where that will not do. One that has none gets its
    first, unless `index.build` is false. Without an index, as where there is no picture, search compares with every
    vector.

    Args:
        files: the store.
        embeddings_version: what is about to be published.
        info: whose vectors those are; by default those that are served now.
        say: is told how it came about.
        wishes: kind, constraints, and what it must reach to be published.
        may_update: go on from the published index, in whose file removed vectors stay.
        ray_address: of a cluster that fills inverted lists, where the index has such and the store is large.

    Raises:
        RunFailedError: no index may be published.
    """
    current = read_current(files)
    previous = current.index if current is not None else None
    if previous is None and not wishes.build:
        return None
    if previous is not None and may_update and current is not None and current.embeddings == embeddings_version:
        return previous
    info = info or served_info(read_store_info(files), current)
    making = IndexJob(files, embeddings_version, info, previous, wishes, say, ray_address, load_model=False)
    return make_index(making, may_update=may_update)


def make_first_index(
    files: StoreFiles, say: Say, wishes: IndexConfig = NO_WISHES, ray_address: str | None = None
) -> int | None:
    """Give what is published its first index, where it has none: of a store from before each publication made one.

    Args:
        files: the store, held by the write lock.
        say: is told how it came about.
        wishes: kind, constraints, and what it must reach to be published.
        ray_address: of a cluster that fills inverted lists, where the index has such and the store is large.

    Returns:
        Its number; None where there is an index, `index.build` is false, or no picture is published.

    Raises:
        RunFailedError: no index may be published.
    """
    current = read_current(files)
    if current is None or current.index is not None:
        return None
    number = keep_index(files, current.embeddings, None, say, wishes, ray_address=ray_address)
    if number is not None:
        swap_index(files, number)
    return number


def kept_or_built(files: StoreFiles, say: Say, wishes: IndexConfig = NO_WISHES) -> Callable[[Current], int | None]:
    """How a publication that has been before gets its index: the one it had, where that is there, else as any other."""

    def choose(candidate: Current) -> int | None:
        if candidate.index is not None and has_version(files, candidate.index):
            return candidate.index
        return keep_index(files, candidate.embeddings, _info_of(files, candidate), say, wishes)

    return choose


def built_without(files: StoreFiles, say: Say, wishes: IndexConfig = NO_WISHES) -> Callable[[Current], int | None]:
    """How a publication gets its index from which items were purged: built anew, never masked."""

    def choose(candidate: Current) -> int | None:
        return keep_index(files, candidate.embeddings, _info_of(files, candidate), say, wishes, may_update=False)

    return choose


def _info_of(files: StoreFiles, publication: Current) -> StoreInfo:
    return served_info(read_store_info(files), publication)


def pictures(rows: pa.Table) -> pa.Table:
    """Rows that have a picture's or a video segment's vector."""
    return rows.filter(pc.is_valid(rows["image_embedding"]))
