"""A store serves one model and one preprocessing at a time; who brings others is told so, or means it."""

from embedder.errors import StoreError
from embedder.store.files import StoreFiles
from embedder.store.layout import (
    FORMAT_VERSION,
    STORE_FILE,
    Current,
    StoreInfo,
    read_current,
    read_record,
    write_record,
)

MODEL_FIELDS = ("model", "model_fingerprint", "preprocess_fingerprint", "segment_s", "frames_per_segment", "dtype")
FINGERPRINTS = ("model_fingerprint", "preprocess_fingerprint")


def bind_store(files: StoreFiles, info: StoreInfo, *, may_change: bool = False) -> StoreInfo:
    """Make the store this model's, or check that it is.

    Args:
        files: the store.
        info: the run's model and preprocessing.
        may_change: let others come: the old ones are served until a whole new publication takes their place.

    Returns:
        Whose vectors the store serves now.

    Raises:
        StoreError: the store holds vectors of another model or of another preprocessing, or is of an older format.
    """
    bound = read_record(files, STORE_FILE, StoreInfo)
    if bound is None:
        write_record(files, STORE_FILE, info)
        return info
    check_writable(files, bound)
    current = read_current(files)
    served = served_info(bound, current)
    if served != bound:
        write_record(files, STORE_FILE, served)  # a run was killed between the two files
    if not may_change:
        _check_same(files, served, info)
    elif current is None and differing(served, info):  # nothing is served yet, so nothing has to wait
        write_record(files, STORE_FILE, info)
        return info
    return served


def check_binding(files: StoreFiles, info: StoreInfo, *, may_change: bool = False) -> None:
    """Refuse what `bind_store` would, and write nothing.

    Raises:
        StoreError: as there.
    """
    bound = read_record(files, STORE_FILE, StoreInfo)
    if bound is not None:
        check_writable(files, bound)
        if not may_change:
            _check_same(files, served_info(bound, read_current(files)), info)


def served_info(info: StoreInfo, current: Current | None) -> StoreInfo:
    """Whose vectors are published: CURRENT.json's word counts, store.json's where that has none."""
    if current is None:
        return info
    said = {name: getattr(current, name) for name in MODEL_FIELDS}
    return info.model_copy(update={name: value for name, value in said.items() if value is not None})


def differing(served: StoreInfo, info: StoreInfo) -> list[str]:
    """Which of the two fingerprints differ; vectors of the two can't be compared then."""
    return [name for name in FINGERPRINTS if getattr(served, name) != getattr(info, name)]


def _check_same(files: StoreFiles, served: StoreInfo, info: StoreInfo) -> None:
    for what in differing(served, info):
        raise StoreError(
            f"store {files.address}: its {what.replace('_', ' ')} is {getattr(served, what)} (model {served.model}), "
            f"this run's is {getattr(info, what)}; vectors of the two can't be compared: use that model and "
            "preprocessing, embed all anew with `embedder refresh`, or start another store"
        )


def check_writable(files: StoreFiles, info: StoreInfo) -> None:
    """Refuse to write into a store of an older format, which older readers may still hold open.

    Raises:
        StoreError: it is of an older format.
    """
    if info.format_version < FORMAT_VERSION:
        raise StoreError(
            f"store {files.address}: format version {info.format_version}, this embedder writes {FORMAT_VERSION}; "
            f"bring it up to date with `embedder migrate --store {files.address}` "
            "(reading and searching work as they are)"
        )


def read_store_info(files: StoreFiles) -> StoreInfo:
    """What store this is.

    Raises:
        StoreError: there is no store.
    """
    info = read_record(files, STORE_FILE, StoreInfo)
    if info is None:
        raise StoreError(
            f"store {files.address}: no {STORE_FILE} there; make one with `embedder embed SOURCE --store URI`"
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
            f"store {files.address}: nothing is published yet; run `embedder embed` to the end "
            "(the same command goes on)"
        )
    return current
