"""Comparison of a listing with what is published: what a run has to do, and why. Nothing is written."""

from dataclasses import dataclass, replace
from functools import cached_property

import pyarrow as pa

from embedder.batch_schema import carried_schema
from embedder.ingest.copies import COPIES, Copies, find_copies
from embedder.ingest.diff import NEW
from embedder.ingest.inputs import Inputs
from embedder.ingest.known_items import PUBLISHED, left_out_before
from embedder.ingest.listed_items import ListedItems
from embedder.ingest.model_work import ModelPlan, plan_model, plan_models, removed_models
from embedder.ingest.work import WorkPlan
from embedder.quantities import plural
from embedder.storage.hashed_rows import HashedRows
from embedder.store.journal.runs import FINISHED_ITEMS, Run, finished_items, resumable_run
from embedder.store.layout import PUBLISHED_FILE, Current, Published, read_current, read_record, run_file
from embedder.store.publish.current import record_of

FINISHED_FACTS = ["item_id", "size_bytes", "modified"]
LISTED_FACTS = pa.schema([*(PUBLISHED.field(name) for name in FINISHED_FACTS), ("reason", pa.string())])


@dataclass(frozen=True)
class ListingComparison:
    """What the sources hold compared with what the store has.

    `listing` and `read_before` (items that earlier runs read and left out) lack purged items. `unfinished` is the run
    that this one would continue; None if that has finished nothing. `plans` has each model's work, the main one's
    first. `removed` has the names of published models that the configuration no longer has.
    """

    inputs: Inputs
    current: Current | None
    listing: ListedItems
    unfinished: Run | None
    plans: tuple[ModelPlan, ...]
    removed: tuple[str, ...]
    read_before: pa.Table

    @property
    def work(self) -> WorkPlan:
        """The main model's work."""
        return self.plans[0].work

    @property
    def is_nothing(self) -> bool:
        """Whether the store is as the sources and the configuration want it."""
        current, unfinished = self.current, self.unfinished
        if not all(plan.is_nothing for plan in self.plans):
            return False
        has_begun = unfinished is not None and current is not None and current.interim_of == unfinished.run_id
        return not has_begun and not (self.removed and self.inputs.options.may_change)

    @cached_property
    def copies(self) -> Copies:
        """New items, also those that the unfinished run has finished, whose content may be that of a published item."""
        if self.work.outdated is not None or self.current is None:
            return Copies(COPIES.empty_table())
        wanted = self.work.difference.to_embed.select(LISTED_FACTS.names).cast(LISTED_FACTS)
        if self.unfinished is not None:
            done = [each.select(FINISHED_FACTS) for each in finished_items(self.unfinished).tables()]
            new = pa.concat_tables([LISTED_FACTS.empty_table().select(FINISHED_FACTS), *done])
            reason = pa.chunked_array([pa.repeat(pa.scalar(NEW), new.num_rows)])
            wanted = pa.concat_tables([wanted, new.append_column("reason", reason).select(LISTED_FACTS.names)])
        return find_copies(self.inputs.files, self.current, wanted)

    @cached_property
    def moved_ids(self) -> pa.ChunkedArray:
        """Published items that are gone, and are probably listed under another id."""
        gone = self.work.retired["item_id"]
        return self.copies.moved_ids(gone) if len(gone) else gone

    def without_retiring(self, ids: pa.ChunkedArray) -> "ListingComparison":
        """Return the comparison with some items that stay published, though they are gone."""
        return replace(self, plans=tuple(replace(plan, work=plan.work.without_retiring(ids)) for plan in self.plans))

    @property
    def damage(self) -> list[str]:
        """Describe the models whose items record another number of vectors than the publication does, a line each.

        Finding these items means reading all rows: that is left to `embedder store check`, or to a run that repairs.
        """
        current, files = self.current, self.inputs.files
        if current is None or self.inputs.options.repair:
            return []
        record = read_record(files, run_file(current.run_id, PUBLISHED_FILE), Published)
        lines = []
        for plan in self.plans:
            published = record_of(record, plan.model.name)
            if published is not None and published.num_vectors != plan.work.num_vectors:
                lines.append(
                    f"{plan.prefix}its items have {plural(plan.work.num_vectors, 'vector')}, and "
                    f"{published.num_vectors:,} are published: `embedder store check {files.option}` names the items, "
                    "--repair embeds them again"
                )
        return lines

    def with_finished(self, finished: HashedRows) -> "ListingComparison":
        """Return the comparison after more items of the main model were finished."""
        main, *further = self.plans
        main = plan_model(self.inputs, main.model, self.listing, finished)
        return replace(self, plans=(main, *further))


def compare_listing(inputs: Inputs) -> ListingComparison:
    """Compare what is listed with what is published, for each model."""
    listing, current = inputs.listing.without_purged(inputs.files), read_current(inputs.files)
    run = resumable_run(inputs.files, inputs.info, carried_schema(inputs.listing.schema), inputs.views)
    views = [model.files(inputs.files) for model in inputs.models]
    nothing = HashedRows((), FINISHED_ITEMS)
    finished = [nothing if run is None else finished_items(Run(view, run, session="")) for view in views]
    plans = plan_models(inputs, listing, finished)
    unfinished = Run(inputs.files, run, session="") if run is not None and finished[0].num_rows else None
    read_before = left_out_before(inputs.files, current, plans[0].work.left_out_ids)
    return ListingComparison(inputs, current, listing, unfinished, plans, removed_models(inputs, current), read_before)
