"""Files that nothing needs: unfinished ones, and part files and deletion vectors of no version or unfinished run."""

import re
from collections.abc import Collection, Mapping, Sequence

from embedder.plugins.maintain.store_check.findings import Finding, format_names
from embedder.plugins.maintain.store_check.scope import Listing
from embedder.quantities import agree, plural, size_text
from embedder.store.backends import is_unfinished
from embedder.store.publish.history import run_of
from embedder.store.schema import TABLES
from embedder.store.tables.models import MODELS_FOLDER

BUILDING = "/.building-"
_TABLE = rf"(?P<folder>(?:{MODELS_FOLDER}/[^/]+/)?(?:{'|'.join(TABLES)}))"
_PART = re.compile(rf"{_TABLE}/(?P<name>[^/]+\.parquet)")
_VECTORS = re.compile(rf"{_TABLE}/(?P<name>part-[^/]+-marked/[^/]+\.bin)")


def leftovers(
    listing: Listing, added: Mapping[str, Collection[str]], unfinished: Sequence[str], option: str, *, is_writing: bool
) -> list[Finding]:
    """Return findings on files that nothing needs.

    `added` maps the folder of each table with a complete log to the files of any version, relative to that folder.
    `unfinished` are ids of runs that may be continued; `option` selects the store on a command line. If a writer is at
    work (`is_writing`), files may be its own.
    """
    temporary = [path for path in listing if is_unfinished(path)]
    building = [path for path in listing if BUILDING in f"/{path}"]
    parts, vectors = (_list_unneeded(listing, pattern, added, unfinished) for pattern in (_PART, _VECTORS))
    whose = "they may be those of the writer at work; else " if is_writing else ""
    vacuum = f"{whose}`embedder vacuum {option}` deletes {{}}"
    built = f"{whose}the next index that is made deletes {{}}"
    kinds = (
        (temporary, "unfinished file", "a file is renamed once it is whole", vacuum),
        (parts, "part file", "each part file is of a version, or of a run in progress", vacuum),
        (vectors, "file of deletion vectors", "each is of a version, or of a run in progress", vacuum),
        (building, "file of an index that was cut off", "an index is renamed once it is whole", built),
    )
    return [_finding(listing, paths, noun, rule, cure) for paths, noun, rule, cure in kinds if paths]


def _list_unneeded(
    listing: Listing, pattern: re.Pattern[str], added: Mapping[str, Collection[str]], unfinished: Sequence[str]
) -> list[str]:
    needed = {f"{folder}/{path}" for folder, paths in added.items() for path in paths}
    matches = (found for path in listing if (found := pattern.fullmatch(path)) is not None)
    others = (found for found in matches if found["folder"] in added and found[0] not in needed)
    return [found[0] for found in others if run_of(found["name"]) not in unfinished]


def _finding(listing: Listing, paths: Sequence[str], noun: str, rule: str, cure: str) -> Finding:
    """Finding on files of one kind; `cure` has a placeholder for them."""
    number, size = len(paths), size_text(sum(listing[path] for path in paths))
    text = f"{plural(number, noun, noun.replace('file', 'files', 1))} that nothing needs, {size}"
    place = paths[0] if number == 1 else _common_folder(paths)
    they = agree(number, "it", "them")
    return Finding("note", place, f"{text}: {format_names(sorted(paths))}", rule, cure.format(they))


def _common_folder(paths: Sequence[str]) -> str:
    folders = {path.rpartition("/")[0] for path in paths}
    return folders.pop() or "." if len(folders) == 1 else "."
