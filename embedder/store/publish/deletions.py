"""Deletion of files in two steps, so that no writer that was taken over can delete what is readable.

The files are listed in `deletions/<token>.json`, and a change of CURRENT.json names the list. From then on nothing may
refer to them, and no file with their names is ever made again; so anybody may delete them, at any later time and
repeatedly. The list is deleted last, and the next change of CURRENT.json drops its name.
"""

import json
from collections.abc import Iterable, Sequence

from embedder.errors import StoreError
from embedder.store.backends import FileInfo, is_unfinished
from embedder.store.files import StoreFiles
from embedder.store.layout import Current, read_current
from shards.file_schema import parse_json

DELETIONS_FOLDER = "deletions"


def list_deletion(files: StoreFiles, paths: Sequence[str]) -> tuple[str, ...]:
    """Write a list of files to delete; a change of CURRENT.json must name it before any of them is deleted.

    `paths` are relative to the store, in order of deletion. Returns the list's name for `Current.deleting`, nothing if
    there are no files.
    """
    if not paths:
        return ()
    token = files.environment.token(8)
    files.create(_list_file(token), json.dumps([*paths]).encode())
    return (token,)


def listed_files(files: StoreFiles, current: Current | None) -> frozenset[str]:
    """Return the files to delete according to what is published: they count as deleted."""
    names = current.deleting if current is not None else ()
    return frozenset(path for name in names for path in _read_list(files, name) or ())


def unnamed_lists(files: StoreFiles, current: Current) -> list[FileInfo]:
    """Return lists that CURRENT.json never came to name, as their writers were killed or overtaken before.

    If `current` is still published when the lists are deleted, none of them can be named later.
    """
    named = {_list_file(name) for name in current.deleting}
    return [info for info in files.list(DELETIONS_FOLDER) if info.path not in named and not is_unfinished(info.path)]


def open_lists(files: StoreFiles, names: Iterable[str]) -> tuple[str, ...]:
    """Return those of some lists whose files are not all deleted yet."""
    return tuple(name for name in names if files.exists(_list_file(name)))


def delete_listed(files: StoreFiles) -> None:
    """Delete the files that what is published lists for deletion."""
    current = read_current(files.main)
    for name in current.deleting if current is not None else ():
        paths = _read_list(files.main, name)
        if paths is None:
            continue
        # A folder's manifest goes first; without it the rest is nothing.
        files.main.delete_each(path for path in paths if path.endswith("/manifest.json"))
        files.main.delete_each(path for path in paths if not path.endswith("/manifest.json"))
        files.main.delete(_list_file(name))


def _read_list(files: StoreFiles, name: str) -> list[str] | None:
    path = _list_file(name)
    try:
        return parse_list(files.read(path))
    except FileNotFoundError:
        return None
    except ValueError:
        raise StoreError(
            f"{files.uri(path)}: damaged, a list of paths in the store is due; delete it, and run `embedder vacuum`"
        ) from None


def parse_list(content: bytes) -> list[str]:
    """Parse a list of files to delete; ValueError if it is none, or a path leads out of the store."""
    found = parse_json(content)
    if not isinstance(found, list) or not all(isinstance(each, str) and ".." not in each.split("/") for each in found):
        raise ValueError("a list of paths in the store is due")
    return found


def _list_file(name: str) -> str:
    return f"{DELETIONS_FOLDER}/{name}.json"
