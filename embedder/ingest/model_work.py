"""Work of the models of a run: what each needs, the union that passes the pipeline, and the results.

Each model has its own plan against its own published rows; the main model is the first. An item that any of them needs
is read once; in its row each model finds its own reason, attempts and known content (`batch_schema.model_column`).
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import pyarrow as pa
import pyarrow.compute as pc

from embedder.batch_schema import REASON, model_column
from embedder.config import RunLimits
from embedder.errors import StoreError
from embedder.executors.job import ModelRun
from embedder.ingest.diff import REJECTED_BEFORE
from embedder.ingest.guards import Verdict, force, judge, judge_rejects, retrieval_record
from embedder.ingest.inputs import Inputs
from embedder.ingest.known_items import NO_CHECKS, ContentChecks, configured_checks, published_items
from embedder.ingest.listed_items import ListedItems
from embedder.ingest.run_result import RunResult, count_run
from embedder.ingest.work import WorkPlan, outdated_by, plan_work
from embedder.models.run_model import RunModel
from embedder.quantities import plural
from embedder.report.report_schema import ModelReport
from embedder.storage.hashed_rows import HashedRows, RowsInOrder, read_parts
from embedder.store.files import StoreFiles
from embedder.store.journal.runs import Run, begin_model_run
from embedder.store.layout import STORE_FILE, Current, Kind, StoreInfo, read_current, read_record
from embedder.store.publish.interim import NO_IDS, InterimBatch
from embedder.store.publish.publication import MarkRows, ModelWork, PublishIntent
from embedder.store.schema import EMBEDDINGS, with_carryover
from embedder.store.store_info import bind_store, check_binding, served_info
from embedder.store.tables.arrow_lookup import positions, take_or_null
from embedder.store.tables.tables import RecordTable

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelPlan:
    """Work of a model on a listing, with its view of the store and what is published of it."""

    model: RunModel
    files: StoreFiles
    current: Current | None
    work: WorkPlan

    @property
    def is_nothing(self) -> bool:
        """Whether its tables are as the listing wants them."""
        return self.current is not None and self.work.is_nothing

    @property
    def num_to_embed(self) -> int:
        """Number of items that it needs."""
        return int(self.work.difference.to_embed.num_rows)

    def describe(self) -> str:
        """Summarise in one line."""
        return self.prefix + self.work.describe()

    @property
    def prefix(self) -> str:
        """Name a further model at the beginning of a message; nothing for the main one."""
        return f"model {self.model.name}: " if self.model.name else ""


@dataclass(frozen=True)
class ModelResult:
    """Result of a model's part of a run: its plan, run, sum of the journal, and guards' verdicts."""

    plan: ModelPlan
    run: ModelRun
    result: RunResult
    verdicts: tuple[Verdict, ...] = ()

    @property
    def has_changes(self) -> bool:
        """Whether anything of it was finished, or leaves."""
        return bool(self.result.num_here or self.result.num_items or len(self.result.retired))

    @property
    def num_left(self) -> int:
        """Number of items that it still needs."""
        return int(self.plan.num_to_embed - self.result.num_here)


def check_models(inputs: Inputs) -> None:
    """Check that the store's tables of each model can take its rows; nothing is written.

    Raises `StoreError` if a table is of another model and nothing may be replaced, or has other columns.
    """
    for model in inputs.models:
        view = model.files(inputs.files)
        check_binding(view, model.info, may_change=inputs.options.may_change)
        if not model.name:  # the columns of its table also depend on the listing
            continue
        try:
            RecordTable(view, "embeddings").check_schema(with_carryover(EMBEDDINGS, model.outputs))
        except StoreError:
            given = ", ".join(f"{column.name} ({column.type})" for column in model.outputs) or "only vectors"
            raise StoreError(
                f"model {model.name}: it gives {given}, and its table in {inputs.files.address} has other columns; "
                "give it another `name`, and it gets its own table"
            ) from None


def plan_models(inputs: Inputs, listing: ListedItems, finished: Sequence[HashedRows]) -> tuple[ModelPlan, ...]:
    """Plan the work of all models, the main one's first; further ones check the contents that it checks."""
    (first, *further), (own, *others) = inputs.models, finished
    main = plan_model(inputs, first, listing, own)
    checks = ContentChecks(ids=main.work.difference.checked_ids)
    return (main, *(plan_model(inputs, *each, checks) for each in zip(further, repeat(listing), others, strict=False)))


def plan_model(
    inputs: Inputs,
    model: RunModel,
    listing: ListedItems,
    finished: HashedRows,
    checks: ContentChecks | None = None,
) -> ModelPlan:
    """Compare a listing with what is published of a model, and with what an unfinished run has `finished` of it.

    `checks` chooses items whose content is compared; None leaves that to the configuration.
    """
    view = model.files(inputs.files)
    current, bound = read_current(view), read_record(view, STORE_FILE, StoreInfo)
    outdated = None
    if current is not None and bound is not None:
        outdated = outdated_by(served_info(bound, current), model.info)
    published = published_items(view, current, repair=inputs.options.repair)
    if checks is None:
        options, sources = inputs.options, inputs.config.sources
        checks = NO_CHECKS if options.given else configured_checks(sources, is_refresh=options.kind == "refresh")
    work = plan_work(inputs.config.max_attempts, inputs.options, listing, published, finished, outdated, checks)
    return ModelPlan(model, view, current, work)


def removed_models(inputs: Inputs, current: Current | None) -> tuple[str, ...]:
    """Return the names of published models that the configuration no longer has."""
    names = {model.name for model in inputs.models[1:]}
    return tuple(sorted(current.models.keys() - names)) if current is not None else ()


def report_removed(removed: Sequence[str], *, may_change: bool) -> None:
    """Log what becomes of removed models; `may_change` says whether they leave."""
    for name in removed:
        what = (
            "it leaves what is published, and `embedder vacuum` deletes its files"
            if may_change
            else "it stays as it is; `embedder refresh` removes it"
        )
        LOG.info(f"model {name}: not in the configuration any more: {what}")


def items_of_any_model(listing: ListedItems, needed: Mapping[str, pa.Table], limit: int | None) -> pa.Table:
    """Return the items that any model needs, with each model's own reason, attempts and known content.

    `needed` has at most `limit` items by the name of their model.
    """
    if len(needed) == 1:
        return next(iter(needed.values()))
    hashed = {name: HashedRows([each], each.schema) for name, each in needed.items()}
    chosen = RowsInOrder()
    for listed, *parts in read_parts(listing, *hashed.values()):
        chosen.add(_union_part(listed, dict(zip(hashed, parts, strict=True))))
    union = chosen.table()
    if limit is None or union.num_rows <= limit:
        return union
    reasons = [union[model_column(REASON, name)] for name in needed]
    is_retry = pc.equal(pc.coalesce(*reasons), REJECTED_BEFORE)
    return pa.concat_tables([union.filter(pc.invert(is_retry)), union.filter(is_retry)]).slice(0, limit)


def _union_part(listing: pa.Table, needed: Mapping[str, pa.Table]) -> pa.Table:
    wanted = pa.chunked_array([chunk for part in needed.values() for chunk in part["item_id"].chunks], pa.string())
    union = listing.filter(pc.is_in(listing["item_id"], value_set=wanted.combine_chunks()))
    for model, part in needed.items():
        place = positions(union["item_id"], part["item_id"])
        for name in part.column_names:
            if name not in listing.column_names:
                union = union.append_column(model_column(name, model), take_or_null(part[name], place))
    return union


def begin_models(inputs: Inputs, plans: Sequence[ModelPlan], run: Run, carried: pa.Schema) -> tuple[ModelRun, ...]:
    """Bind each further model's view to it, and return the run in each model's view.

    `run` is the main model's, whose table takes over the columns `carried`.
    """
    found = [ModelRun(plans[0].model, run, carried)]
    for plan in plans[1:]:
        bind_store(plan.files, plan.model.info, may_change=inputs.options.may_change)
        info = begin_model_run(plan.files, run.info, plan.model.info)
        found.append(ModelRun(plan.model, Run(plan.files, info, run.session)))
    return tuple(found)


def count_model(plan: ModelPlan, run: ModelRun, batch: InterimBatch | None = None) -> ModelResult:
    """Add up what a model's journal holds; with `batch`, only that part of its work, from which nothing leaves."""
    if batch is not None:
        return ModelResult(plan, run, count_run(run.run, read_current(plan.files), NO_IDS, batch=batch))
    keeps = plan.work.outdated is None
    ids, checked = plan.work.retired_ids, plan.work.difference.checked_ids
    return ModelResult(plan, run, count_run(run.run, plan.current, ids, keeps_published=keeps, checked=checked))


def judge_model(result: ModelResult, limits: RunLimits, forced: Collection[str]) -> ModelResult:
    """Judge a model's part of a run: its rejects, and its vectors if it has any."""
    if result.plan.model.info.has_vectors is False:
        verdicts = [force(judge_rejects(result.result, limits), forced)]
    else:
        verdicts = judge(result.result, limits, forced)
    named = (each.model_copy(update={"message": result.plan.prefix + each.message}) for each in verdicts)
    return replace(result, verdicts=tuple(named))


def work_to_publish(result: ModelResult, kind: Kind, marks: MarkRows, *, is_whole: bool) -> ModelWork:
    """Return a model's part of a publication; `is_whole` says whether all that leaves the store may leave.

    `marks` is whether rows that leave are marked by deletion vectors.

    A rollback's hold then ends, and models that the configuration no longer has leave.
    """
    before = result.plan.current if result.result.keeps_published else None
    intent = PublishIntent(
        kind=kind,
        info=result.plan.model.info,
        replaces_all=not result.result.keeps_published,
        retrieval=retrieval_record(result.verdicts, before),
        deletion_vectors=marks,
    )
    if is_whole and not result.plan.model.name:
        intent = intent.model_copy(update={"ends_hold": True, "kept_models": ()})
    return ModelWork(result.run.run, result.run.part.metadata, intent, result.result.retired)


def report_models(results: Sequence[ModelResult]) -> dict[str, ModelReport]:
    """Report on each further model's part, and log a line about it."""
    found = {}
    for each in results:
        result, name = each.result, each.plan.model.name
        found[name] = ModelReport(
            model=each.plan.model.info.model,
            reasons=each.plan.work.difference.reasons,
            num_items=result.num_items,
            num_rejected=result.num_rejected,
            num_vectors=result.num_vectors,
            num_equal=result.num_equal,
            num_retired=each.plan.work.retired.num_rows,
            num_left=each.num_left,
        )
        LOG.info(
            f"{each.plan.prefix}{plural(result.num_items - result.num_rejected, 'item')} done, "
            f"{result.num_rejected:,} rejected, {each.num_left:,} left"
        )
    return found
