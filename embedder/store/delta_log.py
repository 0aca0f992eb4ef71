"""Log of a table: replay in one pass, and changes in place, after which versions keep their numbers and their files."""

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from io import BytesIO
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from embedder.store.files import StoreFiles
from embedder.store.journal import PartFile

LOG_FOLDER = "_delta_log"

Action = dict[str, Any]
"""Line of a log entry, or row of a checkpoint, in which all kinds but its own are null."""


def replay(
    files: StoreFiles, table: str, wanted: Collection[int], without: Collection[str] = ()
) -> Iterator[tuple[int, set[str]]] | None:
    """Replay the log for some versions of a table; opening each separately would replay it for each.

    Args:
        files: the store.
        table: its name.
        wanted: the versions.
        without: part files that are left out, relative to the table's folder.

    Returns:
        Each version and the part files that it holds, relative to the table's folder, in a set that changes with the
        next version; None where the log does not reach back to its first entry.
    """
    entries = [f"{table}/{LOG_FOLDER}/{number:020d}.json" for number in range(max(wanted, default=-1) + 1)]
    if not {info.path for info in files.list(f"{table}/{LOG_FOLDER}")}.issuperset(entries):
        return None
    return _replayed(files, entries, wanted, without)


def _replayed(
    files: StoreFiles, entries: Sequence[str], wanted: Collection[int], without: Collection[str]
) -> Iterator[tuple[int, set[str]]]:
    held: set[str] = set()
    for number, changes in enumerate(files.stream(lambda path: _changes(files, path), entries)):
        added, removed = changes
        held.difference_update(removed)
        held.update(path for path in added if path not in without)
        if number in wanted:
            yield number, held


def _changes(files: StoreFiles, path: str) -> tuple[list[str], list[str]]:
    """Part files that an entry adds, and those that it removes."""
    added, removed = [], []
    for action in read_actions(files, path)[0]:
        if "add" in action:
            added.append(action["add"]["path"])
        elif "remove" in action:
            removed.append(action["remove"]["path"])
    return added, removed


def places_of(files: StoreFiles, table: str, paths: Collection[str]) -> dict[str, set[str]]:
    """Path of each part file -> log files that add it to the table.

    Args:
        files: the store.
        table: name of the table.
        paths: part files, relative to the table's folder.
    """
    places: dict[str, set[str]] = {path: set() for path in paths}
    for info in files.list(f"{table}/{LOG_FOLDER}"):
        if not info.path.endswith((".json", ".parquet")):  # `_last_checkpoint` names no file
            continue
        for action in read_actions(files, info.path)[0]:
            added = (action.get("add") or {}).get("path")
            if added in places:
                places[added].add(info.path)
    return places


def restate_parts(files: StoreFiles, log_path: str, parts: Mapping[str, PartFile]) -> None:
    """Write the new size and statistics of some part files into a log file.

    Args:
        files: the store.
        log_path: path of the log file.
        parts: new entries by path.
    """

    def restated(action: Action) -> Action:
        add = action.get("add")
        if not add or add["path"] not in parts:
            return action
        part = parts[add["path"]]
        fields = {"size": part.size_bytes, "stats": part.stats, "modificationTime": int(time.time() * 1000)}
        return action | {"add": add | fields | _unparsed(add)}

    change_log(files, log_path, restated)


def change_log(files: StoreFiles, log_path: str, change: Callable[[Action], Action]) -> None:
    """Rewrite a log file, with each action changed.

    Args:
        files: the store.
        log_path: path of the log file.
        change: function from an action to its replacement.
    """
    actions, schema = read_actions(files, log_path)
    changed = map(change, actions)
    if schema is None:
        files.write(log_path, "\n".join(map(json.dumps, changed)).encode())
    else:
        files.write_table(log_path, pa.Table.from_pylist(list(changed), schema=schema))


def without_bounds(action: Action) -> Action:
    """Copy of an action without the least and greatest values of its part file."""
    kind = "add" if action.get("add") else "remove"
    stats = json.loads(action[kind]["stats"]) | {"minValues": {}, "maxValues": {}}
    return action | {kind: action[kind] | {"stats": json.dumps(stats)} | _unparsed(action[kind])}


def _unparsed(file_action: Action) -> Action:
    """Fields that clear the second copy of the statistics, which checkpoints of other programs may have as columns."""
    return {"stats_parsed": None} if "stats_parsed" in file_action else {}


def read_actions(files: StoreFiles, log_path: str) -> tuple[Iterator[Action], pa.Schema | None]:
    """Read the actions of a log file; of a checkpoint, its columns too."""
    content = files.read(log_path)
    if log_path.endswith(".parquet"):
        rows = pq.read_table(BytesIO(content))
        return iter(rows.to_pylist()), rows.schema
    return (json.loads(line) for line in content.decode().splitlines() if line.strip()), None
