"""Log of a table: replay in one pass, and changes in place after which versions keep their numbers and files."""

import json
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from embedder.store.backends import is_unfinished
from embedder.store.files import StoreFiles, parquet_bytes
from embedder.store.layout import swap_bytes
from embedder.store.part_file import PartFile
from embedder.store.tables.deletion_vectors import files_of, has_feature, with_feature
from shards.file_schema import parse_json

LOG_FOLDER = "_delta_log"
LAST_CHECKPOINT = "_last_checkpoint"

Action = dict[str, Any]
"""Line of a log entry, or row of a checkpoint, where all kinds but its own are null."""


def replay(
    files: StoreFiles, table: str, wanted: Collection[int], without: Collection[str] = ()
) -> Iterator[tuple[int, set[str]]] | None:
    """Replay the log once for all wanted versions of a table; opening each separately would replay it for each.

    Gives each version with its part files and files of deletion vectors, except `without` (all relative to the table's
    folder), in a set that changes with the next version. None if the log doesn't reach back to its first entry.
    """
    entries = [f"{table}/{LOG_FOLDER}/{number:020d}.json" for number in range(max(wanted, default=-1) + 1)]
    if not {info.path for info in files.list(f"{table}/{LOG_FOLDER}")}.issuperset(entries):
        return None
    return _replay(files, table, entries, wanted, without)


def _replay(
    files: StoreFiles, table: str, entries: Sequence[str], wanted: Collection[int], without: Collection[str]
) -> Iterator[tuple[int, set[str]]]:
    held: set[str] = set()
    vectors: dict[str, str] = {}  # part file -> file of its deletion vector, which several may share
    for number, changes in enumerate(files.stream(lambda path: _changes(files, table, path), entries)):
        added, removed = changes
        held.difference_update(removed)
        for path in removed if vectors else ():
            vectors.pop(path, None)
        held.update(path for path, *_ in added if path not in without)
        vectors.update((path, own[0]) for path, *own in added if own and own[0] not in without)
        if number in wanted:
            yield number, held.union(vectors.values()) if vectors else held


def _changes(files: StoreFiles, table: str, path: str) -> tuple[list[list[str]], list[str]]:
    """Return the files that an entry adds, each with that of its deletion vector, and those that it removes."""
    added, removed = [], []
    for action in read_actions(files, path)[0]:
        if "add" in action:
            added.append([*files_of(table, action["add"])])
        elif "remove" in action:
            removed.append(action["remove"]["path"])
    return added, removed


def places_of(files: StoreFiles, table: str, paths: Collection[str]) -> dict[str, set[str]]:
    """Return for each part file the log files that add it to the table."""
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
    """Write the new size and statistics of some part files into a log file."""

    def restate(action: Action) -> Action:
        add = action.get("add")
        if not add or add["path"] not in parts:
            return action
        part = parts[add["path"]]
        fields = {"size": part.size_bytes, "stats": part.stats, "modificationTime": int(time.time() * 1000)}
        return action | {"add": add | fields | _clear_parsed(add)}

    change_log(files, log_path, restate)


def change_log(files: StoreFiles, log_path: str, change: Callable[[Action], Action]) -> None:
    """Rewrite a log file, with each action changed."""

    def rewrite(content: bytes | None) -> bytes | None:
        if content is None:
            return None
        actions, schema = parse_actions(log_path, content)
        if schema is None:
            return "\n".join(map(json.dumps, map(change, actions))).encode()
        return parquet_bytes(pa.Table.from_pylist(list(map(change, actions)), schema=schema))

    swap_bytes(files, log_path, rewrite)


def without_bounds(action: Action) -> Action:
    """Copy an action without the lowest and highest values of its part file."""
    kind = "add" if action.get("add") else "remove"
    stats = parse_json(action[kind]["stats"]) | {"minValues": {}, "maxValues": {}}
    return action | {kind: action[kind] | {"stats": json.dumps(stats)} | _clear_parsed(action[kind])}


def _clear_parsed(file_action: Action) -> Action:
    """Return fields that clear the statistics' second copy, which other programs' checkpoints have as columns."""
    return {"stats_parsed": None} if "stats_parsed" in file_action else {}


def read_actions(files: StoreFiles, log_path: str) -> tuple[Iterator[Action], pa.Schema | None]:
    """Read the actions of a log file; for a checkpoint, its columns too."""
    return parse_actions(log_path, files.read(log_path))


def parse_actions(log_path: str, content: bytes) -> tuple[Iterator[Action], pa.Schema | None]:
    """Parse the content of a log file, as `read_actions` reads it."""
    if log_path.endswith(".parquet"):
        rows = pq.read_table(BytesIO(content))
        return iter(rows.to_pylist()), rows.schema
    return iter(parse_entry(content)), None


def parse_entry(content: bytes) -> list[Action]:
    """Parse the actions of an entry."""
    return [parse_json(line) for line in content.decode().split("\n") if line.strip()]


def entry_file(table: str, number: int) -> str:
    """Return the path of an entry of a table's log."""
    return f"{table}/{LOG_FOLDER}/{number:020d}.json"


def commit_entry(run_id: str, session: str, now_ms: int, actions: Sequence[Action]) -> bytes:
    """Return a log entry with some actions, which add and remove files."""
    info = {"timestamp": now_ms, "operation": "WRITE", "operationParameters": {"mode": "Append"}, "session": session}
    first = [{"commitInfo": info}, {"txn": {"appId": run_id, "version": 1, "lastUpdated": now_ms}}]
    return "\n".join(map(json.dumps, [*first, *actions])).encode()


def table_entry(schema: pa.Schema) -> bytes:
    """Return the first entry of a table's log, as deltalake writes it."""
    from deltalake import DeltaTable, Schema

    with tempfile.TemporaryDirectory() as folder:
        DeltaTable.create(folder, Schema.from_arrow(schema))
        return (Path(folder) / entry_file("", 0).lstrip("/")).read_bytes()


def columns_entry(files: StoreFiles, table: str, version: int, schema: pa.Schema, protocol: Action) -> bytes:
    """Return an entry that gives a table other columns; `protocol` is that of the version."""
    new = {kind: action for each in parse_entry(table_entry(schema)) for kind, action in each.items()}
    with _local_log(files, table, version) as folder:
        from deltalake import DeltaTable

        metadata = DeltaTable(str(folder)).metadata()
    if has_feature(protocol):
        new["protocol"] = with_feature(new["protocol"])
    fields = {"id": str(metadata.id), "configuration": metadata.configuration, "createdTime": metadata.created_time}
    return "\n".join(
        map(
            json.dumps,
            [{"commitInfo": new["commitInfo"]}, {"protocol": new["protocol"]}, {"metaData": new["metaData"] | fields}],
        )
    ).encode()


def put_checkpoint(files: StoreFiles, table: str, version: int) -> None:
    """Write a checkpoint of a version into the log, as deltalake does."""
    from deltalake import DeltaTable

    with _local_log(files, table, version) as folder:
        DeltaTable(str(folder)).create_checkpoint()
        name = f"{LOG_FOLDER}/{version:020d}.checkpoint.parquet"
        files.create(f"{table}/{name}", (folder / name).read_bytes())
        files.write(f"{table}/{LOG_FOLDER}/{LAST_CHECKPOINT}", (folder / LOG_FOLDER / LAST_CHECKPOINT).read_bytes())


@contextmanager
def _local_log(files: StoreFiles, table: str, version: int) -> Iterator[Path]:
    first = last_checkpoint(files, table)
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / LOG_FOLDER).mkdir()
        for info in files.list(f"{table}/{LOG_FOLDER}", f"{table}/{LOG_FOLDER}/{first:020d}" if first else None):
            own = info.path.rpartition("/")[2]
            is_older = own[:20].isdecimal() and int(own[:20]) <= version  # a file system has others: `.1.json.crc`
            if not is_unfinished(info.path) and (own == LAST_CHECKPOINT or is_older):
                (Path(name) / LOG_FOLDER / own).write_bytes(files.read(info.path))
        yield Path(name)


def last_checkpoint(files: StoreFiles, table: str) -> int:
    """Return the last checkpoint's number by the log, before which nothing need be listed; 0 if there is none."""
    try:
        return int(parse_json(files.read(f"{table}/{LOG_FOLDER}/{LAST_CHECKPOINT}"))["version"])
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return 0
