"""Work of further models in a run: what each needs, the union that passes the pipeline, and the results.

Each model has its own plan against its own published rows. An item that any of them needs is read once; in its row each
model finds its own reason, attempts and known content (`embedder.steps.further_inputs.of_model`).
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from embedder.config import RunLimits
from embedder.errors import StoreError
from embedder.executors.job import ModelRun
from embedder.ingest.diff import REJECTED_BEFORE
from embedder.ingest.guards import Verdict, check_forced, force, judge, judge_rejects, retrieval_record
from embedder.ingest.inputs import Inputs
from embedder.ingest.known_items import published_items
from embedder.ingest.listed_items import ListedItems
from embedder.ingest.run_result import RunResult, count_run
from embedder.ingest.work import WorkPlan, outdated_by, plan_work
from embedder.models.further_models import FurtherModel
from embedder.quantities import plural
from embedder.report.schema import ModelReport
from embedder.steps.further_inputs import of_model
from embedder.storage.hashed_rows import HashedRows, RowsInOrder, common_parts
from embedder.store.files import StoreFiles
from embedder.store.journal.model_parts import PER_MODEL
from embedder.store.journal.runs import FINISHED_ITEMS, Run, begin_model_run, finished_items
from embedder.store.layout import STORE_FILE, Current, Kind, RunInfo, StoreInfo, read_current, read_record
from embedder.store.publish.publication import ModelWork, PublishIntent
from embedder.store.schema import EMBEDDINGS, with_carryover
from embedder.store.store_info import bind_store, check_binding, served_info
from embedder.store.tables.arrow_lookup import positions, take_or_null
from embedder.store.tables.tables import RecordTable

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelPlan:
    """Work of a further model on a listing, with the view of its folder and what is published of it."""

    model: FurtherModel
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
        return f"model {self.model.name}: {self.work.describe()}"


@dataclass(frozen=True)
class ModelResult:
    """Result of a further model's part of a run: its plan, run, sum of the journal, and guards' verdicts."""

    plan: ModelPlan
    run: ModelRun
    result: RunResult
    verdicts: tuple[Verdict, ...] = ()

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
        try:
            RecordTable(view, "embeddings").check_schema(with_carryover(EMBEDDINGS, model.outputs))
        except StoreError:
            given = ", ".join(f"{column.name} ({column.type})" for column in model.outputs) or "vectors alone"
            raise StoreError(
                f"model {model.name}: it gives {given}, and its table in {inputs.files.address} has other columns; "
                "give it another `name`, and it gets a table of its own"
            ) from None


def plan_models(inputs: Inputs, listing: ListedItems, run: RunInfo | None) -> tuple[ModelPlan, ...]:
    """Compare a listing with what is published of each model, and with what an unfinished run has finished."""
    return tuple(_plan_model(inputs, model, listing, run) for model in inputs.models)


def _plan_model(inputs: Inputs, model: FurtherModel, listing: ListedItems, run: RunInfo | None) -> ModelPlan:
    view = model.files(inputs.files)
    current, bound = read_current(view), read_record(view, STORE_FILE, StoreInfo)
    outdated = None
    if current is not None and bound is not None:
        outdated = outdated_by(served_info(bound, current), model.info)
    finished = finished_items(Run(view, run, session="")) if run is not None else HashedRows((), FINISHED_ITEMS)
    published = published_items(view, current, repair=inputs.options.repair)
    work = plan_work(inputs.config.max_attempts, inputs.options, listing, published, finished, outdated)
    return ModelPlan(model, view, current, work)


def removed_models(inputs: Inputs, current: Current | None) -> tuple[str, ...]:
    """Return the names of published models that the configuration no longer has."""
    names = {model.name for model in inputs.models}
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


def items_of_any_model(listing: ListedItems, main: pa.Table, plans: Sequence[ModelPlan], limit: int | None) -> pa.Table:
    """Return items that any model needs, with each model's own reason, attempts and known content."""
    names = [plan.model.name for plan in plans]
    needed = [main, *(plan.work.difference.first(limit).to_embed for plan in plans)]
    hashed = [HashedRows([each], each.schema) for each in needed]
    num_parts, chosen = common_parts(listing, *hashed), RowsInOrder()
    for number in range(num_parts):
        of_main, *of_models = (each.part(number, num_parts) for each in hashed)
        chosen.add(_union_part(listing.part(number, num_parts), of_main, dict(zip(names, of_models, strict=True))))
    union = chosen.table()
    if limit is None or union.num_rows <= limit:
        return union
    reasons = [union["reason"], *(union[of_model("reason", plan.model.name)] for plan in plans)]
    is_retry = pc.equal(pc.coalesce(*reasons), REJECTED_BEFORE)
    return pa.concat_tables([union.filter(pc.invert(is_retry)), union.filter(is_retry)]).slice(0, limit)


def _union_part(listing: pa.Table, main: pa.Table, needed: Mapping[str, pa.Table]) -> pa.Table:
    parts = (main, *needed.values())
    wanted = pa.chunked_array([chunk for part in parts for chunk in part["item_id"].chunks], pa.string())
    union = listing.filter(pc.is_in(listing["item_id"], value_set=wanted.combine_chunks()))
    added = {name: main[name] for name in main.column_names if name not in listing.column_names}
    place = positions(union["item_id"], main["item_id"])
    for name, column in added.items():
        union = union.append_column(name, take_or_null(column, place))
    for model, part in needed.items():
        place = positions(union["item_id"], part["item_id"])
        for name in PER_MODEL:
            union = union.append_column(of_model(name, model), take_or_null(part[name], place))
    return union


def begin_models(inputs: Inputs, plans: Sequence[ModelPlan], run: Run) -> tuple[ModelRun, ...]:
    """Bind each view to its model, and return the run in it."""
    found = []
    for plan in plans:
        bind_store(plan.files, plan.model.info, may_change=inputs.options.may_change)
        info = begin_model_run(plan.files, run.info, plan.model.info)
        found.append(ModelRun(plan.model, Run(plan.files, info, run.session)))
    return tuple(found)


def count_models(models: Sequence[tuple[ModelPlan, ModelRun]]) -> tuple[ModelResult, ...]:
    """Add up what each model's journal holds."""
    return tuple(
        ModelResult(
            plan,
            run,
            count_run(run.run, plan.current, plan.work.retired_ids, keeps_published=plan.work.outdated is None),
        )
        for plan, run in models
    )


def judge_model(result: ModelResult, limits: RunLimits, forced: Iterable[str]) -> ModelResult:
    """Judge a model's part of a run: its rejects, and its vectors as the main model's are judged."""
    names = tuple(forced)
    check_forced(names)
    if result.plan.model.info.has_vectors:
        verdicts = judge(result.result, limits, names)
    else:
        verdicts = [force(judge_rejects(result.result, limits), names)]
    told = (each.model_copy(update={"message": f"model {result.plan.model.name}: {each.message}"}) for each in verdicts)
    return ModelResult(result.plan, result.run, result.result, tuple(told))


def works_of(results: Sequence[ModelResult], kind: Kind) -> list[ModelWork]:
    """Return the parts of a publication, one for each model."""
    return [
        ModelWork(
            each.run.run,
            each.run.stamp,
            PublishIntent(
                kind=kind,
                info=each.plan.model.info,
                replaces_all=not each.result.keeps_published,
                retrieval=_retrieval(each),
            ),
            each.result.retired,
        )
        for each in results
    ]


def _retrieval(result: ModelResult) -> dict[str, Any] | None:
    return retrieval_record(result.verdicts, result.plan.current if result.result.keeps_published else None)


def report_models(results: Sequence[ModelResult]) -> dict[str, ModelReport]:
    """Report on each model's part, and log a line about it."""
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
            f"model {name}: {plural(result.num_items - result.num_rejected, 'item')} done, "
            f"{result.num_rejected:,} rejected, {each.num_left:,} left"
        )
    return found
