"""Result of a run: the sum of its journal, each item counted once, and what publishing it would leave."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.ingest.known_items import LEFT_OUT_FACTS
from embedder.storage.hashed_rows import HashedRows, read_parts
from embedder.store.journal.finished import PLACE, WHOLE, hash_rows, of_whole, read_finished, whole_without
from embedder.store.journal.journal import JournalEntry, stream_keys
from embedder.store.journal.runs import Run
from embedder.store.layout import Current
from embedder.store.part_file import PartFile
from embedder.store.publish.interim import NO_IDS, InterimBatch


@dataclass(frozen=True)
class RunResult:
    """Result of a run, or of a part of its work: for the guards to judge, to be published, to be reported.

    Attributes:
        run: the run.
        published: what is published now.
        retired: ids that leave the store.
        keeps_published: whether the published vectors of other items stay; not after a change of the model.
        entries: the journal, read once.
        vectors: rows of embeddings, of all sessions: `embedder.store.journal.finished.Finished.vectors`.
        whole: items with their own records and rows: `embedder.store.journal.finished.WHOLE`.
        num_items: embedded or rejected.
        left_out: what turned out to be no item: `item_id`, `uri`, `error_type`, `error`.
        num_rejected: rejected items, of which `num_stale` keep published vectors.
        num_equal: items whose content is as published.
        num_vectors: new rows of embeddings.
        num_reject_vectors: of those, rows of rejects: for a caption with a broken picture, what could be decoded.
        num_here: items that this session finished, and those that were copied for it.
        num_checked: unchanged items that this session read to compare their content; `checked_ids` of the comparison.
        differing: those of them whose content, or state, turned out to be another.
        taken_from: number of embedded items that were copied from another publication, by its run.
    """

    run: Run
    published: Current | None
    retired: pa.ChunkedArray
    keeps_published: bool
    entries: list[JournalEntry]
    vectors: HashedRows
    whole: HashedRows
    num_items: int
    left_out: pa.Table
    num_rejected: int
    num_stale: int
    num_equal: int
    num_vectors: int
    num_reject_vectors: int
    num_here: int
    num_checked: int
    differing: pa.ChunkedArray
    taken_from: dict[str, int]


def count_run(
    run: Run,
    published: Current | None,
    retired: pa.ChunkedArray,
    *,
    keeps_published: bool = True,
    batch: InterimBatch | None = None,
    checked: pa.ChunkedArray = NO_IDS,
) -> RunResult:
    """Count what the sessions of a run finished, without the items that have left the sources since.

    `retired` has the ids that leave the store, including items that the run finished before they went. After a change
    of the model, `keeps_published` is false. With `batch`, only that part of the work counts.
    `checked` has the unchanged items whose content was to be compared.
    """
    entries = run.entries() if batch is None else batch.entries
    finished = read_finished(run.files, entries, ["state", "stale"])
    whole = whole_without(finished.whole if batch is None else batch.whole, retired)
    counts = _Counts(run, len(finished.files), checked)
    counts.add_all(finished.records, whole)
    return RunResult(
        run=run,
        published=published,
        retired=retired,
        keeps_published=keeps_published,
        entries=entries,
        vectors=finished.vectors,
        whole=hash_rows((items.filter(pc.invert(items["kept"])) for items in whole.tables()), WHOLE),
        num_items=counts.num_records - counts.num_left_out,
        left_out=_left_out(run, finished.files, whole) if counts.num_left_out else LEFT_OUT_FACTS.empty_table(),
        num_rejected=counts.num_records - counts.num_left_out - counts.num_embedded,
        num_stale=counts.num_stale,
        num_equal=counts.num_equal,
        num_vectors=counts.num_vectors,
        num_reject_vectors=counts.num_reject_vectors,
        num_here=counts.num_here,
        num_checked=counts.num_checked,
        differing=pa.chunked_array(counts.differing, pa.string()),
        taken_from=_taken_from(entries, finished.files, counts.num_embedded_of),
    )


class _Counts:
    """Counts of records of complete items, added part by part."""

    def __init__(self, run: Run, num_files: int, checked: pa.ChunkedArray) -> None:
        self._run, self._checked = run, checked.combine_chunks()
        self.num_checked, self.differing = 0, list[pa.Array]()
        self.num_records, self.num_left_out, self.num_embedded, self.num_stale = 0, 0, 0, 0
        self.num_equal, self.num_vectors, self.num_reject_vectors, self.num_here = 0, 0, 0, 0
        self.num_embedded_of = np.zeros(num_files, np.int64)

    def add_all(self, records: HashedRows, whole: HashedRows) -> None:
        for found, items in read_parts(records, whole):
            facts = found.select(["item_id", "session", "state", "stale", "file"])
            self.add(facts.join(items.select(WHOLE.names), PLACE, join_type="inner"))

    def add(self, facts: pa.Table) -> None:
        """Count some records, with `kept` and `num_vectors` of their items."""
        is_embedded = pc.equal(facts["state"], "embedded")
        self.num_records += facts.num_rows
        self.num_left_out += _num_true(pc.equal(facts["state"], "left_out"))
        self.num_embedded += _num_true(is_embedded)
        self.num_stale += _num_true(facts["stale"])
        checked = facts.filter(pc.is_in(facts["item_id"], value_set=self._checked))
        is_equal = pc.and_(pc.equal(checked["state"], "embedded"), checked["kept"])
        self.num_checked += checked.num_rows
        self.differing += checked["item_id"].filter(pc.invert(is_equal)).chunks
        self.num_equal += _num_true(pc.and_(is_embedded, facts["kept"])) - _num_true(is_equal)
        new = facts.filter(pc.invert(facts["kept"]))
        self.num_vectors += pc.sum(new["num_vectors"]).as_py() or 0
        self.num_reject_vectors += pc.sum(new.filter(pc.equal(new["state"], "rejected"))["num_vectors"]).as_py() or 0
        self.num_here += _num_true(pc.greater_equal(facts["session"], self._run.session))
        files = facts.filter(is_embedded)["file"].to_numpy()
        self.num_embedded_of += np.bincount(files, minlength=len(self.num_embedded_of))


def _taken_from(entries: list[JournalEntry], files: Sequence[PartFile], num_embedded: Iterable[int]) -> dict[str, int]:
    """Count items that were copied from each publication, by the embedded items of each part file."""
    source = {part.path: entry.taken_from for entry in entries if entry.taken_from for part in entry.parts}
    counts: dict[str, int] = {}
    for part, number in zip(files, num_embedded, strict=True):
        run_id = source.get(part.path)
        if run_id is not None and number:
            counts[run_id] = counts.get(run_id, 0) + int(number)
    return counts


def _left_out(run: Run, files: Sequence[PartFile], whole: HashedRows) -> pa.Table:
    keys = stream_keys(run.files, files, "items", [*LEFT_OUT_FACTS.names, "state"])
    records = hash_rows(
        (each.filter(pc.equal(each["state"], "left_out")) for each in keys),
        pa.schema([*LEFT_OUT_FACTS, ("session", pa.string())]),
    )
    return pa.concat_tables([each.select(LEFT_OUT_FACTS.names) for each in of_whole(records, whole)])


def _num_true(column: pa.ChunkedArray) -> int:
    return pc.sum(column).as_py() or 0
