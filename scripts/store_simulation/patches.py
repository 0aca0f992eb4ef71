"""What is replaced in the code of the store: its work on rows, for speed, and one part of it where a fault is planted.

Part files of a simulated store are short lists, on which decisions take microseconds instead of milliseconds. What the
store decides with Arrow on the rows of a part file is replaced by the same decision on a list: which items of a run are
whole, which rows a publication replaces, which a purge takes. All else is the own code of the store: locks, records,
journals, logs, commits, publications, deletions, and the order of their effects. `tests/scripts/test_simulate_store.py`
compares both kinds of rows.

A planted fault replaces some text of a function, as a programmer might have written it: a simulator that finds none
proves nothing. `faults.toml` has them.
"""

import ast
import importlib
import inspect
import json
import sys
import textwrap
import tomllib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from embedder.plugins.maintain.purge import audit, blank_rows, purge, unknown_ids
from embedder.plugins.maintain.purge import purge_plan as plan
from embedder.store import layout, lock
from embedder.store.backends import is_unfinished
from embedder.store.files import StoreFiles
from embedder.store.journal import part_writer
from embedder.store.journal.journal import JournalEntry, PartFile
from embedder.store.maintenance import compact
from embedder.store.publish import current, history, interim, publication, publish
from embedder.store.publish.interim import InterimBatch, InterimState
from embedder.store.tables import deletion_vectors, delta_log, delta_state, tables
from embedder.store.tables.deletion_vectors import DeletionVector
from embedder.store.tables.tables import RecordTable


class Rows(list[dict[str, Any]]):
    """Rows of a part file: `item_id`, `version`, and for embeddings `segment`."""

    column_names = ()  # of which vectors might be null

    @property
    def num_rows(self) -> int:
        return len(self)

    def slice(self, offset: int, length: int) -> "Rows":
        return Rows(self[offset : offset + length])


_cached = lru_cache(maxsize=20_000)


@_cached
def parse_rows(content: bytes) -> Rows:
    return Rows(json.loads(content))


@dataclass(frozen=True)
class Finished:
    """Part files of a run and their rows."""

    files: tuple[PartFile, ...]
    rows: tuple[Rows, ...]


class Whole(dict[str, str]):
    """Item -> session that finished it."""

    @property
    def num_rows(self) -> int:
        return len(self)


def encode_part(table: str, path: str, content: Rows, session: str, *, kept: bool = False) -> tuple[PartFile, bytes]:
    data = json.dumps(content).encode()
    ids = sorted(row["item_id"] for row in content)
    bounds = [{"item_id": each, "state": "embedded"} for each in (ids[0], ids[-1])] if ids else [{}, {}]
    stats = json.dumps({"numRecords": len(content), "minValues": bounds[0], "maxValues": bounds[1]})
    sizes = {"num_rows": len(content), "size_bytes": len(data)}
    return PartFile(table=table, path=path, **sizes, stats=stats, session=session, kept=kept), data


def _read(table: RecordTable, columns: Any = None, paths: Sequence[str] | None = None) -> Rows:
    paths = table.paths() if paths is None else paths
    return Rows(row for path in paths for row in _live_part_rows(table, path))


def _live_part_rows(table: RecordTable, path: str) -> Rows:
    rows, mask = _part_rows(table.files, table.name, path), table._live_rows(path)
    return rows if mask is None else Rows(row for row, is_live in zip(rows, mask, strict=True) if is_live)


def _part_rows(files: StoreFiles, table: str, path: str) -> Rows:
    return parse_rows(files.read(f"{table}/{path}"))


def _choose_batch(
    files: StoreFiles, entries: Iterable[JournalEntry], state: InterimState, session: str = "", in_work: Any = None
) -> InterimBatch:
    entries = list(entries)
    parts = tuple(part for entry in entries for part in entry.parts)
    rows = tuple(_part_rows(files, part.table, part.path) for part in parts)
    published = {part.path for entry in entries if entry.name in state.names for part in entry.parts}
    records: dict[tuple[str, str], set[str]] = {}
    vectors: dict[tuple[str, str], int] = {}
    for part, content in zip(parts, rows, strict=True):
        for row in content:
            key = (row["item_id"], part.session)
            if part.table == "items":
                records.setdefault(key, set()).add(part.path)
            else:
                vectors[key] = vectors.get(key, 0) + 1
    whole, paths = Whole(), dict[str, set[str]]()
    for (item, own), places in sorted(records.items(), key=lambda each: each[0][1]):
        if vectors.get((item, own), 0) == 1:
            whole[item], paths[item] = own, places
    new = Whole({item: own for item, own in whole.items() if not paths[item] <= published})
    names = state.names | {entry.name for entry in entries}
    return InterimBatch(entries, Finished(parts, rows), new, InterimState(names, state.waiting), [])  # type: ignore[arg-type]


def _whole_without(whole: Whole, ids: Any) -> Whole:
    gone = set(ids)
    return Whole({item: session for item, session in whole.items() if item not in gone})


def _own_parts(work: Any, table: RecordTable) -> list[PartFile]:
    parts = []
    for part, rows in zip(work.finished.files, work.finished.rows, strict=True):
        counting = Rows(row for row in rows if work.whole.get(row["item_id"]) == part.session)
        if part.table != table.name or not counting:
            continue
        parts.append(part if len(counting) == len(rows) else publication._rewrite(work, table, part.path, counting))
    return parts


def _replace_older(work: Any, table: RecordTable) -> tuple[list[PartFile], list[str]]:
    leaving = {*work.whole, *work.retired}
    adds, removes, changes = [], [], []
    for part in table.parts():
        rows = _live_part_rows(table, part.path)
        stays = Rows(row for row in rows if row["item_id"] not in leaving)
        if len(stays) < len(rows):
            removes.append(part.path)
            if stays and work.intent.deletion_vectors is True:
                bits = np.packbits([row["item_id"] not in leaving for row in rows])
                changes.append(publication._Change(part, bits, np.empty(0, np.int64), None))  # type: ignore[arg-type]
            elif stays:
                adds.append(publication._rewrite(work, table, part.path, stays))
    return [*adds, *publication._mark(work, table, changes)], removes


def _blank(table: RecordTable, path: str, ids: Collection[str]) -> blank_rows.BlankedPart:
    none = {"item_id": "", "version": ""}
    content = Rows(none if row["item_id"] in ids else row for row in _part_rows(table.files, table.name, path))
    part, data = encode_part(table.name, path, content, "")
    rows = np.array([number for number, row in enumerate(content) if not row["item_id"]], np.int64)
    return blank_rows.BlankedPart(part, data, content, rows)  # type: ignore[arg-type]


def _held_rows(files: StoreFiles, infos: Sequence[Any], ids: Collection[str]) -> dict[str, Any]:
    held = {}
    for info in infos:
        if plan.place_of(info.path) is None:
            continue
        found = plan.Counter(row["item_id"] for row in parse_rows(files.read(info.path)) if row["item_id"] in ids)
        if found:
            held[info.path] = plan._HeldRows(info, found, frozenset())
    return held


def _names_in(files: StoreFiles, info: Any, names: Any) -> frozenset[str]:
    if info.path.rpartition("/")[2] in audit.RECORDS or is_unfinished(info.path):  # half a Parquet file is no text
        return frozenset()
    content = files.read(info.path)
    forms = {each: (f'"{each}"', f'\\"{each}\\"', f"'{each}'") for each in names.ids}
    return frozenset(each for each in forms if any(form.encode() in content for form in forms[each]))


def _rest(table: RecordTable, path: str, ids: Collection[str]) -> Rows:
    return Rows(row for row in _live_part_rows(table, path) if row["item_id"] not in ids)


def _each(files: StoreFiles, read: Callable[[Any], Any], of: Sequence[Any], num_readers: int = 1) -> list[Any]:
    read_log = getattr(files.backend, "read_log", None)
    if read_log is not None and read == files.read and of and "/_delta_log/" in of[0]:
        return read_log(of)  # type: ignore[no-any-return]
    return [read(each) for each in of]


@_cached
def _part(table: str, path: str, size: int, stats: str, vector: DeletionVector | None) -> PartFile:
    num_rows = json.loads(stats)["numRecords"] - (0 if vector is None else vector.cardinality)
    own = {"num_rows": num_rows, "size_bytes": size, "stats": stats, "deletion_vector": vector}
    return PartFile(table=table, path=path, session="", **own)


def install(*, marks: bool = False) -> None:
    """Replace the store's work on rows in this process, and remember what is parsed: no effect and no order changes.

    With `marks`, publications mark the rows that leave by deletion vectors, all of them in files.
    """
    if marks:
        publication.PublishIntent.model_fields["deletion_vectors"].default = True
        publication.PublishIntent.model_rebuild(force=True)
        deletion_vectors.INLINE_BYTES = 0
    purge.blank, plan._published_rows = _blank, lambda files, current, held: held
    part_writer.encode_part = purge.encode_part = encode_part  # type: ignore[assignment]
    part_writer._num_rejected = lambda items: 0
    for module in (part_writer, publication, compact):
        module.rewrite_each = lambda rewrite, of: list(map(rewrite, of))
    StoreFiles.write_table = lambda files, path, content: files.write(path, str(content.to_pydict()).encode())  # type: ignore[method-assign, misc]
    StoreFiles.read_table = lambda files, path: ast.literal_eval(files.read(path).decode())  # type: ignore[method-assign, misc, assignment]
    StoreFiles.each = _each  # type: ignore[method-assign, assignment]
    lock.BEATS_PER_LEASE = 1  # so a watcher looks four times at a lock instead of 24
    RecordTable.read = _read  # type: ignore[assignment, method-assign]
    for module in (interim, publish):
        module.choose_batch = _choose_batch  # type: ignore[attr-defined]
    publish.whole_without = _whole_without  # type: ignore[assignment]
    publish.read_moves = lambda *_: ()  # type: ignore[assignment, return-value]
    publication._own_parts, publication._replace_older = _own_parts, _replace_older  # type: ignore[assignment]
    plan._held_rows, purge._rest = _held_rows, _rest  # type: ignore[assignment]
    unknown_ids._known_items = lambda files: {}
    plan.caption_vectors = lambda *_: frozenset()
    for module in (audit, plan, purge):
        module.names_in = _names_in  # type: ignore[attr-defined]
    tables._part = lambda name, add: _part(name, add["path"], add["size"], add["stats"], tables.vector_of(add))
    current.count_states = lambda items, part: plan.Counter({"embedded": part.num_rows})
    delta_log.table_entry = tables.table_entry = _cached(delta_log.table_entry)
    parse_entry = _cached(delta_log.parse_entry)
    delta_log.parse_entry = delta_state.parse_entry = parse_entry
    delta_state._state_at = _cached(delta_state._state_at)
    publication.PublishIntent.column_schema = property(lambda intent: NO_COLUMNS)  # type: ignore[assignment]
    layout.parse_record = lambda files, path, data, kind: _parse_record(path, data, kind)
    for module in (history, current, publish, interim):
        if hasattr(module, "parse_record"):
            module.parse_record = layout.parse_record  # type: ignore[attr-defined]


_parse_record_of = layout.parse_record


@_cached
def _parse_record(path: str, data: bytes, kind: Any) -> Any:
    return _parse_record_of(SimpleNamespace(uri=str), path, data, kind)  # type: ignore[arg-type]


NO_COLUMNS = pa.schema([])


class PlantedFault(NamedTuple):
    """Fault in one function."""

    name: str  # for `--plant`
    description: str  # what the store does wrong
    place: str  # `module:function` or `module:Class.method`, below `embedder`
    old: str  # text of the function
    new: str  # what stands in its place


_TABLES = tomllib.loads(Path(__file__).with_name("faults.toml").read_text(encoding="utf-8"))
FAULTS = tuple(PlantedFault(name, **each) for name, each in _TABLES.items())


def plant(name: str) -> None:
    fault = next((each for each in FAULTS if each.name == name), None)
    if fault is None:
        raise LookupError(f"fault {name!r}: there is none of that name; --list-faults shows them")
    module_name, _, path = fault.place.partition(":")
    module = importlib.import_module(f"embedder.{module_name}")
    owner: Any = module
    *outer, last = path.split(".")
    for each in outer:
        owner = getattr(owner, each)
    function = getattr(owner, last)
    source = textwrap.dedent(inspect.getsource(function))
    old, new = (textwrap.dedent(each) if outer else each for each in (fault.old, fault.new))
    if old not in source:
        raise LookupError(f"fault {name}: {fault.place} has no text {fault.old!r} any more")
    changed: dict[str, Any] = {}
    exec(compile(source.replace(old, new), module.__file__ or "", "exec"), module.__dict__, changed)
    setattr(owner, last, changed[last])
    for other in list(sys.modules.values()):
        if not outer and getattr(other, last, None) is function:
            setattr(other, last, changed[last])
