"""Finds the files a path means: one file, a folder of them, or a pattern with braces and wildcards."""

import glob
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, product, takewhile

from embedder.errors import SourceError
from embedder.sources.listing_schema import file_version
from embedder.sources.local_listing import Entry, SkipsFolder, look_at, walk_folder
from embedder.sources.source_errors import listing_errors
from embedder.storage.object_stores import is_remote

MAX_BRACE_NAMES = 1_000_000
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)\Z")
_MAGIC = re.compile(r"[*?\[{]")


@dataclass(frozen=True)
class GlobMatches:
    """The entries a path means, and the folder (or URI) that their names are relative to."""

    root: str
    entries: Iterator[Entry]
    is_folder: bool = False
    is_named: bool = False
    """Whether the path names exactly this one file."""

    def uri(self, entry: Entry) -> str:
        """Return the full path of an entry."""
        return f"{self.root.rstrip('/')}/{entry.name}"


def is_pattern(path: str) -> bool:
    """Return whether the path holds braces or wildcards; a local file of exactly that name takes precedence."""
    return bool(_MAGIC.search(path)) and (is_remote(path) or not os.path.lexists(path))


@listing_errors()
def find_entries(path: str, skips: SkipsFolder) -> GlobMatches:
    """Find what a path means: a file, everything below a folder, or all matches of a pattern; may raise a SourceError.

    `skips` selects folders that aren't entered, except in a bucket, where that saves nothing.
    """
    return _find_remote(path) if is_remote(path) else _find_local(path, skips)


@listing_errors()
def find_one(root: str, name: str) -> Entry | None:
    """Look up a file or object below a root; None if missing, a SourceError if the object store doesn't answer."""
    if not is_remote(root):
        return look_at(root, name, os.path.realpath(root))
    from embedder.sources.object_listing import find_object

    entry = find_object(f"{root}/{name}")
    return entry._replace(name=name) if entry else None


def expand_braces(pattern: str) -> list[str]:
    """Expand `{000..099}` (zeros kept) and `{a,b}`; several braces give their product, and they don't nest.

    Raises a SourceError if a range runs backwards, or there would be more than a million names.
    """
    pieces = _BRACES.split(pattern)
    choices = [_brace_choices(body, pattern) for body in pieces[1::2]]
    if math.prod(map(len, choices)) > MAX_BRACE_NAMES:
        raise SourceError(f"{pattern}: the braces name more than {MAX_BRACE_NAMES:,} files; narrow the ranges")
    literals = pieces[0::2]
    return [literals[0] + "".join(map(str.__add__, chosen, literals[1:])) for chosen in product(*choices)]


def _brace_choices(body: str, pattern: str) -> list[str]:
    match = _RANGE.match(body)
    if match is None:
        return body.split(",") if "," in body else ["{" + body + "}"]
    first, last = int(match[1]), int(match[2])
    if last < first:
        raise SourceError(f"{pattern}: the range {{{body}}} runs backwards; write the smaller number first")
    if last - first >= MAX_BRACE_NAMES:
        raise SourceError(f"{pattern}: the braces name more than {MAX_BRACE_NAMES:,} files; narrow the ranges")
    return [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]


def _find_local(path: str, skips: SkipsFolder) -> GlobMatches:
    if os.path.isdir(path):  # noqa: PTH112
        return GlobMatches(path, walk_folder(path, skips), is_folder=True)
    if os.path.lexists(path):
        return GlobMatches(os.path.dirname(path), iter([_single(path)]), is_named=True)  # noqa: PTH120
    if not _MAGIC.search(path):
        raise SourceError(f"{path}: there is no such file or folder; check the path, and that its disk is mounted")
    return _found_by_pattern(path)


def _find_remote(path: str) -> GlobMatches:
    from embedder.sources.object_listing import find_object, walk_objects

    if entry := find_object(path):
        return GlobMatches(path.rpartition("/")[0], iter([entry]), is_named=True)
    if _MAGIC.search(path):
        return _found_by_pattern(path)
    entries = walk_objects(path)
    first = next(entries, None)
    if first is None:
        raise SourceError(f"{path}: there is no object or folder of this name; check bucket and prefix")
    return GlobMatches(path, chain([first], entries), is_folder=True)


def _found_by_pattern(path: str) -> GlobMatches:
    root = fixed_root(path)
    entries: dict[str, Entry] = {}
    for pattern in expand_braces(path):
        try:
            found = list(_matching(pattern, root))
        except re.error as error:
            raise SourceError(f"{pattern}: this pattern can't be read ({error}); correct its brackets") from None
        if not found:
            raise SourceError(f"{pattern}: no file of this name or pattern; check the path and the range in braces")
        entries |= {entry.name: entry for entry in found}
    return GlobMatches(root, iter(entries.values()))


def _matching(pattern: str, root: str) -> Iterator[Entry]:
    start = len(root.rstrip("/")) + 1
    if not glob.has_magic(pattern):
        if entry := find_one(root, pattern[start:]):
            yield entry
    elif is_remote(root):
        from embedder.sources.object_listing import walk_objects

        matcher = glob_regex(pattern)
        yield from (entry for entry in walk_objects(root) if matcher.match(f"{root}/{entry.name}"))
    else:
        yield from _below(root, pattern[start:])


def _below(root: str, pattern: str) -> list[Entry]:
    """Return the files that a relative pattern matches; links and unreadable folders are treated as in a folder."""
    if not os.path.isdir(root):  # noqa: PTH112
        return []
    pattern = f"{pattern}/*" if pattern.endswith("**") else pattern
    parts = pattern.split("/")
    fixed = [glob_regex(part) for part in takewhile("**".__ne__, parts)]
    shows = any(part.startswith(".") for part in parts)

    def skips(folder: str) -> bool:
        names = folder.split("/")
        return (
            (names[-1].startswith(".") and not shows)
            or ("**" not in parts and len(names) >= len(parts))
            or not all(matcher.match(name) for matcher, name in zip(fixed, names, strict=False))
        )

    matcher = glob_regex(pattern)
    found = (entry for entry in walk_folder(root, skips) if matcher.match(entry.name))
    return sorted(entry for entry in found if shows or not entry.name.rpartition("/")[2].startswith("."))


def fixed_root(pattern: str) -> str:
    """Return the folder above the first brace or wildcard; ids are relative to it."""
    match = _MAGIC.search(pattern)
    return pattern[: match.start() if match else None].rpartition("/")[0] or "/"


def glob_regex(pattern: str) -> re.Pattern[str]:
    """Translate a wildcard pattern as `glob` reads it: `*` and `?` stop at `/`, `**/` crosses it."""
    tokens = re.split(r"(\*\*/|\*|\?|\[!?[^\]/]+\])", pattern)
    simple = {"**/": "(?:[^/]+/)*", "*": "[^/]*", "?": "[^/]"}
    parts = [
        simple.get(token) or (token.replace("[!", "[^") if token.startswith("[") else re.escape(token))
        for token in tokens
    ]
    return re.compile("".join(parts) + r"\Z", re.DOTALL)


def _single(path: str) -> Entry:
    """Look up a file that the user named; a link is followed wherever it leads."""
    name = os.path.basename(path)  # noqa: PTH119
    try:
        status = os.stat(path)  # noqa: PTH116
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}; check the path, and that its disk is mounted") from None
    if not os.path.isfile(path):  # noqa: PTH113
        raise SourceError(f"{path}: this is neither a regular file nor a folder; name one of those")
    return Entry(name, status.st_size, file_version(status))
