"""Builds, updates, publishes and rolls back the index of a store's embeddings table."""

import logging

from embedder.config_toml.sections import IndexConfig
from embedder.encoders.query_tower_export import add_query_towers
from embedder.errors import StoreError
from embedder.store.files import StoreFiles
from embedder.store.layout import SEARCHED_NAMES, Current, StoreInfo, read_current
from embedder.store.lock import write_lock
from embedder.store.publish.current import IndexChoice, swap_index, writable
from embedder.store.publish.history import latest_publications, one_before, publications, same_rows
from embedder.store.publish.publish import IndexBuilder
from embedder.store.store_info import read_published, read_store_info, served_info
from embedder.store.tables.models import check_has_vectors, find_model, model_files
from embedder.store_index.build_or_update import IndexJob, build_anew, make_index
from embedder.store_index.index_versions import has_version, list_manifests, open_version
from embedder.store_index.keep_words import ensure_words, repair_words
from index.index_errors import ConstraintsMissedError
from index.manifest import Manifest

LOG = logging.getLogger(__name__)
DEFAULT_INDEX_CONFIG = IndexConfig()

Versions = dict[int, Manifest]


def build_published_index(
    store: StoreFiles,
    wanted: IndexConfig,
    ray_address: str | None,
    *,
    model: str = "",
    kind: str | None = None,
    measure_all: bool = False,
) -> tuple[int, Manifest]:
    """Build and publish an index of a store, as `embedder.build_index` promises; return its number and manifest.

    `wanted` holds kind, constraints and the recall to reach; `kind` overrides its kind. Without `ray_address` (of a
    cluster) this machine builds. An empty `model` means the main model. `measure_all` measures all designs even if
    exact search suffices. Where no design keeps the constraints and `on_missed` is `keep`, the published index is
    returned. Raises StoreError, RetrievalError and GateRefusedError as `embedder.build_index` does.
    """
    find_model(store, read_published(store), model)  # before the lock makes a folder
    with write_lock(store):
        files, current = find_model(store, writable(store), model)
        check_has_vectors(files, current)
        info = served_info(read_store_info(files), current)
        job = IndexJob(files, current.embeddings, info, current.index, wanted, ray_address)
        if job.rows.ids.num_rows == 0:
            raise _empty(files, info)
        try:
            number, manifest = build_anew(job, kind, measure_all=measure_all)
        except ConstraintsMissedError as error:
            if wanted.on_missed != "keep" or current.index is None or job.last is None:
                raise
            LOG.warning(f"{error}; index {current.index} stays published")
            return current.index, job.last
        repair_words(files, current.embeddings, wanted)
        swap_index(files, number)
        add_query_towers(files, info)
    return number, manifest


def update_store_index(files: StoreFiles, config: IndexConfig = DEFAULT_INDEX_CONFIG) -> int:
    """Update the published index to the published rows if it is behind them; return its number.

    The caller holds the write lock; `files` may be a model's view. `config` has the recall to reach, and the kind to
    build if an update isn't enough. Raises StoreError if there is no index yet, or no image any more, and
    RunFailedError if no index may be published.
    """
    current = writable(files)
    if current.index is None:
        check_has_vectors(files, current)
        raise StoreError(f"store {files.address}: it has no index; `embedder index build {files.option}` makes one")
    info = served_info(read_store_info(files), current)
    ensure_words(files, current.embeddings, config)
    number = make_index(IndexJob(files, current.embeddings, info, current.index, config))
    if number is None:
        raise _empty(files, info)
    if number != current.index:
        swap_index(files, number)
    return number


def _empty(files: StoreFiles, info: StoreInfo) -> StoreError:
    return StoreError(
        f"store {files.address}: no {SEARCHED_NAMES[info.searched]} is in it; an index needs at least one"
    )


def ensure_index(
    files: StoreFiles,
    embeddings_version: int,
    info: StoreInfo | None,
    config: IndexConfig = DEFAULT_INDEX_CONFIG,
    *,
    may_update: bool = True,
    ray_address: str | None = None,
) -> int | None:
    """Make the index and the word index of an embeddings version about to be published; return the index's number.

    A store with an index keeps one: updated, or rebuilt if necessary. One without gets its first index unless
    `index.build` is false. Without an index, for example if there is no image, a search compares with every vector. A
    model without vectors has no index.

    Args:
        files: the store, or the view of a further model.
        embeddings_version: about to be published.
        info: model of its vectors; None means the one that is served now.
        config: kind, constraints, and the recall it must reach to be published.
        may_update: build on the published index, whose file keeps removed vectors.
        ray_address: of a cluster that fills inverted lists, if the index has any and the store is large.

    Raises:
        RunFailedError: no index may be published.
    """
    ensure_words(files, embeddings_version, config, may_update=may_update)
    current = read_current(files)
    previous = current.index if current is not None else None
    if previous is None and not config.build:
        return None
    if previous is not None and may_update and current is not None and current.embeddings == embeddings_version:
        return previous
    info = info or served_info(read_store_info(files), current)
    if info.has_vectors is False:
        return None
    job = IndexJob(files, embeddings_version, info, previous, config, ray_address, load_model=False)
    return make_index(job, may_update=may_update)


def index_builder(config: IndexConfig = DEFAULT_INDEX_CONFIG, ray_address: str | None = None) -> IndexBuilder:
    """Return a function that makes the index of a model about to be published, and keeps a further one's query towers.

    The arguments are as for `ensure_index`.
    """

    def build(view: StoreFiles, version: int, info: StoreInfo | None) -> int | None:
        number = ensure_index(view, version, info, config, ray_address=ray_address)
        if info is not None and info.has_vectors:
            add_query_towers(view, info)
        return number

    return build


def make_first_index(
    files: StoreFiles, config: IndexConfig = DEFAULT_INDEX_CONFIG, ray_address: str | None = None
) -> int | None:
    """Give the published version its first index if it has none: older releases published without one.

    The caller holds the write lock; `config` and `ray_address` are as for `ensure_index`. Returns its number; None if
    there is an index, `index.build` is false, or no image is published. Raises RunFailedError if no index may be
    published.
    """
    current = read_current(files)
    if current is None or current.index is not None:
        return None
    number = ensure_index(files, current.embeddings, None, config, ray_address=ray_address)
    if number is not None:
        swap_index(files, number)
    return number


def index_choice(files: StoreFiles, config: IndexConfig = DEFAULT_INDEX_CONFIG, *, reuse: bool = True) -> IndexChoice:
    """Return a function that chooses a publication's index per model: its own if it still exists, else `keep_index`.

    `config` applies to an index that has to be built. Without `reuse` it builds a new one: an old one only masks the
    vectors of purged items.
    """

    def choose(candidate: Current, model: str = "") -> int | None:
        view = model_files(files, model)
        if reuse and candidate.index is not None and has_version(view, candidate.index):
            ensure_words(view, candidate.embeddings, config)
            return candidate.index
        info = served_info(read_store_info(view), candidate)
        return ensure_index(view, candidate.embeddings, info, config, may_update=reuse)

    return choose


def same_index_and_words(files: StoreFiles, config: IndexConfig = DEFAULT_INDEX_CONFIG) -> IndexChoice:
    """Return a function that keeps the index of a publication with unchanged rows, and makes its word index."""

    def choose(candidate: Current, model: str = "") -> int | None:
        ensure_words(model_files(files, model), candidate.embeddings, config)
        return candidate.index

    return choose


def rollback_index(files: StoreFiles, number: int | None = None) -> tuple[int, Manifest]:
    """Publish an earlier index version with the published rows; nothing is deleted, so this can be undone.

    Both indexes have been in use, so no gate judges this. The caller holds the write lock; `files` may be a model's
    view. None takes the last version before the current one. Returns number and manifest. Raises StoreError if the
    version is missing, current, or of other rows, and RetrievalError if it is damaged.
    """
    current = writable(files)
    versions = dict(list_manifests(files))
    fitting = _fitting(files, current, versions)
    chosen = (
        _last_before(files, current, fitting)
        if number is None
        else _find_named(files, current, versions, fitting, number)
    )
    open_version(files, chosen, served_info(read_store_info(files), current).model_fingerprint)
    swap_index(files, chosen)
    return chosen, versions[chosen]


def _fitting(files: StoreFiles, current: Current, versions: Versions) -> Versions:
    """Return the versions built from the published rows, even if those have been compacted since."""
    tables = same_rows(latest_publications(files)) | {current.embeddings}
    if current.index in versions:  # kept through a publication that changed no vector
        tables.add(versions[current.index].embeddings_version)
    return {number: manifest for number, manifest in versions.items() if manifest.embeddings_version in tables}


def _last_before(files: StoreFiles, current: Current, fitting: Versions) -> int:
    earlier = [number for number in fitting if current.index is None or number < current.index]
    if not earlier:
        undo = f"`embedder rollback {files.main.option}` brings an earlier run's rows and index back together, "
        raise StoreError(
            f"store {files.address}: no earlier index version was built of the rows that are published; "
            f"{undo if one_before(publications(files.main)) else ''}"
            f"`embedder index build {files.option}` makes another index of these"
        )
    return max(earlier)


def _find_named(files: StoreFiles, current: Current, versions: Versions, fitting: Versions, number: int) -> int:
    where = f"store {files.address}: index version {number}"
    if number not in versions:
        raise StoreError(f"{where} is not there; `embedder index status {files.option}` lists those that are")
    if number == current.index:
        raise StoreError(f"{where} is what is published now; name another to go back to")
    if number not in fitting:
        runs = [record.run_id for record in publications(files) if number in (record.index, *record.past_indexes)]
        raise StoreError(
            f"{where} was built of embeddings version {versions[number].embeddings_version}, and "
            f"{current.embeddings} is published, with other rows; `embedder rollback {runs[-1] if runs else 'RUN_ID'} "
            f"{files.main.option}` brings those rows and their index back together"
        )
    return number
