"""Work of a run: pure decisions about a listing, what is published, and what an unfinished run has finished."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from embedder.config import RunConfig
from embedder.ingest.diff import MODEL_CHANGED, PREPROCESSING_CHANGED, Difference, diff, gone
from embedder.ingest.known_items import NOTHING_FINISHED, known_items
from embedder.sources.selection import LeftOut
from embedder.store.interim import NO_IDS
from embedder.store.layout import Kind, StoreInfo
from embedder.store.runs import Run
from embedder.store.store_info import differing, step_changes


class GivenItems(Protocol):
    """Items of a run in the place of sources (`embedder.ingest.dataset`)."""

    @property
    def source(self) -> str:
        """Name that stands in the column `source` of its items."""

    def list_items(self, config: RunConfig, *, may_be_empty: bool) -> tuple[pa.Table, LeftOut]:
        """List all of them, and count what is left out."""

    def supply(self, chosen: pa.Table, run: Run) -> pa.Table:
        """Put the contents of items that are to be embedded where decode finds them."""

    def discard(self, run: Run) -> None:
        """Delete these contents."""


@dataclass(frozen=True)
class IngestOptions:
    """Options of a run beside its configuration.

    Attributes:
        kind: `refresh` retires what is gone and may change the model; `embed` only adds.
        retry_rejects: embed again what was rejected before, changed or not.
        only: embed only these items, and retire none.
        limit: the most items to embed in this run.
        max_hours: hours after which no further items are begun.
        forced: names of guards that are overridden.
        given: gives the items in the place of sources; of the store's others none is retired.
    """

    kind: Kind = "embed"
    retry_rejects: bool = False
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
        """Whether another model may take the place of the store's, for which all its items must be listed."""
        return self.may_retire and self.given is None


@dataclass(frozen=True)
class WorkPlan:
    """Decision about a listing.

    Attributes:
        difference: the listing, sorted.
        retired: published items that are gone: `item_id`, `source`, and what else is known of them.
        retired_ids: ids of those, and of items that the unfinished run had finished before they went.
        outdated: why nothing of what is published can stay: the model or the preprocessing changed.
        num_as_published: listed items that are as they are published, whatever an unfinished run has finished.
        is_nothing: whether the store is as the listing wants it.
    """

    difference: Difference
    retired: pa.Table
    retired_ids: pa.ChunkedArray
    outdated: str | None
    num_as_published: int
    is_nothing: bool

    def describe(self) -> str:
        """Summary in one line."""
        parts = [f"{num:,} {reason}" for reason, num in self.difference.reasons.items()]
        if self.retired.num_rows:
            parts.append(f"{self.retired.num_rows:,} gone")
        return ", ".join([*parts, f"{self.difference.num_unchanged:,} unchanged or finished before"])


def plan_work(
    config: RunConfig,
    options: IngestOptions,
    listing: pa.Table,
    published: pa.Table,
    finished: pa.Table,
    outdated: str | None,
) -> WorkPlan:
    """Compare a listing with what is published and with what an unfinished run has finished.

    What is published alone says whether there is anything to do: an item that the unfinished run finished, and that is
    again as it was published, needs nothing.

    Args:
        config: the run; how often failures are tried again.
        options: limits, retries, and whether items may leave.
        listing: all items of all sources.
        published: of `embedder.ingest.known_items.published_items`.
        finished: of `embedder.store.runs.finished_items`, or no rows.
        outdated: of `outdated_by`.
    """
    known = partial(
        known_items, published, retry_rejects=options.retry_rejects, max_attempts=config.max_attempts, outdated=outdated
    )
    difference = _difference(options, listing, known(NOTHING_FINISHED))
    num_as_published = difference.num_unchanged
    retired, retired_ids = published.slice(0, 0), NO_IDS
    if options.may_retire:
        retired = gone(listing, _of_given(published, options))
        ids = [*retired["item_id"].chunks, *gone(listing, _of_given(finished, options))["item_id"].chunks]
        retired_ids = pa.chunked_array(ids, pa.string())
    is_nothing = not (difference.to_embed.num_rows or retired.num_rows or outdated)
    if finished.num_rows and not is_nothing:
        difference = _difference(options, listing, known(finished))
    return WorkPlan(difference, retired, retired_ids, outdated, num_as_published, is_nothing)


def _of_given(items: pa.Table, options: IngestOptions) -> pa.Table:
    """Items that may leave: of items that are given in the place of sources, those of the same name."""
    if options.given is None:
        return items
    source = options.given.source
    if "source" in items.column_names:
        return items.filter(pc.equal(items["source"], source))
    return items.filter(pc.starts_with(items["item_id"], f"{source}:")) if source else items.slice(0, 0)


def _difference(options: IngestOptions, listing: pa.Table, known: pa.Table) -> Difference:
    """Sort a listing, and leave out items that are not asked for."""
    difference = diff(listing, known)
    if options.only is None:
        return difference
    is_meant = pc.is_in(difference.to_embed["item_id"], value_set=options.only)
    return replace(difference, to_embed=difference.to_embed.filter(is_meant))


def outdated_by(served: StoreInfo, info: StoreInfo) -> str | None:
    """Reason why what is published can't stand beside new vectors; none where it can."""
    reasons = {"model_fingerprint": MODEL_CHANGED, "preprocess_fingerprint": PREPROCESSING_CHANGED}
    names = differing(served, info)
    if names == ["steps"]:
        return step_changes(served.steps, info.steps)
    return next((reasons[name] for name in names), None)


def count_by_source(items: pa.Table) -> dict[str, int]:
    """Count the items of each source."""
    return {count["values"]: count["counts"] for count in pc.value_counts(items["source"]).to_pylist()}
