"""Replay of a table's log in one pass: the part files of its versions, and whether all of them exist."""

import json
from collections.abc import Collection, Iterator
from itertools import takewhile
from typing import Any

from embedder.store.files import StoreFiles

LOG_FOLDER = "_delta_log"


def whole_versions(files: StoreFiles, table: str, wanted: Collection[int], there: Collection[str]) -> set[int] | None:
    """Versions of a table whose files all exist; opening each separately would replay the log for each.

    Args:
        files: the store.
        table: its name.
        wanted: versions to check.
        there: part files that exist, relative to the table's folder.

    Returns:
        Those of the wanted versions that are whole; None where the log does not reach back to its first entry.
    """
    last = max(wanted, default=-1)
    if not _reaches_back(files, table, last):
        return None
    whole, missing = set(), set()
    for number, actions in _entries(files, table, last):
        for action in actions:
            if "remove" in action:
                missing.discard(action["remove"]["path"])
            elif "add" in action and action["add"]["path"] not in there:
                missing.add(action["add"]["path"])
        if number in wanted and not missing:
            whole.add(number)
    return whole


def held_at(
    files: StoreFiles, table: str, wanted: Collection[int], among: Collection[str]
) -> dict[int, set[str]] | None:
    """Part files, among some, that each version of a table holds.

    Args:
        files: the store.
        table: its name.
        wanted: the versions.
        among: part files to look for, relative to the table's folder.

    Returns:
        Version -> those of the part files; None where the log does not reach back to its first entry.
    """
    last = max(wanted, default=-1)
    if not _reaches_back(files, table, last):
        return None
    found: dict[int, set[str]] = {}
    held: set[str] = set()
    for number, actions in _entries(files, table, last):
        held -= {action["remove"]["path"] for action in actions if "remove" in action}
        held |= {path for action in actions if "add" in action and (path := action["add"]["path"]) in among}
        if number in wanted:
            found[number] = set(held)
    return found


def _reaches_back(files: StoreFiles, table: str, last: int) -> bool:
    names = {info.path.rpartition("/")[2] for info in files.list(f"{table}/{LOG_FOLDER}")}
    return len(list(takewhile(lambda number: _entry(number) in names, range(last + 1)))) > last


def _entries(files: StoreFiles, table: str, last: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    for number in range(last + 1):
        lines = files.read(f"{table}/{LOG_FOLDER}/{_entry(number)}").splitlines()
        yield number, [json.loads(line) for line in lines if line.strip()]


def _entry(version: int) -> str:
    return f"{version:020d}.json"
