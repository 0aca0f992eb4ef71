"""What a run's journal adds up to, each item counted once."""

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from embedder.ingest.known_items import LEFT_OUT_FACTS
from embedder.store.arrow_lookup import without_items
from embedder.store.journal import JournalEntry, read_finished, read_keys
from embedder.store.runs import Run


@dataclass(frozen=True)
class Counts:
    """What the sessions of a run finished.

    Attributes:
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


def count_run(run: Run, left_out: pa.ChunkedArray) -> Counts:
    """Count what a run finished, without the items that have left the sources since."""
    entries = run.entries()
    finished = read_finished(run.files, entries, ["state", "stale"])
    whole = without_items(finished.whole, left_out)
    facts = finished.records.select(["item_id", "session", "state", "stale", "path"])
    facts = facts.join(whole, ["item_id", "session"], join_type="inner")
    is_embedded, is_left_out = (pc.equal(facts["state"], state) for state in ("embedded", "left_out"))
    num_items = facts.num_rows - _num_true(is_left_out)
    return Counts(
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
    """How many of some items, by the part files with their records, were copied from which publication."""
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
