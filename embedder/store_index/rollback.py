"""Rollback to an earlier index of the same rows: of other constraints, of another kind."""

from embedder.errors import StoreError
from embedder.store.current import swap_index
from embedder.store.files import StoreFiles
from embedder.store.history import publications, same_rows
from embedder.store.layout import Current
from embedder.store.maintenance import writable
from embedder.store.store_info import read_store_info, served_info
from embedder.store_index.versions import list_manifests, open_version
from index.manifest import Manifest

Versions = dict[int, Manifest]


def rollback_index(files: StoreFiles, number: int | None = None) -> tuple[int, Manifest]:
    """Publish an earlier index version with the rows that are published; nothing is deleted, so it can be undone.

    Both indexes have been in use, so no gate judges this.

    Args:
        files: the store, held by the write lock.
        number: of the version; None takes the last one before the current one.

    Returns:
        Its number and manifest.

    Raises:
        StoreError: there is no such version, it is the current one, or it was built of other rows.
        RetrievalError: it is damaged.
    """
    current = writable(files)
    versions = dict(list_manifests(files))
    fitting = _fitting(files, current, versions)
    chosen = (
        _last_before(files, current, fitting) if number is None else _named(files, current, versions, fitting, number)
    )
    open_version(files, chosen, served_info(read_store_info(files), current).model_fingerprint)
    swap_index(files, chosen)
    return chosen, versions[chosen]


def _fitting(files: StoreFiles, current: Current, versions: Versions) -> Versions:
    """Versions built of the published rows, whether or not those have been compacted since."""
    tables = same_rows(publications(files)) | {current.embeddings}
    if current.index in versions:  # kept through a publication that changed no vector
        tables.add(versions[current.index].embeddings_version)
    return {number: manifest for number, manifest in versions.items() if manifest.embeddings_version in tables}


def _last_before(files: StoreFiles, current: Current, fitting: Versions) -> int:
    earlier = [number for number in fitting if current.index is None or number < current.index]
    if not earlier:
        raise StoreError(
            f"store {files.address}: no earlier index version was built of the rows that are published; "
            f"`embedder rollback --store {files.address}` brings an earlier run's rows and index back together, "
            "`embedder index build` makes another index of these"
        )
    return max(earlier)


def _named(files: StoreFiles, current: Current, versions: Versions, fitting: Versions, number: int) -> int:
    where = f"store {files.address}: index version {number}"
    if number not in versions:
        raise StoreError(f"{where} is not there; `embedder index status --store {files.address}` lists those that are")
    if number == current.index:
        raise StoreError(f"{where} is what is published now; name another to go back to")
    if number not in fitting:
        runs = [record.run_id for record in publications(files) if number in (record.index, *record.past_indexes)]
        raise StoreError(
            f"{where} was built of embeddings version {versions[number].embeddings_version}, and "
            f"{current.embeddings} is published, with other rows; `embedder rollback {runs[-1] if runs else 'RUN_ID'} "
            f"--store {files.address}` brings those rows and their index back together"
        )
    return number
