"""Facts about items that a store and the journal of its unfinished run already have."""

from collections.abc import Iterator, Mapping
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from embedder.ingest.diff import KNOWN, REJECTED_BEFORE, ROWS_DAMAGED
from embedder.installation import MISSING_EXTRA, missing
from embedder.storage.hashed_rows import HashedRows, common_parts
from embedder.store.files import StoreFiles
from embedder.store.journal.runs import FINISHED_ITEMS
from embedder.store.layout import Current
from embedder.store.schema import ITEMS, with_nulls
from embedder.store.tables.arrow_lookup import positions, take_or_null, without_items
from embedder.store.tables.item_rows import ROW_KEYS, compare
from embedder.store.tables.tables import RecordTable

PUBLISHED = pa.schema(
    ITEMS.field(name)
    for name in (
        "item_id",
        "source",
        "size_bytes",
        "modified",
        "attempts",
        "state",
        "transient",
        "error_type",
        "stale",
        "content_version",
        "num_vectors",
    )
)

LEFT_OUT_FACTS = pa.schema([ITEMS.field(name) for name in ("item_id", "uri", "error_type", "error")])

NOTHING_FINISHED = FINISHED_ITEMS.empty_table()

DAMAGED = "damaged"
"""State, here alone, of an item whose published rows are not what its record tells."""


def published_items(files: StoreFiles, current: Current | None, *, repair: bool = False) -> HashedRows:
    """Read the published items, with the columns of `PUBLISHED`.

    Args:
        files: the store, or the view of a further model.
        current: what is published of it.
        repair: give the items whose rows are not what their records tell the state `DAMAGED`, which takes a look at
            the keys of all rows.
    """
    if current is None:
        return HashedRows((), PUBLISHED)
    table = RecordTable(files, "items", current.items)
    whole = (with_nulls(each, PUBLISHED) for each in table.pieces(PUBLISHED.names))
    items = HashedRows((each.select(PUBLISHED.names).cast(PUBLISHED) for each in whole), PUBLISHED)
    if not repair:
        return items
    embeddings = RecordTable(files, "embeddings", current.embeddings)
    keys = (each.select(ROW_KEYS.names).cast(ROW_KEYS) for each in embeddings.pieces(ROW_KEYS.names))
    return HashedRows(_mark_damaged(items, HashedRows(keys, ROW_KEYS)), PUBLISHED)


def _mark_damaged(items: HashedRows, rows: HashedRows) -> Iterator[pa.Table]:
    """Published items part by part, those whose rows are damaged once each."""
    num_parts = common_parts(items, rows)
    for number in range(num_parts):
        held = items.part(number, num_parts).select(PUBLISHED.names)
        found = compare(held, rows.part(number, num_parts))
        yield without_items(held, found["item_id"])
        yield _find_damaged(found, held)


def _find_damaged(found: pa.Table, held: pa.Table) -> pa.Table:
    """Items whose rows are damaged, as `PUBLISHED`, with the number of those rows and no content that is known.

    Args:
        found: of `embedder.store.tables.item_rows.compare`; what has rows and no record has no source either.
        held: the items of the part.
    """
    place, constants = positions(found["item_id"], held["item_id"]), {"state": DAMAGED, "attempts": 1, "stale": False}
    columns: dict[str, pa.ChunkedArray | pa.Array] = {
        field.name: pa.repeat(pa.scalar(constants.get(field.name), field.type), found.num_rows) for field in PUBLISHED
    }
    columns |= {name: take_or_null(held[name], place) for name in ("source", "size_bytes", "modified")}
    columns |= {"item_id": found["item_id"], "num_vectors": found["num_rows"].cast(pa.int32())}
    columns["source"] = pc.fill_null(columns["source"], "")
    return pa.table(columns, schema=PUBLISHED)


def left_out_before(files: StoreFiles, current: Current | None, ids: pa.ChunkedArray) -> pa.Table:
    """Read what is known of items that an earlier run read and left out: `LEFT_OUT_FACTS`.

    Args:
        files: the store.
        current: what is published.
        ids: of those that are listed (`embedder.ingest.work.WorkPlan`).
    """
    found = [LEFT_OUT_FACTS.empty_table()]
    if current is not None and len(ids):
        for items in RecordTable(files, "items", current.items).pieces([*LEFT_OUT_FACTS.names, "state"]):
            left_out = items.filter(pc.equal(items["state"], "left_out")).select(LEFT_OUT_FACTS.names)
            found.append(left_out.filter(pc.is_in(left_out["item_id"], value_set=ids.combine_chunks())))
    return pa.concat_tables(found)


def known_items(
    published: pa.Table,
    finished: pa.Table,
    *,
    retry_rejects: bool = False,
    max_attempts: int = 5,
    outdated: str | None = None,
) -> pa.Table:
    """Collect what the listing is compared with; the journal counts before the table.

    Args:
        published: of `published_items`; of all, or of one part.
        finished: items that the run's earlier sessions finished (`embedder.store.journal.runs.finished_items`).
        retry_rejects: embed again all that was rejected, or left out once it had been read.
        max_attempts: number of attempts at what fails in passing.
        outdated: reason to embed again all that is published; nothing of it can be kept.

    Returns:
        A table of `KNOWN`, each item once.
    """
    standing = _standing(published, is_outdated=outdated is not None)
    place = positions(finished["item_id"], published["item_id"])
    retries = partial(_retries, max_attempts=max_attempts, retry_rejects=retry_rejects)
    done = _select_known(finished, retries(finished), {name: take_or_null(standing[name], place) for name in standing})
    why = retries(published) if outdated is None else pa.repeat(outdated, published.num_rows)
    older = without_items(_select_known(published, why, standing), finished["item_id"])
    return pa.concat_tables([done, older])


def _select_known(items: pa.Table, why: pa.ChunkedArray, standing: Mapping[str, pa.ChunkedArray]) -> pa.Table:
    columns = {name: items[name] for name in ("item_id", "size_bytes", "modified", "attempts")}
    return pa.table({**columns, "why": why, **standing}).cast(KNOWN)


def _standing(published: pa.Table, *, is_outdated: bool) -> dict[str, pa.ChunkedArray]:
    """Columns `known_version` and `known_vectors`: published rows that may be kept."""
    columns = {"known_version": whole_contents(published), "known_vectors": published["num_vectors"]}
    if is_outdated:
        return {name: pa.nulls(published.num_rows, column.type) for name, column in columns.items()}
    return columns


def whole_contents(items: pa.Table) -> pa.ChunkedArray:
    """Content that each item's rows are of, null where those are not all that it could have."""
    is_whole = pc.or_(pc.equal(items["state"], "embedded"), pc.fill_null(items["stale"], False))
    return pc.if_else(is_whole, items["content_version"], pa.scalar(None, pa.string()))


def _retries(items: pa.Table, *, max_attempts: int, retry_rejects: bool) -> pa.ChunkedArray:
    """Reasons to embed items again though they look the same: `rejected before`, `rows damaged`, or null."""
    again = pc.not_equal(items["state"], "embedded")
    if not retry_rejects:
        in_passing = pc.fill_null(items["transient"], False)
        may_work = pc.and_(in_passing, pc.less(items["attempts"], max_attempts))
        if "error_type" in items.schema.names and not missing("formats"):  # installed since it was left out
            may_work = pc.or_(may_work, pc.fill_null(pc.equal(items["error_type"], MISSING_EXTRA), False))
        again = pc.and_(again, may_work)
    reasons = pc.if_else(again, pa.scalar(REJECTED_BEFORE), pa.scalar(None, pa.string()))
    return pc.if_else(pc.equal(items["state"], DAMAGED), pa.scalar(ROWS_DAMAGED), reasons)
