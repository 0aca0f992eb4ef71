"""Deletion of files in two steps, so that no writer that was overtaken can delete what is readable.

The files are listed in `deletions/<token>.json`, and a change of CURRENT.json names the list. From then on nothing may
refer to them, and no file of their names is ever made again; so anybody may delete them, at any later time and more
than once. The list goes last, and with the next change of CURRENT.json its name.
"""

import json
from collections.abc import Iterable, Sequence

from embedder.errors import StoreError
from embedder.store.backends import FileInfo, is_unfinished
from embedder.store.files import StoreFiles
from embedder.store.layout import Current, read_current
from shards.schema import parse_json

DELETIONS_FOLDER = "deletions"


def list_deletion(files: StoreFiles, paths: Sequence[str]) -> tuple[str, ...]:
    """Write a list of files that are to go; a change of CURRENT.json must name it before any of them is deleted.

    Args:
        files: the store.
        paths: of the files, relative to the store, in the order in which they go.

    Returns:
        The list's name, for `Current.deleting`; nothing where there is no file.
    """
    if not paths:
        return ()
    token = files.environment.token(8)
    files.create(_list_file(token), json.dumps([*paths]).encode())
    return (token,)


def listed_files(files: StoreFiles, current: Current | None) -> frozenset[str]:
    """Files that are to go, by what is published: they count as deleted."""
    names = current.deleting if current is not None else ()
    return frozenset(path for name in names for path in _read_list(files, name) or ())


def unnamed_lists(files: StoreFiles, current: Current) -> list[FileInfo]:
    """Lists that no change of CURRENT.json came to name, as their writers were killed or overtaken before it.

    Args:
        files: the store.
        current: what is published; where it is the same when they are to go, none of them can be named later.
    """
    named = {_list_file(name) for name in current.deleting}
    return [info for info in files.list(DELETIONS_FOLDER) if info.path not in named and not is_unfinished(info.path)]


def open_lists(files: StoreFiles, names: Iterable[str]) -> tuple[str, ...]:
    """Those of some lists whose files are not all deleted yet."""
    return tuple(name for name in names if files.exists(_list_file(name)))


def delete_listed(files: StoreFiles) -> None:
    """Delete the files that are to go, by what is published."""
    current = read_current(files.main)
    for name in current.deleting if current is not None else ():
        paths = _read_list(files.main, name)
        if paths is None:
            continue
        # A folder's manifest goes first, without which the rest is nothing.
        files.main.delete_each(path for path in paths if path.endswith("/manifest.json"))
        files.main.delete_each(path for path in paths if not path.endswith("/manifest.json"))
        files.main.delete(_list_file(name))


def _read_list(files: StoreFiles, name: str) -> list[str] | None:
    """Paths of a list; None where they are deleted.

    Raises:
        StoreError: it is damaged.
    """
    path = _list_file(name)
    try:
        found = parse_json(files.read(path))
    except FileNotFoundError:
        return None
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise StoreError(f"{files.uri(path)}: damaged, a list of paths is due; delete it, and run `embedder vacuum`")
    return found


def _list_file(name: str) -> str:
    return f"{DELETIONS_FOLDER}/{name}.json"
