"""Interim publications of a continuing run: which of its finished work readers already see, and what may follow.

An interim publication has its own id, which sorts before its run's id and after all earlier ones, so the run stays
unfinished and resumable. The following holds whatever is killed when:

- A publication's entries are recorded before its first commit, and count once CURRENT.json names it. The next writer
reverts one that was cut off before that, and its id is not used again.
- The unit is an item of a session, never a part of it: a video with missing rows waits for a later publication.
- If several sessions embedded an item, the last one counts, even if an earlier one is published.
- Rows that a session compares its items with stay unchanged while it runs: what an earlier session finished of an
item that is now in work waits for the end.
- The last publication takes whatever is left: all that is complete and was not published before.

Another model's finished work is published with the main one's, under the same id, with its own record in its view. Work
that the main model's journal doesn't have yet waits, so that an item appears with all its models.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from embedder.errors import StoreError
from embedder.storage.hashed_rows import HashedRows, read_parts
from embedder.store.files import StoreFiles
from embedder.store.journal.finished import NO_PLACES, PLACE, WHOLE, Finished, hash_rows, read_finished
from embedder.store.journal.journal import JournalEntry, read_entries
from embedder.store.journal.runs import Run
from embedder.store.layout import (
    PUBLISHED_FILE,
    Current,
    Published,
    Record,
    create_record,
    read_current,
    read_record,
    run_file,
)
from embedder.store.publish.current import of_model

INTERIM_FILE = "interim.json"
NO_IDS = pa.chunked_array([], pa.string())


class InterimRecord(Record):
    """`runs/<interim id>/interim.json`: a run's work that an interim publication includes, besides earlier ones."""

    entries: tuple[str, ...]
    """Names of the journal entries."""
    waiting: tuple[tuple[str, str], ...] = ()
    """Items with their sessions of which these and earlier entries have rows, and which are not published yet."""


@dataclass(frozen=True)
class InterimState:
    """Work included in a run's interim publications; `waiting` has its `item_id` and `session` not yet published."""

    names: frozenset[str] = frozenset()
    waiting: pa.Table = field(default_factory=lambda: NO_PLACES)


@dataclass(frozen=True)
class InterimBatch:
    """Finished work that can be published.

    Attributes:
        entries: journal entries that were considered.
        finished: their records and rows.
        whole: items to publish, as `embedder.store.journal.finished.whole_items` describes them.
        state: state of the run once they are published.
        unfinished: entries of the present session with items that wait.
    """

    entries: list[JournalEntry]
    finished: Finished
    whole: HashedRows
    state: InterimState
    unfinished: list[JournalEntry]

    @property
    def record(self) -> InterimRecord:
        """Return the record of its publication."""
        places = zip(*(self.state.waiting[name].to_pylist() for name in PLACE), strict=True)
        return InterimRecord(entries=tuple(entry.name for entry in self.entries), waiting=tuple(sorted(places)))


def interim_state(files: StoreFiles, run_id: str) -> InterimState:
    """Read what the interim publications of a run include; nothing if another run has published since.

    `files` may be a model's view, which not all of these publications need to have. Raises StoreError if a record is
    missing.
    """
    records: list[InterimRecord] = []
    for publication_id in _interim_ids(files, run_id):
        path = run_file(publication_id, INTERIM_FILE)
        record = read_record(files, path, InterimRecord)
        if record is None:
            raise StoreError(
                f"{files.uri(path)}: missing, and without it run {run_id} would publish rows twice; restore the file, "
                "or go back with `embedder rollback`"
            )
        records.append(record)
    if not records:
        return InterimState()
    names = frozenset(name for record in records for name in record.entries)
    items, sessions = zip(*records[0].waiting, strict=True) if records[0].waiting else ((), ())
    return InterimState(names, pa.table([list(items), list(sessions)], schema=NO_PLACES.schema))


def _interim_ids(files: StoreFiles, run_id: str) -> list[str]:
    """Return the ids of a run's interim publications that have new rows of a model, newest first."""
    current: Current | None = read_current(files.main)
    found: list[str] = []
    while current is not None and current.interim_of == run_id:
        own, previous = of_model(current, files.model), current.previous
        if own is not None and own.interim_of == run_id and own.run_id not in found:
            found.append(own.run_id)
        path = run_file(previous, PUBLISHED_FILE) if previous is not None else None
        current = read_record(files.main, path, Published) if path is not None else None
    return found


def begin_interim(files: StoreFiles, run_id: str, record: InterimRecord) -> str | None:
    """Record what the next interim publication includes, before its first commit; return its unused id.

    Returns None if the run is of an older release, whose ids leave no room.
    """
    start, _, ending = run_id.partition("-")
    if ending.startswith("0"):
        return None
    current, number = read_current(files), 1
    if current is not None and current.interim_of == run_id:
        number += int(current.run_id.partition("-")[2], 16)
    files.confirm_lease()
    while not create_record(files, run_file(f"{start}-0{number:05x}", INTERIM_FILE), record):
        number += 1  # from an interrupted publication or an overtaken writer
    return f"{start}-0{number:05x}"


def choose_batch(
    files: StoreFiles,
    entries: Iterable[JournalEntry],
    state: InterimState,
    session: str = "",
    in_work: pa.ChunkedArray = NO_IDS,
) -> InterimBatch:
    """Choose what can be published of a run's finished work.

    `entries` are the run's journal. If all earlier work of a session was considered before, its newly finished entries
    and `InterimBatch.unfinished` suffice. `state` is what is published; `session` is the one that continues. For items
    `in_work`, what earlier sessions finished is left out.
    """
    entries = list(entries)
    finished = read_finished(files, entries)
    if not (state.names or session):
        return InterimBatch(entries, finished, finished.whole, state, [])
    published = {path for entry in entries if entry.name in state.names for path in _paths([entry])}
    new = pa.array([number for number, part in enumerate(finished.files) if part.path not in published], pa.int32())
    waiting, with_waiting = [NO_PLACES], set[int]()

    def choose() -> Iterator[pa.Table]:
        for whole, rest, begun in _divide_items(finished, new, state.waiting, session, in_work):
            waiting.append(rest)
            with_waiting.update(begun)
            yield whole

    whole = hash_rows(choose(), WHOLE)
    paths = {finished.files[number].path for number in with_waiting}
    return InterimBatch(
        entries,
        finished,
        whole,
        InterimState(state.names | {entry.name for entry in entries}, pa.concat_tables(waiting)),
        [entry for entry in entries if paths.intersection(_paths([entry]))],
    )


def _divide_items(
    finished: Finished, new: pa.Array, waiting: pa.Table, session: str, in_work: pa.ChunkedArray
) -> Iterator[tuple[pa.Table, pa.Table, list[int]]]:
    """Divide items with new rows, and those that waited, into whole ones and the rest, a part of them at a time.

    `new` are the numbers of the files that no publication has. Yields the whole ones, the places of the rest, and the
    numbers of the files with rows of those in the rest that are of this session.
    """
    ids = pa.schema([NO_PLACES.schema.field("item_id")])
    rows = (
        finished.records,
        finished.vectors,
        finished.whole,
        hash_rows([waiting], NO_PLACES.schema),
        hash_rows([pa.table({"item_id": in_work})], ids),
    )
    for records, vectors, items, before, working in read_parts(*rows):
        seen = pa.concat_tables([each.select([*PLACE, "file"]) for each in (records, vectors)])
        fresh = seen.filter(pc.is_in(seen["file"], value_set=new)).select(PLACE)
        candidates = pa.concat_tables([fresh, before.select(PLACE)]).group_by(PLACE).aggregate([])
        whole = items.select(WHOLE.names).join(candidates, PLACE, join_type="left semi")
        is_working = pc.is_in(whole["item_id"], value_set=working["item_id"].combine_chunks())
        whole = whole.filter(pc.invert(pc.and_(is_working, pc.less(whole["session"], session))))
        rest = candidates.join(whole.select(PLACE), PLACE, join_type="left anti")
        here = seen.join(rest.filter(pc.equal(rest["session"], session)), PLACE, join_type="left semi")
        yield whole, rest.select(PLACE), here["file"].unique().to_pylist()


def _paths(entries: Iterable[JournalEntry]) -> list[str]:
    return [part.path for entry in entries for part in entry.parts]


class UnpublishedWork:
    """Finished work of a continuing session, for one interim publication after another."""

    def __init__(self, run: Run, in_work: pa.ChunkedArray) -> None:
        self._run, self._in_work = run, in_work
        self._state = interim_state(run.files, run.run_id)
        self._seen: set[str] = set()
        self._again: list[JournalEntry] = []

    @property
    def seen(self) -> Collection[str]:
        """Names of the journal entries considered so far."""
        return self._seen

    def next(self, known: Collection[str] | None = None) -> InterimBatch:
        """Choose what can be published now, earlier unpublished choices included; None considers all entries."""
        new = read_entries(self._run.files, self._run.run_id, self._seen)
        if self._seen:  # all work of earlier sessions was considered first; late work waits for the end
            new = [entry for entry in new if entry.name.startswith(self._run.session)]
        if known is not None:
            new = [entry for entry in new if entry.name in known]
        entries = [*self._again, *new]
        batch = choose_batch(self._run.files, entries, self._state, self._run.session, self._in_work)
        self._seen.update(entry.name for entry in new)
        self._again = entries
        return batch

    def note_published(self, batch: InterimBatch) -> None:
        """Record that the last batch is published."""
        self._state, self._again = batch.state, batch.unfinished


def kept_parts(entries: Iterable[JournalEntry], names: Collection[str]) -> set[str]:
    """Return part files that interim publications may need to stay readable after a later one has rewritten them."""
    return set(_paths(entry for entry in entries if entry.name in names))
