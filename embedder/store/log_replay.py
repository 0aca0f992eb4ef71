"""A table's log read once from its beginning: which of its versions have all their files."""

import json
from collections.abc import Collection
from itertools import takewhile

from embedder.store.files import StoreFiles

LOG_FOLDER = "_delta_log"


def whole_versions(files: StoreFiles, table: str, wanted: Collection[int], there: Collection[str]) -> set[int] | None:
    """Which versions of a table have all their files; opening each by itself would replay the log for each.

    Args:
        files: the store.
        table: its name.
        wanted: versions to judge.
        there: part files that are there, relative to the table's folder.

    Returns:
        Those of the wanted versions that are whole; none where the log does not reach back to its first entry.
    """
    names = {info.path.rpartition("/")[2] for info in files.list(f"{table}/{LOG_FOLDER}")}
    last = max(wanted, default=-1)
    entries = list(takewhile(lambda number: _entry(number) in names, range(last + 1)))
    if len(entries) <= last:
        return None
    whole, missing = set(), set()
    for number in entries:
        for line in files.read(f"{table}/{LOG_FOLDER}/{_entry(number)}").splitlines():
            action = json.loads(line)
            if "remove" in action:
                missing.discard(action["remove"]["path"])
            elif "add" in action and action["add"]["path"] not in there:
                missing.add(action["add"]["path"])
        if number in wanted and not missing:
            whole.add(number)
    return whole


def _entry(version: int) -> str:
    return f"{version:020d}.json"
