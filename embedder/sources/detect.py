"""Detection of a source's kind where its configuration does not name it."""

import os
from collections.abc import Iterable, Iterator

from embedder.config import SourceKind
from embedder.errors import SourceError
from embedder.sources.errors import FetchError
from embedder.sources.file_names import is_hidden
from embedder.sources.globbing import is_pattern, listing_error
from embedder.sources.kinds import KINDS, OTHER_FILES
from embedder.sources.local_listing import walk_folder
from embedder.sources.selection import Selection
from embedder.storage.object_stores import is_remote

Format = tuple[SourceKind, int]
"""A kind, and which of its formats."""


def detect_kind(path: str, selection: Selection) -> SourceKind:
    """Detect the kind of a source from its path and, for a folder, from its content.

    A folder with a transaction log is a Delta table; one of nothing but tars, or nothing but table files of one
    format, is that; any other folder is files, and so is a single file of no other kind. Junk and the run's own files
    tell nothing.

    Args:
        path: as `normalise_source` gives it.
        selection: of the files below it.

    Raises:
        SourceError: a pattern whose suffix tells no kind, or a folder that can't be read.
    """
    if is_pattern(path):
        return _kind_of_pattern(path)
    try:
        for kind, entry in KINDS.items():
            if entry.is_folder is not None and entry.is_folder(path):
                return kind
        names = _names_below(path, selection)
        if names is not None:
            return _kind_of_names(names)
        found = _format_of(path)
        return found[0] if found else OTHER_FILES
    except FetchError as error:
        raise listing_error(error) from None


def _kind_of_pattern(path: str) -> SourceKind:
    found = _format_of(path)
    if found is None:
        *first, last = (f'"{kind}"' for kind in sorted(KINDS))
        raise SourceError(f"{path}: the suffix of this pattern tells no kind; set kind = {', '.join(first)} or {last}")
    return found[0]


def _format_of(name: str) -> Format | None:
    """Find the format of a file by its suffix; None where the suffix tells none."""
    lower = name.lower()
    formats = ((kind, number, suffixes) for kind in KINDS for number, suffixes in enumerate(KINDS[kind].formats))
    return next(((kind, number) for kind, number, suffixes in formats if lower.endswith(suffixes)), None)


def _kind_of_names(names: Iterable[str]) -> SourceKind:
    """Stop at the first name that fits no kind: a folder of photographs is recognised by its first one."""
    formats: set[Format | None] = set()
    for name in names:
        if is_hidden(name):
            continue
        formats.add(_format_of(name))
        if None in formats or len(formats) > 1:
            return OTHER_FILES
    found = formats.pop() if formats else None
    return found[0] if found else OTHER_FILES


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
