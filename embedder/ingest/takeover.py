"""Vectors of items to embed that a publication holds already: taken over, not computed again.

A rolled-back publication may hold the item itself, the present one its content under another id
(`embedder.ingest.copies`), as may the run itself (`embedder.ingest.new_copies`). An item is taken over if model and
preprocessing are the run's, and its record in the first has the size and time listed now, or its content proves equal
when it is read. Record and rows are copied into part files of the run and journaled, so that the item counts like any
other that the run has finished. What can no longer be read is embedded.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.batch_schema import CARRIED, carried_schema
from embedder.errors import StoreError
from embedder.ingest.copies import COPIES, first_of_each
from embedder.ingest.diff import CHECKED, is_as_recorded, same_values
from embedder.ingest.known_items import whole_contents
from embedder.ingest.new_copies import NEW_COPIES
from embedder.storage.hashed_rows import read_parts
from embedder.store.files import StoreFiles
from embedder.store.journal.finished import of_whole, read_finished
from embedder.store.journal.metadata_updates import move_rows
from embedder.store.journal.part_writer import RunMetadata, gather_rows, write_copies
from embedder.store.journal.runs import Run
from embedder.store.layout import PUBLISHED_FILE, Current, Published, StoreInfo, read_record, run_file
from embedder.store.part_file import PartFile, PartKey
from embedder.store.publish.history import readable
from embedder.store.schema import EMBEDDINGS, ITEMS, with_carryover, with_nulls
from embedder.store.store_info import FINGERPRINTS, differing, output_columns, served_info
from embedder.store.tables.arrow_lookup import KnownIds, positions, replace_column, take_or_null, without_items
from embedder.store.tables.tables import RecordTable

HELD_ID = "held_id"
ROWS_AT_ONCE = 50_000
UNREADABLE = {
    "state": "rejected",
    "step": "read",
    "error_type": "ReadError",
    "error": "a published item has its content, and that item's rows can't be read: the next run embeds it",
    "transient": True,
}
COMPARED = ("size_bytes", "modified")
LISTED = ("source", "uri", *COMPARED)
WAITING = ["item_id", "content_version"]


@dataclass(frozen=True)
class HeldRecords:
    """Records of items to embed in one publication; the column `held_id` is their id there.

    Those of the run itself are in its part files `parts`, of `embeddings/`, and not in any version of the tables.
    """

    version: Current
    records: pa.Table
    parts: tuple[PartFile, ...] = ()

    def of(self, is_meant: pa.ChunkedArray) -> "HeldRecords":
        """Select some of the records."""
        return replace(self, records=self.records.filter(is_meant))


@dataclass(frozen=True)
class HeldItems:
    """Items to embed that publications hold, each once.

    `as_listed` have the size and time that are listed now. `others` may have the same content, which reading them
    shows; so may `copies` (`embedder.ingest.copies.COPIES`) of items of the publication `current`, and `new_copies`
    (`embedder.ingest.new_copies.NEW_COPIES`) of other items to embed.
    """

    as_listed: tuple[HeldRecords, ...] = ()
    others: tuple[HeldRecords, ...] = ()
    copies: pa.Table = field(default_factory=COPIES.empty_table)
    current: Current | None = None
    new_copies: pa.Table = field(default_factory=NEW_COPIES.empty_table)

    @property
    def contents(self) -> pa.Table:
        """`item_id` and `content_version` of all that reading an item may show to be equal."""
        held = [*(each.records for each in self.others), self.copies, self.new_copies]
        return pa.concat_tables([each.select(["item_id", "content_version"]) for each in held])

    def leave_out(self, to_embed: pa.Table) -> pa.Table:
        """Leave out the items that can be taken over as listed."""
        for held in self.as_listed:
            to_embed = without_items(to_embed, held.records["item_id"])
        return to_embed


def find_held(files: StoreFiles, current: Current | None, info: StoreInfo, to_embed: pa.Table) -> HeldItems:
    """Look for items in the publications that the last rollback left, newest first."""
    as_listed: list[HeldRecords] = []
    others: list[HeldRecords] = []
    read = set[PartKey]()
    to_embed = to_embed.filter(pc.not_equal(to_embed["reason"], CHECKED))  # these are to be read
    ids = to_embed["item_id"]
    for version in _left_behind(files, current, info) if to_embed.num_rows else ():
        records = _records(files, version, to_embed["item_id"], read)
        held = HeldRecords(version, records.append_column(HELD_ID, records["item_id"]))
        place = positions(held.records["item_id"], to_embed["item_id"])
        listed = pa.table({name: take_or_null(to_embed[name], place) for name in COMPARED})
        is_same = is_as_recorded(listed, {name: held.records[name] for name in (*COMPARED, "updated_at")})
        has_all = pc.and_(pc.is_valid(whole_contents(held.records)), pc.greater(held.records["num_vectors"], 0))
        as_listed.append(held.of(is_same))
        others.append(_with_rows(files, held.of(pc.and_(has_all, pc.invert(is_same)))))
        to_embed = without_items(to_embed, as_listed[-1].records["item_id"])
    return HeldItems(_each_once(as_listed, ids), _each_once(others, to_embed["item_id"]))


def _with_rows(files: StoreFiles, held: HeldRecords) -> HeldRecords:
    """Select the records whose rows can be read, as no model computes an item once its content proves equal."""
    if not held.records.num_rows:
        return held
    table, wanted = RecordTable(files, "embeddings", held.version.embeddings), KnownIds(held.records[HELD_ID])
    num_rows = Counter[str]()
    for path in [part.path for part in table.parts() if wanted.any_between(part.id_range)]:
        with suppress(StoreError):
            ids = table.read(paths=[path])["item_id"]
            num_rows.update(ids.filter(wanted.are_listed(ids)).to_pylist())
    found = pa.array([num_rows[item] for item in held.records[HELD_ID].to_pylist()], pa.int64())
    return held.of(pc.equal(found, held.records["num_vectors"]))


def with_held_versions(to_embed: pa.Table, held: HeldItems) -> pa.Table:
    """Add the contents of each item that a publication holds."""
    if not held.contents.num_rows:
        return to_embed
    lists = held.contents.group_by("item_id").aggregate([("content_version", "list")])
    place = positions(to_embed["item_id"], lists["item_id"])
    return to_embed.append_column("held_versions", lists["content_version_list"].take(place))


def find_equal(run: Run, held: HeldItems) -> tuple[HeldRecords, ...]:
    """Find items that the run's session has read and whose content is that of the publication which holds them."""
    meant = pc.unique(held.contents["item_id"])
    if not len(meant):
        return ()
    entries = [entry for entry in run.entries() if entry.name.startswith(run.session)]
    finished = read_finished(run.files, entries, ["content_version"])
    read = []
    for records, whole in read_parts(finished.records, finished.whole):
        own = without_items(records, whole["item_id"])
        read.append(own.filter(pc.is_in(own["item_id"], value_set=meant)))
    seen = pa.concat_tables(read)

    def is_equal(records: pa.Table) -> pa.ChunkedArray:
        version = take_or_null(seen["content_version"], positions(records["item_id"], seen["item_id"]))
        return pc.fill_null(pc.equal(version, records["content_version"]), False)

    equal = [each.of(is_equal(each.records)) for each in held.others]
    copies = held.copies.filter(is_equal(held.copies))
    for each in equal:
        copies = without_items(copies, each.records["item_id"])
    if held.current is not None and copies.num_rows:
        equal.append(_records_of_copies(run.files, held.current, copies))
    return tuple(each for each in equal if each.records.num_rows)


def find_finished_copies(run: Run, listed: pa.Table, pairs: pa.Table | None = None) -> tuple[HeldRecords, ...]:
    """Find listed items that the run has read and not embedded, and whose content it has finished under another id.

    With `pairs` (`NEW_COPIES`), only their originals count: others of the same content may differ in what lies next
    to them. A rejected original counts where its content is the reason.
    """
    facts = ["content_version", "size_bytes", "modified", "state", "step"]
    finished = read_finished(run.files, run.entries(), facts)
    copies = [NEW_COPIES.empty_table().select(WAITING)]
    for records, whole in read_parts(finished.records, finished.whole):
        copies.append(_unfinished_copies(without_items(records, whole["item_id"]), listed))
    wanted = pa.concat_tables(copies)
    contents = pa.array(wanted["content_version"].unique(), pa.string())
    originals = [pa.table({name: pa.array([], pa.string()) for name in ("content_version", HELD_ID, "session")})]
    for records in of_whole(finished.records, finished.whole) if len(contents) else ():
        by_content = pc.fill_null(pc.not_equal(records["step"], "read"), False)
        is_meant = pc.and_not(pc.or_(pc.equal(records["state"], "embedded"), by_content), records["kept"])
        is_meant = pc.and_(is_meant, pc.is_in(records["content_version"], contents))
        renamed = records.rename_columns({"item_id": HELD_ID}).filter(is_meant)
        originals.append(renamed.select(originals[0].schema.names))
    done = pa.concat_tables(originals)
    if pairs is None:
        copies_of = wanted.join(first_of_each(done, ["content_version"]), "content_version", join_type="inner")
    else:
        named = wanted.join(pairs.select(["item_id", "copy_of"]), "item_id", join_type="inner")
        copies_of = named.rename_columns({"copy_of": HELD_ID}).join(
            done, ["content_version", HELD_ID], join_type="inner"
        )
    sessions = pc.unique(copies_of["session"]).to_pylist()
    return tuple(_records_in_run(run, finished.files, copies_of, each) for each in sessions)


def _unfinished_copies(records: pa.Table, listed: pa.Table) -> pa.Table:
    """Return those of some records that wait for rows, as `split_records` has them: `WAITING`."""
    records = first_of_each(records.sort_by([("session", "descending")]), ["item_id"])
    place = positions(records["item_id"], listed["item_id"])
    now = pa.table({name: take_or_null(listed[name], place) for name in COMPARED})
    is_as_listed = pc.and_(*(same_values(now[name], records[name]) for name in COMPARED))
    is_waiting = pc.and_(pc.equal(records["num_vectors"], 1), pc.equal(records["state"], "embedded"))
    is_meant = pc.and_(pc.and_(is_waiting, is_as_listed), pc.is_valid(place))
    return records.filter(is_meant).select(WAITING)


def _records_in_run(run: Run, parts: Sequence[PartFile], copies: pa.Table, session: str) -> HeldRecords:
    """Return the records of the originals that a session of the run has finished, each once for each of its copies."""
    copies = copies.filter(pc.equal(copies["session"], session))
    of_session = [part for part in parts if part.session == session]
    wanted = KnownIds(copies[HELD_ID].unique())
    paths = [part.path for part in of_session if part.table == "items" and wanted.any_between(part.id_range)]
    records = pa.concat_tables(_records_of(RecordTable(run.files, "items", -1), paths, wanted))
    version = Current(run_id=run.run_id, embeddings=-1, items=-1, published_at=run.info.started_at)
    own = tuple(part for part in of_session if part.table == "embeddings")
    return HeldRecords(version, _name_copies(records, copies.rename_columns({HELD_ID: "copy_of"})), own)


def find_taken(run: Run, copies: pa.Table) -> pa.ChunkedArray:
    """Return the ids of originals whose content the run, in any session, has finished under another id, of `COPIES`."""
    finished = read_finished(run.files, run.entries(), ["content_version"])
    facts, taken = ["item_id", "content_version"], [copies["copy_of"].slice(0, 0)]
    for records in of_whole(finished.records, finished.whole):
        taken.append(copies.join(records.select(facts), facts, join_type="left semi")["copy_of"])
    return pa.chunked_array([chunk for each in taken for chunk in each.chunks], pa.string())


def _records_of_copies(files: StoreFiles, current: Current, copies: pa.Table) -> HeldRecords:
    """Read the records of the originals, each once for each of its copies."""
    records = _records(files, current, pa.chunked_array([copies["copy_of"].unique()]), set())
    return HeldRecords(current, _name_copies(records, copies))


def _name_copies(records: pa.Table, copies: pa.Table) -> pa.Table:
    """Return the record of the original `copy_of` of each copy, with the copy's `item_id`."""
    place = positions(copies["copy_of"], records["item_id"])
    copies = copies.filter(pc.is_valid(place))
    records = records.take(place.drop_null()).append_column(HELD_ID, copies["copy_of"])
    return replace_column(records, "item_id", copies["item_id"])


def take_over(run: Run, held: tuple[HeldRecords, ...], listed: pa.Table, rows_per_part: int) -> None:
    """Copy items into part files of the run; a kill leaves the complete ones.

    No other task may write under the session of `run`. Places and carried columns come from `listed`, the items as they
    are listed now. A part file has at least `rows_per_part` rows, if there are that many.
    """
    carryover = carried_schema(listed.schema)
    names = {"item_id": "item_id", "uri": "uri"} | {name: CARRIED + name for name in carryover.names}
    moves = pa.table({name: listed[column] for name, column in names.items()})
    info = run.info
    prints = (info.model_fingerprint, info.preprocess_fingerprint)
    stamp = RunMetadata(run.run_id, run.session, *prints, carryover, output_columns(info))
    tasks = count()
    for each in held:
        num_rows = Counter[str]()
        for rows in gather_rows(_rows_of(run.files, each, stamp, moves), rows_per_part):
            num_rows.update(rows["item_id"].to_pylist())
            write_copies(run.files, stamp, next(tasks), {"embeddings": rows}, each.version.run_id)
        records = _with_unreadable(_as_listed(each.records, listed, run.run_id), each.records, num_rows)
        write_copies(run.files, stamp, next(tasks), {"items": records}, each.version.run_id)


def _left_behind(files: StoreFiles, current: Current | None, info: StoreInfo) -> list[Published]:
    """List readable publications of the run's model that the last rollback left, newest first."""
    hold = current.hold if current is not None else None
    versions: list[Published] = []
    run_id = hold.from_run if hold is not None else None
    while hold is not None and run_id is not None and run_id != hold.to_run:
        record = read_record(files, run_file(run_id, PUBLISHED_FILE), Published)
        if record is None:
            break
        if not differing(served_info(info, record), info):
            versions.append(record)
        run_id = record.previous
    whole = readable(files, versions) if versions else set()
    return [version for version in versions if version.run_id in whole]


def _records(files: StoreFiles, version: Current, ids: pa.ChunkedArray, read: set[PartKey]) -> pa.Table:
    """Read the records of some items in a publication, from part files that no newer one had.

    `read` has the keys of those that were read, and is updated.
    """
    table = RecordTable(files, "items", version.items)
    wanted = KnownIds(ids.cast(pa.string()))
    parts = [part for part in table.parts() if part.key not in read]
    read.update(part.key for part in parts)
    paths = [part.path for part in parts if wanted.any_between(part.id_range)]
    return pa.concat_tables(_records_of(table, paths, wanted))


def _records_of(table: RecordTable, paths: Iterable[str], wanted: KnownIds) -> Iterator[pa.Table]:
    yield ITEMS.empty_table()
    for path in paths:
        try:
            records = with_nulls(table.read(paths=[path]), ITEMS).select(ITEMS.names).cast(ITEMS)
        except StoreError:  # a damaged file: its items are embedded
            continue
        yield records.filter(wanted.are_listed(records["item_id"]))


def _each_once(found: list[HeldRecords], ids: pa.ChunkedArray) -> tuple[HeldRecords, ...]:
    kept: list[HeldRecords] = []
    for each in found:
        here = each.of(pc.is_valid(positions(each.records["item_id"], ids)))
        for earlier in kept:
            here = replace(here, records=without_items(here.records, earlier.records["item_id"]))
        kept.append(here)
    return tuple(each for each in kept if each.records.num_rows)


def _as_listed(records: pa.Table, listed: pa.Table, run_id: str) -> pa.Table:
    """Update records to what the listing says about their items now; a copy is the run's."""
    place = positions(records["item_id"], listed["item_id"])
    # An index knows vectors by id, segment and run: under another id they are of the present run.
    run_ids = pc.if_else(pc.equal(records["item_id"], records[HELD_ID]), records["run_id"], run_id)
    for name in LISTED:
        now = take_or_null(listed[name], place).cast(ITEMS.field(name).type)
        records = replace_column(records, name, now)
    return replace_column(records, "run_id", run_ids).select(ITEMS.names)


def _with_unreadable(records: pa.Table, held: pa.Table, num_rows: Mapping[str, int]) -> pa.Table:
    """Make copies of which rows of the original can't be read rejects, which the next run embeds."""
    found = pa.array([num_rows.get(item, 0) for item in records["item_id"].to_pylist()], pa.int32())
    is_copy = pc.not_equal(held["item_id"], held[HELD_ID])
    lacks = pc.and_(is_copy, pc.less(found, records["num_vectors"]))
    for name, value in {**UNREADABLE, "num_vectors": found}.items():
        column = pc.if_else(lacks, value, records[name]).cast(ITEMS.field(name).type)
        records = replace_column(records, name, column)
    return records


def _rows_of(files: StoreFiles, held: HeldRecords, stamp: RunMetadata, moves: pa.Table) -> Iterator[pa.Table]:
    """Read the rows of the items, one table for each part file, with their present place and carried columns."""
    table = RecordTable(files, "embeddings", held.version.embeddings)
    schema = with_carryover(EMBEDDINGS, stamp.columns)
    names = held.records.select([HELD_ID, "item_id"])
    wanted = KnownIds(names[HELD_ID].unique())
    for path in [part.path for part in held.parts or table.parts() if wanted.any_between(part.id_range)]:
        try:
            is_theirs = wanted.are_listed(table.read(["item_id"], [path])["item_id"])
            if not pc.any(is_theirs).as_py():
                continue
            rows = table.read(paths=[path]).filter(is_theirs)
        except StoreError:
            continue
        is_same = pc.and_(*(pc.equal(rows[name], getattr(stamp, name)) for name in FINGERPRINTS))
        rows = with_nulls(rows.filter(is_same), schema).select(schema.names).cast(schema)
        if rows.num_rows:
            for renamed in _with_new_ids(rows, names, stamp.run_id):
                yield move_rows(renamed, moves)


def _with_new_ids(rows: pa.Table, names: pa.Table, run_id: str) -> Iterator[pa.Table]:
    """Yield each row once for each item that takes it over, with that item's id."""
    numbered = pa.table({HELD_ID: rows["item_id"], "row": np.arange(rows.num_rows)})
    pairs = numbered.join(names, HELD_ID, join_type="inner").sort_by([("item_id", "ascending"), ("row", "ascending")])
    for start in range(0, pairs.num_rows, ROWS_AT_ONCE):
        own = pairs.slice(start, ROWS_AT_ONCE)
        renamed = replace_column(rows.take(own["row"]), "item_id", own["item_id"])
        run_ids = pc.if_else(pc.equal(own["item_id"], own[HELD_ID]), renamed["run_id"], run_id)  # as in `_as_listed`
        yield replace_column(renamed, "run_id", run_ids)
