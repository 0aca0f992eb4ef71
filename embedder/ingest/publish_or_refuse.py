"""What becomes of a run whose engine has ended: it is published, kept for the next time, or refused."""

import pyarrow as pa

from embedder.errors import RunFailedError
from embedder.ingest.build_report import make_report
from embedder.ingest.counts import Counts, count_run
from embedder.ingest.ended import Ended
from embedder.ingest.guards import Verdict
from embedder.ingest.judging import judge_result, refusal, retrieval_record
from embedder.ingest.request import Request
from embedder.report.schema import Report
from embedder.sources.selection import LeftOut
from embedder.store.arrow_lookup import without_items
from embedder.store.compact import compact_if_needed
from embedder.store.layout import run_file
from embedder.store.publish import PublishIntent, publish
from embedder.store.runs import REPORT_FILE
from embedder.store_index.keep_index import keep_index


def end_run(request: Request, ended: Ended) -> Report:
    """Publish, keep, or refuse; the report is saved either way.

    Raises:
        RunFailedError: a signal came, a guard refused the publication, or another run took the store over.
    """
    run = ended.outcome.job.run
    run.files.confirm_lease()  # who took the store over goes on with this very run, and writes its report
    counts = count_run(run, ended.retired)
    num_left = ended.work.difference.to_embed.num_rows - counts.num_here
    report = make_report(ended.outcome, ended.work.difference, counts, request.started_s)
    left_out = told_left_out(request, ended.left_out_before, counts)
    report = report.model_copy(
        update={"kind": request.options.kind, "num_left": num_left, **left_out.as_counts()},
    )
    failure = _stopped(ended, counts)
    kept = None if failure else _kept(ended, counts, num_left)
    verdicts = list(ended.verdicts)
    if failure is None and kept is None:
        verdicts += judge_result(counts, request, ended)
        failure = refusal(verdicts)
    report = report.model_copy(update={"guards": tuple(verdict.model_dump() for verdict in verdicts)})
    if failure is None and kept is None:
        report = _publish(request, ended, report, verdicts)
    else:
        report = report.model_copy(update={"outcome": failure or kept})
    run.files.write(run_file(run.run_id, REPORT_FILE), report.model_dump_json(indent=2).encode())
    if failure is not None:
        request.watcher.reported(report)
        raise RunFailedError(failure)
    return report


def told_left_out(request: Request, before: pa.Table, counts: Counts | None = None) -> LeftOut:
    """Tell what is no item, and count it: by its name, or once it had been read, by this run or by an earlier one.

    Args:
        request: knows what the listing left out.
        before: items that earlier runs left out.
        counts: what this run finished; none where there was nothing to do.
    """
    left_out = request.inputs.left_out
    if counts is not None:
        left_out = left_out.with_read(counts.left_out)
        before = without_items(before, counts.whole["item_id"])
    left_out = left_out.with_read(before)
    for line in left_out.lines():
        request.watcher.say(line)
    return left_out


def _stopped(ended: Ended, counts: Counts) -> str | None:
    """Why the run ended before its time, where somebody asked for that."""
    if not ended.outcome.stopped and (ended.outcome.out_of_time or not ended.outcome.job.run.stop_requested()):
        return None
    if not counts.num_items:
        return "stopped on request before any item was finished; the same command begins again"
    return (
        f"stopped on request after {counts.num_items:,} items, which are kept and not yet published; "
        "the same command goes on"
    )


def _kept(ended: Ended, counts: Counts, num_left: int) -> str | None:
    """Why what is finished waits for the next run, if it has to."""
    if ended.work.outdated and num_left:
        return (
            f"{ended.work.outdated}: {counts.num_items:,} items are done and kept, {num_left:,} are left; the old "
            "vectors are served until all are done, and the next refresh goes on"
        )
    if not counts.num_here and not counts.num_items and not len(ended.retired) and num_left:
        return f"nothing was finished; {num_left:,} items are left for the next refresh"
    return None


def _publish(request: Request, ended: Ended, report: Report, verdicts: list[Verdict]) -> Report:
    job, say = ended.outcome.job, request.watcher.say
    info, config = request.inputs.info, request.inputs.config
    order = PublishIntent(
        kind=request.options.kind,
        info=info,
        replaces_all=ended.work.outdated is not None,
        retrieval=retrieval_record(verdicts, None if ended.work.outdated else ended.current),
        ends_hold=request.options.may_change,
    )
    say("publishing")
    publish(
        job.run,
        job.stamp,
        lambda version: keep_index(job.files, version, info, say, config.index, ray_address=config.ray_address),
        order,
        ended.retired,
    )
    if request.options.kind == "refresh":
        compact_if_needed(job.files, say)
    outcome = f"published; {report.num_left:,} items are left for the next refresh" if report.num_left else "published"
    num_retired = ended.work.retired.num_rows
    return report.model_copy(update={"published": True, "outcome": outcome, "num_retired": num_retired})
