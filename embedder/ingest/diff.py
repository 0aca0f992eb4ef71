"""Comparison of a listing with the store: new, changed, gone. Pure: Arrow tables in, Arrow tables out."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc

from embedder.sources.listing_schema import changed_after, without_change_times
from embedder.store.schema import TIMESTAMP
from embedder.store.tables.arrow_lookup import positions, take_or_null, without_items

NEW = "new"
CONTENT_CHANGED = "content changed"  # size or time differ; the content may turn out to be equal
MODEL_CHANGED = "model changed"
PREPROCESSING_CHANGED = "preprocessing changed"
CHECKED = "content to be checked"  # it looks the same (`embedder.ingest.known_items.ContentChecks`)
REJECTED_BEFORE = "rejected before"
ROWS_DAMAGED = "rows damaged"  # they differ from the item's record
STEP = "step"  # "step crop changed"; several are listed one after another

KNOWN = pa.schema(
    {
        "item_id": pa.string(),
        "size_bytes": pa.int64(),
        "modified": pa.string(),
        "attempts": pa.int32(),
        "updated_at": TIMESTAMP,  # when it was recorded; null in a journal
        "why": pa.string(),  # why the item is embedded again even if it looks the same; else null
        "known_version": pa.string(),  # content of its published rows, null if those are incomplete
        "known_vectors": pa.int32(),  # their number
    }
)
COMPARED = ("size_bytes", "modified", "updated_at", "attempts", "why")
FACTS = ("attempts", "known_version", "known_vectors")


@dataclass(frozen=True)
class Difference:
    """A sorted listing: items to embed, and the number of all others."""

    to_embed: pa.Table
    num_unchanged: int

    @property
    def reasons(self) -> dict[str, int]:
        """Number of items to embed, by reason."""
        counts = pc.value_counts(self.to_embed["reason"]).to_pylist()
        return {count["values"]: count["counts"] for count in sorted(counts, key=lambda count: -count["counts"])}

    @property
    def checked_ids(self) -> pa.ChunkedArray:
        """Items that look the same, and whose content is to be compared."""
        return self.to_embed.filter(pc.equal(self.to_embed["reason"], CHECKED))["item_id"]

    def first(self, limit: int | None) -> "Difference":
        """Limit the items to embed; rejects and unchanged items come last, and never keep the others waiting."""
        if limit is None or self.to_embed.num_rows <= limit:
            return self
        is_retry = pc.is_in(self.to_embed["reason"], value_set=pa.array([REJECTED_BEFORE, CHECKED]))
        if not pc.any(is_retry).as_py():
            return replace(self, to_embed=self.to_embed.slice(0, limit))
        fresh, retries = self.to_embed.filter(pc.invert(is_retry)), self.to_embed.filter(is_retry)
        return replace(self, to_embed=pa.concat_tables([fresh, retries]).slice(0, limit))


def diff(listing: pa.Table, known: pa.Table) -> Difference:
    """Sort a listing by comparing size and modification time with what the store or the run's journal knows (`KNOWN`).

    Each known item occurs once. The items to embed get the columns `reason`, `attempts` (counted from 1 since the file
    last changed), `known_version` and `known_vectors`.
    """
    place = positions(listing["item_id"], known["item_id"])
    reason = _reasons(listing, {name: take_or_null(known[name], place) for name in COMPARED})
    is_wanted = pc.is_valid(reason)
    to_embed, reason, place = listing.filter(is_wanted), reason.filter(is_wanted), place.filter(is_wanted)
    facts = {name: take_or_null(known[name], place) for name in FACTS}
    is_retry = pc.equal(reason, REJECTED_BEFORE)
    columns = {
        "reason": reason,
        "attempts": pc.add(pc.if_else(is_retry, facts["attempts"], 0), 1).cast(pa.int32()),
        "known_version": facts["known_version"],
        "known_vectors": pc.fill_null(facts["known_vectors"], 0),
    }
    for name, column in columns.items():
        to_embed = to_embed.append_column(name, column)
    return Difference(to_embed, num_unchanged=listing.num_rows - to_embed.num_rows)


def _reasons(listing: pa.Table, of_known: Mapping[str, pa.ChunkedArray]) -> pa.ChunkedArray:
    why = of_known["why"]
    is_same = is_as_recorded(listing, of_known)
    is_outdated = pc.is_in(why, value_set=pa.array([MODEL_CHANGED, PREPROCESSING_CHANGED]))
    is_outdated = pc.or_(is_outdated, pc.fill_null(pc.starts_with(why, STEP), False))
    why_again = pc.if_else(pc.or_(is_same, is_outdated), why, CONTENT_CHANGED)
    return pc.if_else(pc.is_valid(of_known["attempts"]), why_again, NEW)


def is_as_recorded(listing: pa.Table, known: Mapping[str, pa.ChunkedArray]) -> pa.ChunkedArray:
    """Return whether size and version of items are those that `known` has, row by row, as it was at `updated_at`.

    Change times count where both have them. A record without them, of an earlier version, is compared with when it was
    made; without that, only by the times of modification.
    """
    listed, known_version = listing["modified"], known["modified"]
    same_version = same_values(listed, known_version)
    if not pc.all(same_version).as_py():
        bare, known_bare = without_change_times(listed), without_change_times(known_version)
        is_bare = pc.or_(same_values(listed, bare), same_values(known_version, known_bare))
        is_later = changed_after(listed, known["updated_at"])
        same_bare = pc.and_(pc.and_(is_bare, same_values(bare, known_bare)), pc.invert(is_later))
        same_version = pc.or_(same_version, same_bare)
    return pc.and_(same_values(listing["size_bytes"], known["size_bytes"]), same_version)


def same_values(left: pa.ChunkedArray, right: pa.ChunkedArray) -> pa.ChunkedArray:
    """Compare values; two nulls count as equal."""
    both_null = pc.and_(pc.is_null(left), pc.is_null(right))
    return pc.or_(pc.fill_null(pc.equal(left, right), False), both_null)


def find_gone(listing: pa.Table, held: pa.Table) -> pa.Table:
    """Find items that the store holds, in any state, and that are no longer listed; `held` keeps its columns."""
    return without_items(held, listing["item_id"])
