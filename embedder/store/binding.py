"""A store belongs to one model and one preprocessing; who brings others is told so."""

from embedder.errors import StoreError
from embedder.store.files import StoreFiles
from embedder.store.layout import STORE_FILE, Current, StoreInfo, read_current, read_record, write_record


def bind_store(files: StoreFiles, info: StoreInfo) -> StoreInfo:
    """Make the store this model's, or check that it is.

    Raises:
        StoreError: the store holds vectors of another model or of another preprocessing.
    """
    bound = read_record(files, STORE_FILE, StoreInfo)
    if bound is None:
        write_record(files, STORE_FILE, info)
        return info
    for what in ("model_fingerprint", "preprocess_fingerprint"):
        old, new = getattr(bound, what), getattr(info, what)
        if old != new:
            raise StoreError(
                f"store {files.root}: its {what.replace('_', ' ')} is {old} (model {bound.model}), "
                f"this run's is {new}; vectors of the two can't be compared: use that model and preprocessing, "
                "or start another store"
            )
    return bound


def read_store_info(files: StoreFiles) -> StoreInfo:
    """What store this is.

    Raises:
        StoreError: there is no store.
    """
    info = read_record(files, STORE_FILE, StoreInfo)
    if info is None:
        raise StoreError(
            f"store {files.root}: no {STORE_FILE} there; make one with `embedder embed SOURCE --store URI`"
        )
    return info


def published(files: StoreFiles) -> Current:
    """What is published.

    Raises:
        StoreError: there is no store, or nothing is published yet.
    """
    read_store_info(files)
    current = read_current(files)
    if current is None:
        raise StoreError(
            f"store {files.root}: nothing is published yet; run `embedder embed` to the end (the same command goes on)"
        )
    return current
