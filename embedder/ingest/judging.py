"""The two moments at which guards are asked: about the listing, and about what would be published."""

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from embedder.batch_schema import carried_schema
from embedder.config import RunConfig
from embedder.ingest.candidate import Candidate
from embedder.ingest.counts import Counts, count_run
from embedder.ingest.ended import Ended
from embedder.ingest.guards import Verdict, force, judge, judge_hold, judge_retire
from embedder.ingest.request import Request
from embedder.ingest.work import IngestOptions, WorkPlan, count_by_source, plan_work, retired_ids
from embedder.store.layout import Current, read_current
from embedder.store.runs import Run, finished_items, resumable_run


def judge_start(request: Request, current: Current | None, work: WorkPlan, published: pa.Table) -> tuple[Verdict, ...]:
    """Judge what can be judged before anything is embedded: whether the store is held, and what the listing lost."""
    hold = judge_hold(request.inputs.files.address, current)
    listing = judge_listing(work, published, request.inputs.config, request.options)
    return (listing,) if hold is None else (force(hold, request.options.forced), listing)


def judge_listing(work: WorkPlan, published: pa.Table, config: RunConfig, options: IngestOptions) -> Verdict:
    """Judge what a listing lost, before anything is embedded."""
    verdict = judge_retire(count_by_source(published), count_by_source(work.retired), config.max_retire_fraction)
    return force(verdict, options.forced)


def judge_result(counts: Counts, request: Request, ended: Ended) -> list[Verdict]:
    """Judge what a run would publish."""
    return _judge(ended.outcome.job.run, counts, request, ended.work, ended.current, ended.retired)


def judge_earlier(request: Request, listing: pa.Table, published: pa.Table, work: WorkPlan) -> list[Verdict]:
    """Judge the unfinished run that this one would go on with, where it has nothing left to do.

    A listing is judged before anything is embedded. Where an earlier run was refused, though, what the other guards
    will say is known by then, and need not wait for the next night.

    Args:
        request: what is asked.
        listing: all items of all sources.
        published: of `embedder.ingest.known_items.published_items`.
        work: what was to be done, were it not for that run.

    Returns:
        Verdicts of all guards but `retire`; none where that run is not at its end.
    """
    inputs = request.inputs
    last = resumable_run(inputs.files, inputs.info, carried_schema(listing.schema))
    if last is None:
        return []
    run = Run(inputs.files, last, session="")
    finished = finished_items(run)
    left = plan_work(inputs.config, request.options, listing, published, finished, work.outdated)
    if not finished.num_rows or left.difference.to_embed.num_rows:
        return []
    retired = retired_ids(listing, left, finished)
    return _judge(run, count_run(run, retired), request, left, read_current(inputs.files), retired)


def _judge(
    run: Run, counts: Counts, request: Request, work: WorkPlan, current: Current | None, retired: pa.ChunkedArray
) -> list[Verdict]:
    candidate = Candidate(
        run=run,
        entries=counts.entries,
        whole=counts.whole,
        num_items=counts.num_items,
        num_rejected=counts.num_rejected,
        published=current,
        retired=retired.combine_chunks(),
        keeps_published=work.outdated is None,
    )
    return judge(candidate, request.inputs.config, request.options.forced)


def refusal(verdicts: Sequence[Verdict]) -> str | None:
    """Why nothing may be published, if it may not: every guard that failed, and the one option for all of them."""
    blocking = [verdict for verdict in verdicts if verdict.blocks]
    if not blocking:
        return None
    told = "; ".join(f"guard {verdict.name}: {verdict.message}" for verdict in blocking)
    failed = [verdict.name for verdict in verdicts if not verdict.passed]  # those forced this time are needed again
    force = " ".join(f"--force {name}" for name in failed)
    return f"{told}; nothing is published: to publish it as it is, run the same command with {force}"


def retrieval_record(verdicts: Iterable[Verdict], before: Current | None) -> dict[str, Any] | None:
    """The figure that CURRENT.json keeps for the next comparison.

    Args:
        verdicts: of all guards.
        before: whose figure stays where too little was there to judge; none after a change of the model.
    """
    for verdict in verdicts:
        if verdict.name == "retrieval" and verdict.figure is not None:
            return {"recall_at_10": verdict.figure, "num_pairs": verdict.num_judged}
    return before.retrieval if before is not None else None
