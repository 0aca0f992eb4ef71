"""Result of a run: what its journal adds up to, each item counted once, and what publishing it would leave."""

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from embedder.ingest.known_items import LEFT_OUT_FACTS
from embedder.store.arrow_lookup import without_items
from embedder.store.interim import InterimBatch
from embedder.store.journal import JournalEntry, read_finished, read_keys
from embedder.store.layout import Current
from embedder.store.runs import Run


@dataclass(frozen=True)
class RunResult:
    """Result of a run, or of a part of its work: for the guards to judge, to be published, to be reported.

    Attributes:
        run: the run.
        published: what is published now.
        retired: ids that leave the store.
        keeps_published: whether the published vectors of other items stay; not after a change of the model.
        entries: the journal, read once.
        whole: items with records and rows of their own: `item_id`, `session`, `num_vectors`.
        num_items: embedded or rejected.
        left_out: what turned out to be no item: `item_id`, `uri`, `error_type`, `error`.
        num_rejected: of those, and `num_stale` of them keep published vectors.
        num_equal: items whose content is as it was published.
        num_vectors: new rows of embeddings.
        num_here: items that this session finished, and those that were copied for it.
        taken_from: embedded items that were copied from another publication, by its run.
    """

    run: Run
    published: Current | None
    retired: pa.ChunkedArray
    keeps_published: bool
    entries: list[JournalEntry]
    whole: pa.Table
    num_items: int
    left_out: pa.Table
    num_rejected: int
    num_stale: int
    num_equal: int
    num_vectors: int
    num_here: int
    taken_from: dict[str, int]


def count_run(
    run: Run,
    published: Current | None,
    retired: pa.ChunkedArray,
    *,
    keeps_published: bool = True,
    batch: InterimBatch | None = None,
) -> RunResult:
    """Count what the sessions of a run finished, without the items that have left the sources since.

    Args:
        run: the run.
        published: what is published now.
        retired: ids that leave the store, and of items that the run finished before they went.
        keeps_published: whether the published vectors of other items stay.
        batch: only this part of its work counts; None: all.
    """
    entries = run.entries() if batch is None else batch.entries
    finished = read_finished(run.files, entries, ["state", "stale"])
    whole = without_items(finished.whole if batch is None else batch.whole, retired)
    facts = finished.records.select(["item_id", "session", "state", "stale", "path"])
    facts = facts.join(whole, ["item_id", "session"], join_type="inner")
    is_embedded, is_left_out = (pc.equal(facts["state"], state) for state in ("embedded", "left_out"))
    num_items = facts.num_rows - _num_true(is_left_out)
    return RunResult(
        run=run,
        published=published,
        retired=retired,
        keeps_published=keeps_published,
        entries=entries,
        whole=whole.filter(pc.invert(whole["kept"])),
        num_items=num_items,
        left_out=_left_out(run, entries, whole) if num_items < facts.num_rows else LEFT_OUT_FACTS.empty_table(),
        num_rejected=num_items - _num_true(is_embedded),
        num_stale=_num_true(facts["stale"]),
        num_equal=_num_true(pc.and_(is_embedded, facts["kept"])),
        num_vectors=pc.sum(facts.filter(pc.invert(facts["kept"]))["num_vectors"]).as_py() or 0,
        num_here=_num_true(pc.greater_equal(facts["session"], run.session)),
        taken_from=_taken_from(entries, facts.filter(is_embedded)["path"]),
    )


def _taken_from(entries: list[JournalEntry], paths: pa.ChunkedArray) -> dict[str, int]:
    """Count items, by the part files with their records, that were copied from each publication."""
    source = {part.path: entry.taken_from for entry in entries if entry.taken_from for part in entry.parts}
    counts: dict[str, int] = {}
    for count in pc.value_counts(paths).to_pylist():
        if (run_id := source.get(count["values"])) is not None:
            counts[run_id] = counts.get(run_id, 0) + count["counts"]
    return counts


def _left_out(run: Run, entries: list[JournalEntry], whole: pa.Table) -> pa.Table:
    records = read_keys(run.files, entries, "items", [*LEFT_OUT_FACTS.names, "state"])
    records = records.filter(pc.equal(records["state"], "left_out"))
    return records.join(whole, ["item_id", "session"], join_type="left semi").select(LEFT_OUT_FACTS.names)


def _num_true(column: pa.ChunkedArray) -> int:
    return pc.sum(column).as_py() or 0
