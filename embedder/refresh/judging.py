"""The two moments at which guards are asked: about the listing, and about what would be published."""

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from embedder.config import RunConfig
from embedder.refresh.candidate import Candidate
from embedder.refresh.ended import Ended
from embedder.refresh.guards import Verdict, force, judge, judge_hold, judge_retire
from embedder.refresh.request import Request
from embedder.refresh.work import Options, Work, count_by_source
from embedder.run.counts import Counts
from embedder.store.layout import Current
from embedder.store.runs import Run


def judge_start(request: Request, current: Current | None, work: Work, published: pa.Table) -> tuple[Verdict, ...]:
    """Judge what can be judged before anything is embedded: whether the store is held, and what the listing lost."""
    hold = judge_hold(request.inputs.files.address, current)
    listing = judge_listing(work, published, request.inputs.config, request.options)
    return (listing,) if hold is None else (force(hold, request.options.forced), listing)


def judge_listing(work: Work, published: pa.Table, config: RunConfig, options: Options) -> Verdict:
    """Judge what a listing lost, before anything is embedded."""
    verdict = judge_retire(count_by_source(published), count_by_source(work.retired), config.max_retire_fraction)
    return force(verdict, options.forced)


def judge_result(run: Run, counts: Counts, request: Request, ended: Ended) -> list[Verdict]:
    """Judge what a run would publish."""
    candidate = Candidate(
        run=run,
        entries=counts.entries,
        whole=counts.whole,
        num_items=counts.num_items,
        num_rejected=counts.num_rejected,
        published=ended.current,
        retired=ended.retired.combine_chunks(),
        keeps_published=ended.work.outdated is None,
    )
    return judge(candidate, request.inputs.config, request.options.forced)


def refusal(verdicts: Iterable[Verdict]) -> str | None:
    """Why nothing may be published, if it may not."""
    blocking = [f"guard {verdict.name}: {verdict.message}" for verdict in verdicts if verdict.blocks]
    return "; ".join(blocking) or None


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
