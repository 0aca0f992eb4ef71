"""Compares the rows of the tables: each item appears once, with the vectors that its record says; checks the counts."""

from collections import Counter

import pyarrow as pa
import pyarrow.compute as pc

from embedder.plugins.maintain.store_check.findings import NUM_SHOWN, Finding, Severity, format_names
from embedder.plugins.maintain.store_check.parts import TableContent
from embedder.plugins.maintain.store_check.scope import CheckedModel
from embedder.quantities import plural
from embedder.store.layout import PUBLISHED_FILE, Published, run_file
from embedder.store.tables.item_rows import mismatches

REPAIR = "`embedder refresh CONFIG.toml --repair` embeds them again"

_OF_STRANGERS = "`embedder refresh CONFIG.toml --repair` embeds those again that are listed, and retires the others"
_ALL_ROWS = "an embedded item has as many rows in embeddings as its num_vectors says"
# What is checked of an item, worst first: severity, table, what was found, rule, and remedy.
_KINDS: tuple[tuple[str, Severity, str, str, str, str], ...] = (
    ("twice", "error", "items", "in more than one row", "items has each item_id once", REPAIR),
    ("without a record", "error", "embeddings", "with vectors, in no row of items",
     "each row of embeddings has its item", _OF_STRANGERS),
    ("segments twice", "error", "embeddings", "with a segment in more than one row",
     "embeddings has each item_id and segment once", REPAIR),
    ("without vectors", "error", "items", "in state embedded without all vectors", _ALL_ROWS, REPAIR),
    ("other vectors", "error", "items", "in state embedded with more vectors than num_vectors says", _ALL_ROWS, REPAIR),
    ("rejects", "warning", "items", "not embedded, with other vectors than num_vectors says",
     "an item that was rejected keeps as many rows in embeddings as its num_vectors says", REPAIR),
)  # fmt: skip


def check_rows(model: CheckedModel, items: TableContent, embeddings: TableContent) -> list[Finding]:
    """Compare the published items with the published rows of embeddings, part by part."""
    if not (items.is_whole and embeddings.is_whole):
        place = model.place("items")
        rule = "ids are compared where all part files of both tables can be read"
        return [
            Finding("note", place, "not compared with embeddings", rule, "cure the other findings, and check again")
        ]
    numbers, first = Counter[str](), dict[str, list[str]]()
    for found in mismatches(items.keys, embeddings.keys):
        for kind, ids in kinds_of(found).items():
            numbers[kind] += len(ids)
            known = first.setdefault(kind, [])
            known += ids.slice(0, NUM_SHOWN - len(known)).to_pylist()
    return [
        Finding(
            severity,
            model.place(table),
            f"{plural(numbers[kind], 'item')} {what}: {format_names(map(repr, first[kind]), numbers[kind])}",
            rule,
            cure,
        )
        for kind, severity, table, what, rule, cure in _KINDS
        if numbers[kind]
    ]


def kinds_of(found: pa.Table) -> dict[str, pa.ChunkedArray]:
    """Group ids of items (`embedder.store.tables.item_rows.MISMATCHES`) by their worst mistake."""
    is_embedded = pc.fill_null(pc.equal(found["state"], "embedded"), False)
    expected = pc.coalesce(found["num_expected"], 1)
    conditions = (
        pc.greater(found["num_records"], 1),
        pc.equal(found["num_records"], 0),
        pc.less(found["num_segments"], found["num_rows"]),
        pc.and_(is_embedded, pc.less(found["num_rows"], expected)),
        is_embedded,
    )
    kinds = [pa.scalar(kind) for kind, *_ in _KINDS]
    which = pc.case_when(pc.make_struct(*(each.combine_chunks() for each in conditions)), *kinds)
    return {each.as_py(): found["item_id"].filter(pc.equal(which, each)) for each in pc.unique(which)}


def check_counts(
    model: CheckedModel, items: TableContent, embeddings: TableContent, record: Published | None
) -> list[Finding]:
    """Compare a record's counts with the model's tables; None if there is no record or it has no counts."""
    if record is None or not (items.is_whole and embeddings.is_whole):
        return []
    expected = {
        "num_items": items.states.total() - items.states["left_out"],
        "num_vectors": embeddings.num_rows,
        "num_rejected": items.states["rejected"],
    }
    differing = {name: number for name, number in expected.items() if getattr(record, name) != number}
    if not differing:
        return []
    path = run_file(record.run_id, PUBLISHED_FILE)
    found = ", ".join(f"{name} is {getattr(record, name):,}" for name in differing)
    has = ", ".join(f"{name} {number:,}" for name, number in differing.items())
    where = f"of model {model.name}, " if model.name else ""
    return [
        Finding(
            "error",
            path,
            f"{where}{found}",
            f"the tables have {has}",
            "restore the file from a backup, or correct the numbers in it: they are for people and for guards",
        )
    ]
