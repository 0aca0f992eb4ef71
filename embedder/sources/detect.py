"""Whether a source is files, a table or tars, where its configuration does not say."""

import os
from collections.abc import Iterable, Iterator
from typing import Literal

from embedder.errors import SourceError
from embedder.sources.errors import FetchError
from embedder.sources.globbing import is_pattern, listing_error
from embedder.sources.local_listing import walk_folder
from embedder.sources.selection import Selection
from embedder.sources.uris import is_remote

Kind = Literal["files", "table", "webdataset"]
TABLE_SUFFIXES = (".parquet", ".csv", ".tsv", ".jsonl", ".ndjson")
PACKED_TAR_SUFFIXES = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")
_DELTA_LOG = "_delta_log"


def detect_kind(path: str, selection: Selection) -> Kind:
    """Tell the kind of a source from its path and, for a folder, from what it holds.

    A folder with a transaction log is a Delta table; one of nothing but tars, or nothing but table files of one
    format, is that; any other folder is files, and so is a single file of no other kind. Junk and what the run itself
    writes tell nothing.

    Args:
        path: as `normalise_source` gives it.
        selection: of the files below it.

    Raises:
        SourceError: a pattern whose suffix tells no kind, or a folder that can't be read.
    """
    if is_pattern(path):
        return _kind_of_pattern(path)
    try:
        if is_delta(path):
            return "table"
        names = _names_below(path, selection)
        return (_kind_of_name(path) or "files") if names is None else _kind_of_names(names)
    except FetchError as error:
        raise listing_error(error) from None


def is_delta(path: str) -> bool:
    """Whether a folder holds a Delta transaction log."""
    if is_remote(path):
        from embedder.sources.object_listing import stream_names

        return next(stream_names(f"{path}/{_DELTA_LOG}"), None) is not None
    return os.path.isdir(os.path.join(path, _DELTA_LOG))  # noqa: PTH112, PTH118


def is_hidden(name: str) -> bool:
    """Whether a name is bookkeeping by the convention of Spark and Arrow: some part starts with `_` or `.`."""
    return any(part.startswith(("_", ".")) for part in name.split("/"))


def _kind_of_pattern(path: str) -> Kind:
    kind = _kind_of_name(path)
    if kind is None:
        raise SourceError(
            f'{path}: the suffix of this pattern tells no kind; set kind = "files", "table" or "webdataset"'
        )
    return kind


def _kind_of_name(name: str) -> Kind | None:
    lower = name.lower()
    if lower.endswith((".tar", *PACKED_TAR_SUFFIXES)):
        return "webdataset"
    return "table" if lower.endswith(TABLE_SUFFIXES) else None


def _kind_of_names(names: Iterable[str]) -> Kind:
    """Stop at the first name that fits no kind: a folder of photographs is told by its first one."""
    suffixes: set[str] = set()
    for name in names:
        if is_hidden(name):
            continue
        kind = _kind_of_name(name)
        suffixes.add("tar" if kind == "webdataset" else name.lower().rpartition(".")[2])
        if kind is None or len(suffixes) > 1:
            return "files"
    if not suffixes:
        return "files"
    return "webdataset" if suffixes == {"tar"} else "table"


def _names_below(path: str, selection: Selection) -> Iterator[str] | None:
    """Stream the names in a folder that may tell its kind; None for what is no folder."""
    names = _all_names_below(path, selection)
    return None if names is None else (name for name in names if selection.judge(name).verdict not in ("own", "junk"))


def _all_names_below(path: str, selection: Selection) -> Iterator[str] | None:
    if not is_remote(path):
        is_folder = os.path.isdir(path)  # noqa: PTH112
        return (entry.name for entry in walk_folder(path, selection.skips)) if is_folder else None
    from embedder.sources.object_listing import find_object, stream_names

    return None if find_object(path) else stream_names(path)
