"""What a store and the journal of its unfinished run already know about items, and which of them are checked again."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from embedder.config_toml.run_sections import SourcesConfig
from embedder.ingest.diff import CHECKED, KNOWN, REJECTED_BEFORE, ROWS_DAMAGED
from embedder.installation import MISSING_EXTRA, missing
from embedder.storage.hashed_rows import HashedRows, read_parts
from embedder.store.files import StoreFiles
from embedder.store.journal.runs import FINISHED_ITEMS
from embedder.store.layout import Current
from embedder.store.schema import ITEMS, TIMESTAMP, with_nulls
from embedder.store.tables.arrow_lookup import positions, take_or_null, without_items
from embedder.store.tables.item_rows import ROW_KEYS, compare
from embedder.store.tables.tables import RecordTable

PUBLISHED = pa.schema(
    ITEMS.field(name)
    for name in (
        "item_id", "source", "size_bytes", "modified", "attempts", "state", "transient", "error_type", "stale",
        "content_version", "num_vectors", "updated_at",
    )
)  # fmt: skip

LEFT_OUT_FACTS = pa.schema([ITEMS.field(name) for name in ("item_id", "uri", "error_type", "error")])

NOTHING_FINISHED = FINISHED_ITEMS.empty_table()

DAMAGED = "damaged"
"""State, used only here, of an item whose published rows differ from its record."""


@dataclass(frozen=True)
class ContentChecks:
    """A share of the published items, those first whose record is oldest; with `ids`, these instead.

    A record is made again when its item is read, so that a share of 1/n reads each item in n runs.
    """

    share: float = 0.0
    ids: pa.ChunkedArray | None = None

    def choose(self, published: pa.Table) -> pa.ChunkedArray:
        """Return whether to check each item of a part; those without whole vectors of the present file never are."""
        is_embedded = pc.equal(published["state"], "embedded")
        if self.ids is not None:
            return pc.and_(is_embedded, pc.is_in(published["item_id"], value_set=self.ids.combine_chunks()))
        if self.share in (0, 1):
            return pc.and_(is_embedded, self.share == 1)
        embedded = published.select(["item_id", "updated_at"]).filter(is_embedded)
        oldest = embedded.sort_by([("updated_at", "ascending"), ("item_id", "ascending")])["item_id"]
        chosen = oldest.slice(0, math.ceil(self.share * len(oldest)))
        return pc.and_(is_embedded, pc.is_in(published["item_id"], value_set=chosen.combine_chunks()))


NO_CHECKS = ContentChecks()


def configured_checks(sources: SourcesConfig, *, is_refresh: bool) -> ContentChecks:
    """Return the checks that a configuration asks for; only a refresh checks a share."""
    if sources.changed_by == "content":
        return ContentChecks(1.0)
    return ContentChecks(sources.verify_share) if is_refresh else NO_CHECKS


def published_items(files: StoreFiles, current: Current | None, *, repair: bool = False) -> HashedRows:
    """Read the published items, with the columns of `PUBLISHED`.

    With `repair`, items whose rows differ from their records get the state `DAMAGED`; that reads the keys of all rows.
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
    """Yield published items part by part, each damaged one once."""
    for records, keys in read_parts(items, rows):
        held = records.select(PUBLISHED.names)
        found = compare(held, keys)
        yield without_items(held, found["item_id"])
        yield _find_damaged(found, held)


def _find_damaged(found: pa.Table, held: pa.Table) -> pa.Table:
    """Return items with damaged rows as `PUBLISHED`, with the number of those rows and no known content.

    `found` comes from `embedder.store.tables.item_rows.compare`; rows without a record have no source either.
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
    """Read what is known about listed items (`ids`) that an earlier run read and left out: `LEFT_OUT_FACTS`."""
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
    checks: ContentChecks = NO_CHECKS,
) -> pa.Table:
    """Collect what the listing is compared with, each item once, as `KNOWN`; the journal overrides the table.

    `published` may be one part. `finished` has items of the run's earlier sessions (`finished_items`). `retry_rejects`
    embeds again all that was rejected, or read and left out; `max_attempts` limits attempts at temporary failures.
    `outdated` is a reason to embed again everything published, of which nothing can be kept. `checks`
    chooses published items whose content is compared.
    """
    standing = _standing(published, is_outdated=outdated is not None)
    place = positions(finished["item_id"], published["item_id"])
    retries = partial(_retries, max_attempts=max_attempts, retry_rejects=retry_rejects)
    done = _select_known(finished, retries(finished), {name: take_or_null(standing[name], place) for name in standing})
    if outdated is None:
        why = pc.if_else(checks.choose(published), pa.scalar(CHECKED), retries(published))
    else:
        why = pa.repeat(outdated, published.num_rows)
    older = without_items(_select_known(published, why, standing), finished["item_id"])
    return pa.concat_tables([done, older])


def _select_known(items: pa.Table, why: pa.ChunkedArray, standing: Mapping[str, pa.ChunkedArray]) -> pa.Table:
    columns = {name: items[name] for name in ("item_id", "size_bytes", "modified", "attempts")}
    is_dated = "updated_at" in items.schema.names
    columns["updated_at"] = items["updated_at"] if is_dated else pa.nulls(items.num_rows, TIMESTAMP)
    return pa.table({**columns, "why": why, **standing}).cast(KNOWN)


def _standing(published: pa.Table, *, is_outdated: bool) -> dict[str, pa.ChunkedArray]:
    """Return the columns `known_version` and `known_vectors`: published rows that may be kept."""
    columns = {"known_version": whole_contents(published), "known_vectors": published["num_vectors"]}
    if is_outdated:
        return {name: pa.nulls(published.num_rows, column.type) for name, column in columns.items()}
    return columns


def whole_contents(items: pa.Table) -> pa.ChunkedArray:
    """Return the content that each item's rows are of, null if the rows are incomplete."""
    is_whole = pc.or_(pc.equal(items["state"], "embedded"), pc.fill_null(items["stale"], False))
    return pc.if_else(is_whole, items["content_version"], pa.scalar(None, pa.string()))


def _retries(items: pa.Table, *, max_attempts: int, retry_rejects: bool) -> pa.ChunkedArray:
    """Return reasons to embed items again though they look the same: `rejected before`, `rows damaged`, or null."""
    again = pc.not_equal(items["state"], "embedded")
    if not retry_rejects:
        in_passing = pc.fill_null(items["transient"], False)
        may_work = pc.and_(in_passing, pc.less(items["attempts"], max_attempts))
        if "error_type" in items.schema.names and not missing("formats"):  # since installed
            may_work = pc.or_(may_work, pc.fill_null(pc.equal(items["error_type"], MISSING_EXTRA), False))
        again = pc.and_(again, may_work)
    reasons = pc.if_else(again, pa.scalar(REJECTED_BEFORE), pa.scalar(None, pa.string()))
    return pc.if_else(pc.equal(items["state"], DAMAGED), pa.scalar(ROWS_DAMAGED), reasons)
