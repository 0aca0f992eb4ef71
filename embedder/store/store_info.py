"""Binding of a store to one model and one preprocessing; others are refused, or accepted on request."""

from collections.abc import Mapping

import pyarrow as pa

from embedder.batch_schema import medium_schema, step_schema
from embedder.errors import StoreError
from embedder.store.files import StoreFiles
from embedder.store.layout import STORE_FILE, Current, RunInfo, StoreInfo, read_current, read_record, swap_record
from embedder.store.schema import FORMAT_VERSION

FINGERPRINTS = ("model_fingerprint", "preprocess_fingerprint")
MODEL_FIELDS = (
    "model",
    *FINGERPRINTS,
    "segment_s",
    "frames_per_segment",
    "dtype",
    "colour",
    "searched",
    "steps",
    "step_columns",
    "medium_columns",
    "libraries",
)
FURTHER_FIELDS = ("has_vectors", "outputs", "servable")
"""Fields of models other than the main one, besides `MODEL_FIELDS`."""


def bind_store(files: StoreFiles, info: StoreInfo, *, may_change: bool = False) -> StoreInfo:
    """Bind the store to a model, or check its binding; return the model and preprocessing that it now serves.

    With `may_change`, others are accepted: the old ones are served until a complete new publication replaces them.
    Raises StoreError if the store's vectors are of another model or preprocessing, or its format is older.
    """
    served = check_binding(files, info, may_change=may_change)
    if served is None or (differing(served, info) and read_current(files) is None):  # nothing is served yet
        served = info
    swap_record(files, STORE_FILE, StoreInfo, lambda found: served)  # a run may have been killed after CURRENT.json
    return served


def check_binding(files: StoreFiles, info: StoreInfo, *, may_change: bool = False) -> StoreInfo | None:
    """Check like `bind_store` without writing; return what the store now serves, None before its first run."""
    bound = read_record(files, STORE_FILE, StoreInfo)
    if bound is None:
        return None
    check_writable(files, bound)
    current = read_current(files)
    served = served_info(bound, current)
    # What a vacuum leaves of an unused model doesn't bind another model of that name.
    may_change = may_change or (bool(files.model) and current is None)
    if not may_change and differing(served, info) == ["steps"]:
        raise StoreError(
            f"store {files.address}: {step_changes(served.steps, info.steps)} since its rows were made; make them all "
            "again with `embedder refresh`, or start another store"
        )
    for name in [] if may_change else differing(served, info):
        raise StoreError(
            f"store {files.address}: its {name.replace('_', ' ')} is {getattr(served, name)} (model {served.model}), "
            f"this run's is {getattr(info, name)}; vectors of the two can't be compared: use that model and "
            "preprocessing, embed all again with `embedder refresh`, or start another store"
        )
    return served


def served_info(info: StoreInfo, current: Current | None) -> StoreInfo:
    """Return the model of the published vectors from CURRENT.json, or from store.json for fields that it lacks."""
    if current is None:
        return info
    served = {name: getattr(current, name) for name in MODEL_FIELDS}
    return info.model_copy(update={name: value for name, value in served.items() if value is not None})


def differing(served: StoreInfo, info: StoreInfo) -> list[str]:
    """Return the names of differing fingerprints, and `steps` if those differ; the vectors are then not comparable."""
    names = [name for name in FINGERPRINTS if getattr(served, name) != getattr(info, name)]
    return names if list(served.steps.items()) == list(info.steps.items()) else [*names, "steps"]


def output_columns(info: StoreInfo | RunInfo) -> pa.Schema:
    """Return the columns that the main model's rows have besides the table's own and carried ones."""
    return pa.schema([*step_schema(info.step_columns), *medium_schema(info.medium_columns)])


def step_changes(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Say which of the user's own steps differ, as the reason why items are embedded again.

    Both map steps to fingerprints, in order: `before` for the steps that the rows went through, `now` for a run's.
    """
    found = [f"step {name} changed" for name in now if before.get(name, now[name]) != now[name]]
    found += [f"step {name} added" for name in now if name not in before]
    found += [f"step {name} removed" for name in before if name not in now]
    return ", ".join(found) or "steps in another order"


def other_libraries(served: StoreInfo, info: StoreInfo) -> list[str]:
    """Describe libraries whose versions differ, as `torch 2.8.0 (now 2.15.0)`; an older store records none."""
    return [
        f"{name} {version} (now {info.libraries.get(name, 'missing')})"
        for name, version in served.libraries.items()
        if info.libraries.get(name) != version
    ]


def check_writable(files: StoreFiles, info: StoreInfo) -> None:
    """Raise StoreError for a store of an older format, which older readers may still hold open."""
    if info.format_version < FORMAT_VERSION:
        raise StoreError(
            f"store {files.address}: format version {info.format_version}, this embedder writes {FORMAT_VERSION}; "
            f"bring it up to date with `embedder migrate --store {files.address}` "
            "(reading and searching work as they are)"
        )


def read_store_info(files: StoreFiles) -> StoreInfo:
    """Read store.json, or raise StoreError if there is no store."""
    info = read_record(files, STORE_FILE, StoreInfo)
    if info is None:
        raise StoreError(
            f"store {files.address}: no {STORE_FILE} there; "
            "make one with `embedder embed SOURCE --model DIR --store URI`"
        )
    return info


def read_published(files: StoreFiles) -> Current:
    """Read what is published, or raise StoreError if there is no store or no publication yet."""
    read_store_info(files)
    current = read_current(files)
    if current is None:
        raise StoreError(
            f"store {files.address}: nothing is published yet; run `embedder embed` to the end "
            "(the same command continues)"
        )
    return current
