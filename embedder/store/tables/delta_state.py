"""State of a table at one version: its columns and files, by its log.

The log consists of JSON entries, and checkpoints of one or several Parquet files. Reading it here spares readers
deltalake, which is 130 MB and only for writers (`embedder.store.tables.tables`).
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, reduce
from io import BytesIO
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from embedder.store.files import StoreFiles
from embedder.store.tables.deletion_vectors import FEATURE, vector_of
from embedder.store.tables.delta_log import LOG_FOLDER, Action, entry_file, last_checkpoint, parse_entry
from shards.file_schema import parse_json

READER_VERSIONS, READER_FEATURES = (1, 3), frozenset({"timestampNtz", "variantType", FEATURE})
"""Features that may be named. deltalake names `variantType` as it sets a property; a column of that type is refused."""
CHECKPOINT_COLUMNS = ["add.path", "add.size", "add.stats", "add.deletionVector", "protocol", "metaData", "txn"]

_ENTRY = re.compile(r"(\d{20})\.json")
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint(?:\.\d{10}\.(\d{10}))?\.parquet")
_DECIMAL = re.compile(r"decimal\((\d+),\s*(\d+)\)")
_TYPES: dict[str, pa.DataType] = {
    "byte": pa.int8(),
    "short": pa.int16(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}


class LogError(Exception):
    """The log lacks an entry, is damaged, or another tool wrote it in a way that the store's tables don't use."""


class TableState(NamedTuple):
    """Table at one version.

    `adds` maps each part file's path to its log entry; `transactions` maps each run id with a commit in the table to 1.
    `protocol` and `metadata` are the last actions of these kinds.
    """

    version: int
    schema: pa.Schema
    adds: dict[str, Action]
    transactions: dict[str, int]
    protocol: Action
    metadata: Action


def read_state(files: StoreFiles, table: str, version: int | None = None) -> TableState | None:
    """Replay the log of a table from its last checkpoint on; None means the newest version.

    Returns None if the table has no log. Raises LogError if the version doesn't exist or can't be read.
    """
    first = last_checkpoint(files, table)
    if version is not None and not first:
        with suppress(FileNotFoundError):  # without a checkpoint, the entries that a version needs are known
            return _read_version(files, table, version, {})
    entries, checkpoints = _list_log(files, table, first)
    if first and not any(version is None or number <= version for number in checkpoints):
        entries, checkpoints = _list_log(files, table)
    newest = max([*entries, *checkpoints], default=None)
    if newest is None:
        return None
    try:
        return _read_version(files, table, newest if version is None else version, checkpoints)
    except FileNotFoundError as error:
        name = str(error).rpartition("/")[2]
        entry = _ENTRY.fullmatch(name)
        raise LogError(f"the log lacks entry {int(entry[1])}" if entry else f"the log lacks {name}") from None


def _read_version(files: StoreFiles, table: str, version: int, checkpoints: Mapping[int, Sequence[str]]) -> TableState:
    """Read a version from a checkpoint and the entries after it, by number: a listing may lack the newest ones.

    Raises FileNotFoundError if one of them is missing, and LogError if one can't be read.
    """
    base = max((number for number in checkpoints if number <= version), default=-1)
    paths = [*checkpoints.get(base, ()), *(entry_file(table, number) for number in range(base + 1, version + 1))]
    contents = files.each(files.read, paths)
    try:
        return _state_at(version, tuple(paths), tuple(contents))
    except (ValueError, LookupError, TypeError, pa.ArrowException) as error:
        raise LogError(f"{type(error).__name__}: {error}") from None


def advance(state: TableState | None, entry: bytes) -> TableState:
    """Return the state after the next log entry (None: before the first); LogError if it can't be read."""
    try:
        return _replay(state, 0 if state is None else state.version + 1, [parse_entry(entry)])
    except (ValueError, LookupError, TypeError) as error:
        raise LogError(f"{type(error).__name__}: {error}") from None


def _list_log(files: StoreFiles, table: str, first: int = 0) -> tuple[dict[int, str], dict[int, list[str]]]:
    entries: dict[int, str] = {}
    parts: dict[tuple[int, int], list[str]] = defaultdict(list)
    folder = f"{table}/{LOG_FOLDER}"
    for info in files.list(folder, f"{folder}/{first:020d}" if first else None):
        name = info.path.rpartition("/")[2]
        if found := _ENTRY.fullmatch(name):
            entries[int(found[1])] = info.path
        elif found := _CHECKPOINT.fullmatch(name):
            parts[int(found[1]), int(found[2] or 1)].append(info.path)
    return entries, {number: paths for (number, total), paths in parts.items() if len(paths) == total}


def _parse_actions(path: str, content: bytes) -> list[Action]:
    """Parse an entry, or the columns of a checkpoint that matter here, into actions."""
    if path.endswith(".json"):
        return parse_entry(content)
    rows = pq.ParquetFile(BytesIO(content)).read(CHECKPOINT_COLUMNS)
    is_any = reduce(pc.or_, (rows[name].is_valid() for name in rows.column_names))  # rows of removed files say nothing
    return [
        {kind: action for kind, action in row.items() if action is not None} for row in rows.filter(is_any).to_pylist()
    ]


def _state_at(version: int, paths: Sequence[str], contents: Sequence[bytes]) -> TableState:
    pieces = (_parse_actions(path, content) for path, content in zip(paths, contents, strict=True))
    return _replay(None, version, pieces)


def _replay(state: TableState | None, version: int, pieces: Iterable[Sequence[Action]]) -> TableState:
    """Apply log files one after the other; what a file removes was there before it: it may add it with other rows."""
    adds, transactions = ({}, {}) if state is None else (dict(state.adds), dict(state.transactions))
    protocol, metadata = ({}, {}) if state is None else (state.protocol, state.metadata)
    for actions in pieces:
        for path in [action["remove"]["path"] for action in actions if "remove" in action]:
            adds.pop(path, None)
        for action in actions:
            if "add" in action:
                vector_of(action["add"])
                adds[action["add"]["path"]] = action["add"]
            elif "protocol" in action:
                protocol = action["protocol"]
                _check_protocol(protocol)
            elif "metaData" in action:
                metadata = action["metaData"]
            elif "txn" in action:
                transactions[action["txn"]["appId"]] = action["txn"]["version"]
    same = state is not None and state.metadata is metadata
    schema = state.schema if state is not None and same else _schema(metadata["schemaString"])
    return TableState(version, schema, adds, transactions, protocol, metadata)


@lru_cache(maxsize=64)
def _schema(columns: str) -> pa.Schema:
    return pa.schema(map(_field, parse_json(columns)["fields"]))


def _check_protocol(protocol: Action) -> None:
    features = set(protocol.get("readerFeatures") or ()) - READER_FEATURES
    if protocol["minReaderVersion"] not in READER_VERSIONS or features:
        names = ", ".join(sorted(features)) or f"reader version {protocol['minReaderVersion']}"
        raise LogError(f"another tool has given it {names}, which the store's tables don't use")


def _field(column: dict[str, Any]) -> pa.Field:
    metadata = {key: str(value) for key, value in column["metadata"].items()} or None
    return pa.field(column["name"], _type(column["type"]), column["nullable"], metadata)


def _type(kind: Any) -> pa.DataType:
    if isinstance(kind, str):
        if found := _DECIMAL.fullmatch(kind):
            return pa.decimal128(int(found[1]), int(found[2]))
        return _TYPES[kind]
    if kind["type"] == "array":
        return pa.list_(pa.field("element", _type(kind["elementType"]), kind["containsNull"]))
    if kind["type"] == "map":
        return pa.map_(_type(kind["keyType"]), pa.field("value", _type(kind["valueType"]), kind["valueContainsNull"]))
    return pa.struct(list(map(_field, kind["fields"])))
