"""Registry of source kinds, and detection of the kind if the configuration doesn't name it.

A new kind needs a name in `SourceKind`, a module that lists it, and its entry in `KINDS`.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from embedder.config_toml.run_sections import SourceConfig, SourceKind
from embedder.errors import SourceError
from embedder.sources.file_names import is_hidden, is_shard_statistics
from embedder.sources.folder_items import list_files
from embedder.sources.globbing import is_pattern
from embedder.sources.listing_schema import Listing
from embedder.sources.local_listing import walk_folder
from embedder.sources.selection import Selection
from embedder.sources.source_errors import listing_errors
from embedder.sources.table_files import is_card, is_delta
from embedder.sources.table_formats import FORMATS
from embedder.sources.table_items import list_table
from embedder.sources.tar_scan import PACKED_TAR_SUFFIXES
from embedder.sources.webdataset import list_tars
from embedder.storage.object_stores import is_remote

ListSource = Callable[[SourceConfig, str, Selection], Listing]
"""Takes the source, its normalised path and its selection; may raise a SourceError."""


@dataclass(frozen=True)
class KindEntry:
    """One kind of source.

    `keys` are those of `columns`, `carryover`, `include` and `exclude` that this kind supports. `formats` are
    lower-case suffixes, grouped by format; a folder with files of one format is of this kind. `is_folder` recognises a
    folder of this kind without looking at its file names.
    """

    list_source: ListSource
    keys: frozenset[str]
    formats: tuple[tuple[str, ...], ...] = ()
    is_folder: Callable[[str], bool] | None = None


KINDS: dict[SourceKind, KindEntry] = {
    "table": KindEntry(
        list_table, frozenset({"columns", "carryover"}), tuple((suffix,) for suffix in FORMATS), is_folder=is_delta
    ),
    "webdataset": KindEntry(list_tars, frozenset({"carryover"}), ((".tar", *PACKED_TAR_SUFFIXES),)),
    "files": KindEntry(list_files, frozenset({"include", "exclude"})),
}
OTHER_FILES: SourceKind = "files"
"""The kind of everything that no entry recognises."""

Format = tuple[SourceKind, int]
"""A kind, and the index of one of its formats."""

TARS: Format = ("webdataset", 0)


@listing_errors()
def detect_kind(path: str, selection: Selection) -> SourceKind:
    """Detect the kind of a source from its path and, for a folder, from its content; raises a SourceError.

    A folder with a transaction log is a Delta table. A folder that holds only tars, or only table files of one format,
    is of that kind; tars may have tables of the same names next to them, as img2dataset writes them. Any other folder
    or single file is `files`. Junk, the run's own files, data set descriptions and statistics are ignored.
    """
    if is_pattern(path):
        return _kind_of_pattern(path)
    for kind, entry in KINDS.items():
        if entry.is_folder is not None and entry.is_folder(path):
            return kind
    names = _names_below(path, selection)
    if names is not None:
        return _kind_of_names(names)
    found = _format_of(path)
    return found[0] if found else OTHER_FILES


def _kind_of_pattern(path: str) -> SourceKind:
    found = _format_of(path)
    if found is None:
        *first, last = (f'"{kind}"' for kind in sorted(KINDS))
        raise SourceError(f"{path}: the suffix of this pattern names no kind; set kind = {', '.join(first)} or {last}")
    return found[0]


def _format_of(name: str) -> Format | None:
    lower = name.lower()
    formats = ((kind, number, suffixes) for kind in KINDS for number, suffixes in enumerate(KINDS[kind].formats))
    return next(((kind, number) for kind, number, suffixes in formats if lower.endswith(suffixes)), None)


def _kind_of_names(names: Iterable[str]) -> SourceKind:
    """Return the kind, stopping at the first name that fits none: a folder of photographs needs only one name."""
    stems: dict[Format, set[str]] = {}
    for name in names:
        if is_hidden(name) or is_card(name) or is_shard_statistics(name):
            continue
        found = _format_of(name)
        if found is None:
            return OTHER_FILES
        stems.setdefault(found, set()).add(name.rpartition(".")[0])
        if len(stems) > 2 or (len(stems) == 2 and TARS not in stems):
            return OTHER_FILES
    if not stems:
        return OTHER_FILES
    tars = stems.pop(TARS, None)
    if tars is None:
        return next(iter(stems))[0]
    return TARS[0] if all(each <= tars for each in stems.values()) else OTHER_FILES


def _names_below(path: str, selection: Selection) -> Iterator[str] | None:
    """Stream the names in a folder that may reveal its kind; None for anything but a folder."""
    if is_remote(path):
        from embedder.sources.object_listing import find_object, stream_names

        names = None if find_object(path) else stream_names(path)
    else:
        is_folder = os.path.isdir(path)  # noqa: PTH112
        names = (entry.name for entry in walk_folder(path, selection.skips)) if is_folder else None
    return None if names is None else (name for name in names if selection.judge(name).verdict not in ("own", "junk"))
