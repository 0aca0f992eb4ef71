"""Work of a run, decided by parts: the listing against what is published and what an unfinished run has finished."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from embedder.config import SourceSettings
from embedder.ingest.diff import MODEL_CHANGED, PREPROCESSING_CHANGED, Difference, diff, find_gone
from embedder.ingest.known_items import NO_CHECKS, NOTHING_FINISHED, PUBLISHED, ContentChecks, known_items
from embedder.ingest.listed_items import ListedItems
from embedder.sources.selection import LeftOut
from embedder.storage.hashed_rows import HashedRows, RowsInOrder, read_parts
from embedder.store.journal.runs import Run
from embedder.store.layout import Kind, StoreInfo
from embedder.store.store_info import differing, step_changes
from embedder.store.tables.arrow_lookup import without_ids, without_items

NO_ITEMS = pa.schema([PUBLISHED.field("item_id"), PUBLISHED.field("source")]).empty_table()


class GivenItems(Protocol):
    """Items of a run that replace sources (`embedder.ingest.dataset`)."""

    @property
    def source(self) -> str:
        """Value of the column `source` of its items."""

    def list_items(self, sources: SourceSettings, *, may_be_empty: bool) -> tuple[pa.Table, LeftOut]:
        """List all of them, and count what is left out."""

    def supply(self, chosen: pa.Table, run: Run) -> pa.Table:
        """Put the contents of items to embed where decode finds them."""

    def discard(self, run: Run) -> None:
        """Delete these contents."""


@dataclass(frozen=True)
class IngestOptions:
    """Options of a run besides its configuration.

    `refresh` retires what is gone and may change the model; `embed` only adds. `retry_rejects` embeds again what was
    rejected, changed or not; `repair` items whose rows differ from their record, as `embedder store check` finds them.
    `only` embeds these items and retires none. After `max_hours` no further items are begun. `given` gives the items
    instead of sources, and retires none of the store's others.
    """

    kind: Kind = "embed"
    retry_rejects: bool = False
    repair: bool = False
    only: pa.Array | None = None
    limit: int | None = None
    max_hours: float | None = None
    forced: tuple[str, ...] = ()
    given: GivenItems | None = None

    @property
    def may_retire(self) -> bool:
        """Whether items may leave the store."""
        return self.kind == "refresh" and self.only is None

    @property
    def may_change(self) -> bool:
        """Whether another model may replace the store's, for which all its items must be listed."""
        return self.may_retire and self.given is None


@dataclass(frozen=True)
class WorkPlan:
    """Decision about a listing, which is sorted in `difference`.

    `retired` has `item_id` and `source` of published items that are gone; `retired_ids` also those that the unfinished
    run had finished before they went. `outdated` is why nothing published can stay: the model or preprocessing changed.
    `num_as_published` ignores what an unfinished run has finished; `num_listed` is without purged items;
    `num_published` is by source. `left_out_ids` are listed items that an earlier run read and left out, as they are no
    items. `num_vectors` counts rows of the published items, by their records.
    """

    difference: Difference
    retired: pa.Table
    retired_ids: pa.ChunkedArray
    outdated: str | None
    num_as_published: int
    is_nothing: bool
    num_listed: int
    num_published: Mapping[str, int]
    left_out_ids: pa.ChunkedArray
    num_vectors: int = 0

    def without_retiring(self, ids: pa.ChunkedArray) -> "WorkPlan":
        """Return the plan without retiring some items."""
        return replace(self, retired=without_items(self.retired, ids), retired_ids=without_ids(self.retired_ids, ids))

    def describe(self) -> str:
        """Summarise in one line."""
        parts = [f"{num:,} {reason}" for reason, num in self.difference.reasons.items()]
        if self.retired.num_rows:
            parts.append(f"{self.retired.num_rows:,} gone")
        return ", ".join([*parts, f"{self.difference.num_unchanged:,} unchanged or finished before"])


def plan_work(
    max_attempts: int,
    options: IngestOptions,
    listing: ListedItems,
    published: HashedRows,
    finished: HashedRows,
    outdated: str | None,
    checks: ContentChecks = NO_CHECKS,
) -> WorkPlan:
    """Compare a listing with what is published and with what an unfinished run has finished.

    Only what is published decides whether there is anything to do: an item that the unfinished run finished, and that
    is again as published, needs nothing. `finished` has no rows if there is no such run.
    `checks` chooses items whose content is compared.
    """
    known = partial(
        known_items,
        retry_rejects=options.retry_rejects,
        max_attempts=max_attempts,
        outdated=outdated,
        checks=checks,
    )
    plan, plan_after = _Sum(), _Sum()
    for listed, held, own in read_parts(listing, published, finished):
        plan.add(_difference(options, listed, known(held, NOTHING_FINISHED)))
        if finished.num_rows:
            plan_after.add(_difference(options, listed, known(held, own)))
        plan.add_items(listed, held, own, options)
    return plan.decide(plan_after if finished.num_rows else plan, outdated)


class _Sum:
    def __init__(self) -> None:
        self._to_embed, self._num_unchanged = RowsInOrder(), 0
        self.retired, self.finished_and_gone, self.left_out = [NO_ITEMS], [NO_ITEMS.select([0])], [NO_ITEMS.select([0])]
        self.num_listed, self.num_vectors, self.num_published = 0, 0, Counter[str]()

    def add(self, difference: Difference) -> None:
        self._to_embed.add(difference.to_embed)
        self._num_unchanged += difference.num_unchanged

    def add_items(self, listed: pa.Table, held: pa.Table, own: pa.Table, options: IngestOptions) -> None:
        """Add what leaves, and counts, of a part: listed items, published ones, those the unfinished run finished."""
        if options.may_retire:
            self.retired.append(find_gone(listed, _of_given(held, options)).select(NO_ITEMS.column_names))
            self.finished_and_gone.append(find_gone(listed, _of_given(own, options)).select(["item_id"]))
        left_out = held.filter(pc.equal(held["state"], "left_out")).select(["item_id"])
        if left_out.num_rows:
            self.left_out.append(left_out.join(listed.select(["item_id"]), "item_id", join_type="left semi"))
        self.num_listed += listed.num_rows
        self.num_vectors += pc.sum(held["num_vectors"]).as_py() or 0
        self.num_published.update(count_by_source(held))

    def difference(self) -> Difference:
        """Return the difference of the whole, in the order of the listing."""
        return Difference(self._to_embed.table(), self._num_unchanged)

    def decide(self, after: "_Sum", outdated: str | None) -> WorkPlan:
        """Decide on the whole; `after` has what an unfinished run leaves to do."""
        difference, retired = self.difference(), pa.concat_tables(self.retired)
        is_nothing = not (difference.to_embed.num_rows or retired.num_rows or outdated)
        return WorkPlan(
            difference if is_nothing or after is self else after.difference(),
            retired,
            pa.concat_tables([retired.select(["item_id"]), *self.finished_and_gone])["item_id"],
            outdated,
            difference.num_unchanged,
            is_nothing,
            self.num_listed,
            self.num_published,
            pa.concat_tables(self.left_out)["item_id"],
            self.num_vectors,
        )


def _of_given(items: pa.Table, options: IngestOptions) -> pa.Table:
    """Return the items that may leave; with given items, those of the same name."""
    if options.given is None:
        return items
    source = options.given.source
    if "source" in items.column_names:
        return items.filter(pc.equal(items["source"], source))
    return items.filter(pc.starts_with(items["item_id"], f"{source}:")) if source else items.slice(0, 0)


def _difference(options: IngestOptions, listing: pa.Table, known: pa.Table) -> Difference:
    difference = diff(listing, known)
    if options.only is None:
        return difference
    is_meant = pc.is_in(difference.to_embed["item_id"], value_set=options.only)
    return replace(difference, to_embed=difference.to_embed.filter(is_meant))


def outdated_by(served: StoreInfo, info: StoreInfo) -> str | None:
    """Return why what is published can't stay next to new vectors; None if it can."""
    reasons = {"model_fingerprint": MODEL_CHANGED, "preprocess_fingerprint": PREPROCESSING_CHANGED}
    names = differing(served, info)
    if names == ["steps"]:
        return step_changes(served.steps, info.steps)
    return next((reasons[name] for name in names), None)


def count_by_source(items: pa.Table) -> dict[str, int]:
    """Count the items of each source."""
    return {count["values"]: count["counts"] for count in pc.value_counts(items["source"]).to_pylist()}
