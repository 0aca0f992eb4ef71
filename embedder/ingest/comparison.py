"""Comparison of a listing with what is published: what a run has to do, and why. Nothing is written."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pyarrow as pa

from embedder.ingest.damage import damage_lines
from embedder.ingest.inputs import Inputs, resumable, unfinished_run
from embedder.ingest.known_items import left_out_before, published_items
from embedder.ingest.listed_items import ListedItems
from embedder.ingest.model_work import ModelPlan, plan_models, removed_models
from embedder.ingest.work import WorkPlan, outdated_by, plan_work
from embedder.storage.hashed_rows import HashedRows
from embedder.store.journal.runs import Run
from embedder.store.layout import Current, StoreInfo, read_current


@dataclass(frozen=True)
class ListingComparison:
    """What the sources hold compared with what the store has.

    `listing` and `read_before` (items that earlier runs read and left out) lack purged items. `unfinished` is the run
    that this one would continue; None if that has finished nothing. `work` is the main model's, `plans` are the further
    models'. `removed` has the names of published models that the configuration no longer has. `decide` decides again,
    once more items are finished.
    """

    inputs: Inputs
    current: Current | None
    listing: ListedItems
    unfinished: Run | None
    work: WorkPlan
    plans: tuple[ModelPlan, ...]
    removed: tuple[str, ...]
    read_before: pa.Table
    decide: Callable[[HashedRows], WorkPlan]

    @property
    def is_nothing(self) -> bool:
        """Whether the store is as the sources and the configuration want it."""
        current, unfinished = self.current, self.unfinished
        if current is None or not self.work.is_nothing or not all(plan.is_nothing for plan in self.plans):
            return False
        has_begun = unfinished is not None and current.interim_of == unfinished.run_id
        return not has_begun and not (self.removed and self.inputs.options.may_change)

    @property
    def damage(self) -> list[str]:
        """Describe the models whose items record other vectors than the store has, a line each."""
        return damage_lines(self.inputs.files, self.current, self.work, self.plans, self.inputs.options)

    def with_finished(self, finished: HashedRows) -> "ListingComparison":
        """Return the comparison after more items were finished."""
        return replace(self, work=self.decide(finished))


def compare_listing(inputs: Inputs, served: StoreInfo | None) -> ListingComparison:
    """Compare what is listed with what is published, for each model.

    `served` is the model whose vectors the store serves; None for a store that doesn't exist yet.
    """
    files, options = inputs.files, inputs.options
    listing, current = inputs.listing.without_purged(files), read_current(files)
    published = published_items(files, current, repair=options.repair)
    unfinished, finished = unfinished_run(inputs)
    outdated = outdated_by(served, inputs.info) if served is not None and current is not None else None
    decide = partial(plan_work, inputs.config.max_attempts, options, listing, published, outdated=outdated)
    work = decide(finished)
    plans = plan_models(inputs, listing, resumable(inputs))
    read_before = left_out_before(files, current, work.left_out_ids)
    return ListingComparison(
        inputs, current, listing, unfinished, work, plans, removed_models(inputs, current), read_before, decide
    )
