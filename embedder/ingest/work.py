"""What a run has to do: pure decisions about a listing and what the store knows."""

from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc

from embedder.config import RunConfig
from embedder.ingest.diff import MODEL_CHANGED, PREPROCESSING_CHANGED, Difference, diff, gone
from embedder.ingest.known_items import RetryPolicy, known_items
from embedder.store.layout import Kind, StoreInfo
from embedder.store.store_info import differing


@dataclass(frozen=True)
class IngestOptions:
    """What is asked of a run beside its configuration.

    Attributes:
        kind: `refresh` retires what is gone and may change the model; `embed` only adds.
        retry_rejects: embed again what was rejected before, changed or not.
        only: embed only these items, and retire none.
        limit: the most items to embed in this run.
        max_hours: no further items are begun after so long.
        forced: names of guards that are overridden.
    """

    kind: Kind = "embed"
    retry_rejects: bool = False
    only: pa.Array | None = None
    limit: int | None = None
    max_hours: float | None = None
    forced: tuple[str, ...] = ()

    @property
    def may_change(self) -> bool:
        """Whether items may leave the store, and another model take its place."""
        return self.kind == "refresh" and self.only is None


@dataclass(frozen=True)
class WorkPlan:
    """What is to be done.

    Attributes:
        difference: the listing, sorted.
        retired: published items that are gone: `item_id`, `source`, and what else is known of them.
        outdated: why nothing of what is published can stay: the model or the preprocessing changed.
    """

    difference: Difference
    retired: pa.Table
    outdated: str | None

    @property
    def is_nothing(self) -> bool:
        """Whether the store is as the listing wants it."""
        return not (self.difference.to_embed.num_rows or self.retired.num_rows or self.outdated)


def plan_work(
    config: RunConfig,
    options: IngestOptions,
    listing: pa.Table,
    published: pa.Table,
    finished: pa.Table,
    outdated: str | None,
) -> WorkPlan:
    """Compare a listing with what is published and with what an unfinished run has finished.

    Args:
        config: the run; how often failures are tried again.
        options: what is asked.
        listing: all items of all sources.
        published: of `embedder.ingest.known_items.published_items`.
        finished: of `embedder.store.runs.finished_items`, or no rows.
        outdated: of `outdated_by`.
    """
    policy = RetryPolicy(options.retry_rejects, config.max_attempts, outdated)
    difference = diff(listing, known_items(published, finished, policy))
    retired = gone(listing, published) if options.may_change else published.slice(0, 0)
    if options.only is not None:
        is_meant = pc.is_in(difference.to_embed["item_id"], value_set=options.only)
        difference = replace(difference, to_embed=difference.to_embed.filter(is_meant))
    return WorkPlan(difference, retired, outdated)


def retired_ids(listing: pa.Table, work: WorkPlan, finished: pa.Table) -> pa.ChunkedArray:
    """Items that leave the store, and those that the run had finished before they went."""
    finished_and_gone = gone(listing, finished)["item_id"]
    return pa.chunked_array([*work.retired["item_id"].chunks, *finished_and_gone.chunks], pa.string())


def outdated_by(served: StoreInfo, info: StoreInfo) -> str | None:
    """Why what is published can't stand beside new vectors, if it can't."""
    reasons = {"model_fingerprint": MODEL_CHANGED, "preprocess_fingerprint": PREPROCESSING_CHANGED}
    return next((reasons[name] for name in differing(served, info)), None)


def count_by_source(items: pa.Table) -> dict[str, int]:
    """How many items there are of each source."""
    return {count["values"]: count["counts"] for count in pc.value_counts(items["source"]).to_pylist()}
