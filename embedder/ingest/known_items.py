"""What a store and the journal of its unfinished run already know about items."""

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from embedder.ingest.diff import KNOWN, REJECTED_BEFORE
from embedder.store.arrow_lookup import positions, take_or_null, without_items
from embedder.store.files import StoreFiles
from embedder.store.layout import Current
from embedder.store.runs import FINISHED
from embedder.store.schema import ITEMS, with_nulls
from embedder.store.tables import RecordTable

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
        "stale",
        "content_version",
        "num_vectors",
    )
)

LEFT_OUT_FACTS = pa.schema([ITEMS.field(name) for name in ("item_id", "uri", "error_type", "error")])

STANDING = ("known_version", "known_vectors")

NOTHING_FINISHED = pa.schema([ITEMS.field(name) for name in ("item_id", *FINISHED)]).empty_table()


@dataclass(frozen=True)
class RetryPolicy:
    """What is embedded again although it looks the same.

    Attributes:
        retry_rejects: all that was rejected, or left out once it had been read.
        max_attempts: what failed in passing is tried by itself until it failed so often.
        outdated: everything that is published, and why; nothing of it can be kept.
    """

    retry_rejects: bool = False
    max_attempts: int = 5
    outdated: str | None = None


def published_items(files: StoreFiles, current: Current | None) -> pa.Table:
    """The published items as far as a run needs to know them."""
    if current is None:
        return PUBLISHED.empty_table()
    items = RecordTable(files, "items", current.items).read(PUBLISHED.names)
    return with_nulls(items, PUBLISHED).select(PUBLISHED.names).cast(PUBLISHED)


def left_out_before(files: StoreFiles, current: Current | None, published: pa.Table, listing: pa.Table) -> pa.Table:
    """Listed items that an earlier run read and left out: `LEFT_OUT_FACTS`.

    Args:
        files: the store.
        current: what is published.
        published: of `published_items`.
        listing: listed items.
    """
    if current is None or not pc.any(pc.equal(published["state"], "left_out")).as_py():
        return LEFT_OUT_FACTS.empty_table()
    items = RecordTable(files, "items", current.items).read([*LEFT_OUT_FACTS.names, "state"])
    items = items.filter(pc.equal(items["state"], "left_out")).select(LEFT_OUT_FACTS.names)
    return items.join(listing.select(["item_id"]), "item_id", join_type="left semi")


def known_items(published: pa.Table, finished: pa.Table, policy: RetryPolicy) -> pa.Table:
    """What the listing is compared with; the journal's word counts before the table's.

    Args:
        published: of `published_items`.
        finished: items that the run's earlier sessions finished (`embedder.store.runs.finished_items`).
        policy: what is embedded again.

    Returns:
        A table of `KNOWN`, each item once.
    """
    standing = _standing(published, policy)
    place = positions(finished["item_id"], published["item_id"])
    done = _known(
        finished, _retries(finished, policy), {name: take_or_null(standing[name], place) for name in standing}
    )
    outdated = policy.outdated
    why = _retries(published, policy) if outdated is None else pa.repeat(outdated, published.num_rows)
    older = without_items(_known(published, why, standing), finished["item_id"])
    return pa.concat_tables([done, older])


def _known(items: pa.Table, why: pa.ChunkedArray, standing: Mapping[str, pa.ChunkedArray]) -> pa.Table:
    columns = {name: items[name] for name in ("item_id", "size_bytes", "modified", "attempts")}
    return pa.table({**columns, "why": why, **standing}).cast(KNOWN)


def _standing(published: pa.Table, policy: RetryPolicy) -> dict[str, pa.ChunkedArray]:
    """What may be kept of the published rows: `known_version`, `known_vectors`."""
    if policy.outdated is not None:
        return {name: pa.nulls(published.num_rows, KNOWN.field(name).type) for name in STANDING}
    return dict(zip(STANDING, (whole_contents(published), published["num_vectors"]), strict=True))


def whole_contents(items: pa.Table) -> pa.ChunkedArray:
    """The content that each item's rows are of, null where those are not all that it could have."""
    is_whole = pc.or_(pc.equal(items["state"], "embedded"), pc.fill_null(items["stale"], False))
    return pc.if_else(is_whole, items["content_version"], pa.scalar(None, pa.string()))


def _retries(items: pa.Table, policy: RetryPolicy) -> pa.ChunkedArray:
    """Why items are tried again: `rejected before`, or null."""
    again = pc.not_equal(items["state"], "embedded")
    if not policy.retry_rejects:
        in_passing = pc.fill_null(items["transient"], False)
        again = pc.and_(again, pc.and_(in_passing, pc.less(items["attempts"], policy.max_attempts)))
    return pc.if_else(again, pa.scalar(REJECTED_BEFORE), pa.scalar(None, pa.string()))
