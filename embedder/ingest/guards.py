"""Guards: verdicts on a listing before anything is embedded, and on a run's result before anything is committed.

    hold       a rollback holds the store: asked first; not a failure: the run ends successfully and does nothing
    retire     too much of a source is gone: an unmounted disk must not empty the store
    rejects    too many items could not be embedded
    vectors    the new vectors are all alike, or lie on one line
    retrieval  captions find their own images far worse than in what is published
    compare    another model finds images worse than the published one, in all or in a group; if [compare] asks

A guard that fails names the figure, the limit and the cure; `--force NAME` overrides only that one, and is recorded.
All that fail are named together (`refusal`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from embedder.config import RunLimits
from embedder.config_toml.sections import CompareConfig
from embedder.errors import ConfigError
from embedder.ingest.collapse_check import MIN_VECTORS, effective_directions, sample_vectors, vector_variance
from embedder.ingest.compare_check import compare_with_published, lacks_group, thresholds
from embedder.ingest.retrieval_check import recall_margin, retrieval_figure, sample_pairs
from embedder.ingest.run_result import RunResult, count_run
from embedder.ingest.work import IngestOptions, WorkPlan, count_by_source
from embedder.quantities import figure, plural
from embedder.report.report_schema import ReportSection
from embedder.retrieval.paired import describe_failures
from embedder.store.journal.runs import Run
from embedder.store.layout import Current, describe_hold
from embedder.store.publish.rejects import describe_reasons, rejects_in
from embedder.store.tables.arrow_lookup import without_items

GUARDS = ("hold", "retire", "rejects", "vectors", "retrieval", "compare")
# One broken file among three new ones does not mean a broken pipeline; in a first run every reject counts.
MIN_ITEMS_JUDGED = 100
COLLAPSED = (
    "the model gives nearly the same for everything: check its weights and the dtype with `embedder verify --model "
    "DIR`, unless the inputs are really all alike"
)


class Verdict(ReportSection):
    """Verdict of one guard."""

    name: str
    passed: bool
    figure: float | None
    """None if there was too little to judge."""
    limit: float
    message: str
    """One line; if the guard failed, with the cure."""
    num_judged: int = 0
    """Number of items, vectors or pairs behind the figure."""
    forced: bool = False
    """Whether it failed and was overridden."""

    @property
    def blocks(self) -> bool:
        """Whether it keeps the run from publishing."""
        return not self.passed and not self.forced


def judge(result: RunResult, limits: RunLimits, forced: Collection[str] = ()) -> list[Verdict]:
    """Judge rejects, vectors and retrieval of a run's result, before it is published."""
    verdicts = [judge_rejects(result, limits), judge_vectors(result, limits)]
    if result.whole.num_rows or len(result.retired):
        verdicts.append(judge_retrieval(result, limits.max_retrieval_drop))
    if limits.compare.required and result.published is not None and not result.keeps_published:
        verdicts.append(judge_comparison(result, limits.compare))
    return [force(verdict, forced) for verdict in verdicts]


def judge_listing(
    work: WorkPlan, moved_ids: pa.ChunkedArray, max_retire_fraction: float, options: IngestOptions
) -> Verdict:
    """Judge what a listing lost, before anything is embedded; items that were probably moved are not lost."""
    lost = without_items(work.retired, moved_ids)
    verdict = judge_retire(work.num_published, count_by_source(lost), max_retire_fraction)
    return force(verdict, options.forced)


def judge_earlier(
    run: Run | None, work: WorkPlan, current: Current | None, limits: RunLimits, options: IngestOptions
) -> list[Verdict]:
    """Judge the unfinished run that this one would continue, if it has nothing left to do.

    A listing is judged before anything is embedded. If an earlier run was refused, the other guards' verdicts are
    already known by then and need not wait for the next run. Returns the verdicts of all guards except `retire`; none
    if there is no such run or it is not at its end.
    """
    if run is None or work.difference.to_embed.num_rows:
        return []
    result = count_run(run, current, work.retired_ids, keeps_published=work.outdated is None)
    return judge(result, limits, options.forced)


def refusal(verdicts: Sequence[Verdict], effect: str = "nothing is published") -> str | None:
    """Return a line on why nothing may be published, or None: all failed guards, and options to override them."""
    blocking = [verdict for verdict in verdicts if verdict.blocks]
    if not blocking:
        return None
    reasons = "; ".join(f"guard {verdict.name}: {verdict.message}" for verdict in blocking)
    # Those forced this time must be forced again; a name applies to all models.
    failed = dict.fromkeys(verdict.name for verdict in verdicts if not verdict.passed)
    options = " ".join(f"--force {name}" for name in failed)
    return f"{reasons}; {effect}: to publish it as it is, run the same command with {options}"


def retrieval_record(verdicts: Iterable[Verdict], before: Current | None) -> dict[str, Any] | None:
    """Return the figure that CURRENT.json keeps for the next comparison.

    If there was too little to judge, the figure of `before` is kept; after a change of the model, `before` is None.
    """
    for verdict in verdicts:
        if verdict.name == "retrieval" and verdict.figure is not None:
            return {"recall_at_10": verdict.figure, "num_pairs": verdict.num_judged}
    return before.retrieval if before is not None else None


def check_forced(forced: Collection[str]) -> None:
    """Refuse names of guards that do not exist, with a `ConfigError`."""
    unknown = sorted(set(forced) - set(GUARDS))
    if unknown:
        raise ConfigError(f"--force {unknown[0]}: there is no such guard; the guards are {', '.join(GUARDS)}")


def force(verdict: Verdict, forced: Collection[str]) -> Verdict:
    """Mark a verdict that failed and is overridden."""
    return verdict.model_copy(update={"forced": not verdict.passed and verdict.name in forced})


def judge_hold(address: str, current: Current | None, forced: Collection[str]) -> Verdict | None:
    """Judge whether anything may be published at all; None if no rollback holds the store."""
    if current is None or current.hold is None or not current.is_held:
        return None
    message = f"{describe_hold(address, current.hold)}, or once with --force hold"
    return force(Verdict(name="hold", passed=False, figure=None, limit=0.0, message=message), forced)


def judge_retire(num_published: Mapping[str, int], num_gone: Mapping[str, int], limit: float) -> Verdict:
    """Judge a listing in total and per source; `num_gone` counts the published items that are no longer listed."""
    shares = {name: num_gone.get(name, 0) / num for name, num in num_published.items() if num}
    in_all, lost = sum(num_published.values()), sum(num_gone.values())
    worst = max(shares, key=lambda name: shares[name], default="")
    figure = max(shares.get(worst, 0.0), lost / in_all if in_all else 0.0)
    of, message = in_all, f"{lost:,} of {plural(in_all, 'published item')} gone"
    if figure > limit:
        where = f"source {worst}: " if worst and len(num_published) > 1 else ""
        gone, of = (num_gone.get(worst, 0), num_published.get(worst, 0)) if where else (lost, in_all)
        message = (
            f"{where}{gone:,} of {plural(of, 'published item')} not listed any more, more "
            f"than max_retire_fraction = {limit:g} allows: check that its disk is mounted and its path right; if they "
            "are gone for good, allow more with --set max_retire_fraction=..."
        )
    return Verdict(name="retire", passed=figure <= limit, figure=figure, limit=limit, num_judged=of, message=message)


def are_too_many(result: RunResult, figure: float, limits: RunLimits) -> bool:
    """Whether too many items failed (the share `figure`) for anything to be published.

    A few broken files stop no run, unless none are allowed, or a first run has nothing else to publish.
    """
    limit, has_embedded = limits.max_reject_fraction, result.num_items > result.num_rejected
    if result.published is None and result.whole.num_rows and not has_embedded and limit < 1:
        return result.num_rejected > 0 or not result.num_vectors
    is_few = result.num_rejected < limits.min_rejects and limit > 0
    return figure > limit and not is_few


def judge_rejects(result: RunResult, limits: RunLimits) -> Verdict:
    """Judge the share of items that could not be embedded."""
    limit = limits.max_reject_fraction
    num_items, num_rejected = result.num_items, result.num_rejected
    of = num_items if result.published is None else max(num_items, MIN_ITEMS_JUDGED)
    figure = num_rejected / of if num_items else 0.0
    message = f"{num_rejected:,} of {plural(num_items, 'item')} rejected"
    too_many = are_too_many(result, figure, limits)
    if too_many and not num_items:
        message = f"0 of {plural(result.whole.num_rows, 'file')} could be embedded"
    if too_many:
        run = result.run
        message += (
            f", more than max_reject_fraction = {limit:g} allows: {_reasons(result)}; "
            f"`embedder rejects {run.files.option} --run {run.run_id}` lists them; repair the files "
            "and run the same command again, or allow more with --set max_reject_fraction=..."
        )
    return Verdict(
        name="rejects", passed=not too_many, figure=figure, limit=limit, message=message, num_judged=num_items
    )


def _reasons(result: RunResult) -> str:
    rejects = without_items(rejects_in(result.run.files, result.entries), result.retired)
    return describe_reasons(rejects)


def judge_vectors(result: RunResult, limits: RunLimits) -> Verdict:
    """Judge the run's new vectors of each tower; the worse one counts, and the message names both if both fail."""
    verdicts = [
        judge_tower(tower, sample_vectors(result.run.files, result.entries, tower), limits)
        for tower in ("image", "text")
    ]
    worse = min(verdicts, key=lambda verdict: (verdict.passed, -verdict.num_judged))
    if worse.passed:
        return worse
    found = " and ".join(verdict.message for verdict in verdicts if not verdict.passed)
    return worse.model_copy(update={"message": f"{found}: {COLLAPSED}"})


def judge_tower(tower: str, vectors: Any, limits: RunLimits) -> Verdict:
    """Judge a sample, float32 (N, E), of the vectors of one tower (`image` or `text`)."""
    num = len(vectors)
    limit = limits.min_vector_spread
    if num < MIN_VECTORS:
        text = f"{plural(num, f'new {tower} vector')} of different inputs: too few to judge"
        return Verdict(name="vectors", passed=True, figure=None, limit=limit, message=text, num_judged=num)
    found, directions = vector_variance(vectors), effective_directions(vectors)
    text = (
        f"{num:,} {tower} vectors of different inputs have a spread of {figure(found)} over {figure(directions)} "
        "directions"
    )
    if found < limit:
        text += f", less than min_vector_spread = {limit:g} asks for"
    elif directions < limits.min_vector_directions:
        found, limit = directions, limits.min_vector_directions
        text += f", less than min_vector_directions = {limit:g} asks for"
    return Verdict(name="vectors", passed=found >= limit, figure=found, limit=limit, message=text, num_judged=num)


def judge_retrieval(result: RunResult, max_drop: float) -> Verdict:
    """Judge R@10 of captions for their own images against the published figure.

    Finding things is harder in a larger store, so the comparison takes as many pairs as the published figure did.
    """
    pairs = sample_pairs(result)
    recall, num, passed = retrieval_figure(pairs), len(pairs), True
    published = (result.published and result.published.retrieval) or {}  # of `retrieval_record`
    before = published.get("recall_at_10")
    limit = 0.0 if before is None else before * (1 - max_drop)
    text = f"R@10 of {plural(num, 'caption')} for their own images is " + (
        "not judged: too few" if recall is None else f"{recall:.3f}"
    )
    if recall is not None and before is not None:
        compared = pairs.first(published["num_pairs"])
        found = retrieval_figure(compared)
        limit -= recall_margin(before, len(compared))
        if found is not None and found < limit:
            recall, num, passed = found, len(compared), False
            text = (
                f"R@10 of {plural(num, 'caption')} for their own images is {found:.3f}, and "
                f"{before:.3f} in what is published, a drop of more than max_retrieval_drop = "
                f"{max_drop:g} allows ({limit:.3f}): check that the captions belong to their images and that this is "
                "the model you meant"
            )
    return Verdict(name="retrieval", passed=passed, figure=recall, limit=limit, message=text, num_judged=num)


def judge_comparison(result: RunResult, config: CompareConfig) -> Verdict:
    """Judge another model against the published one, by the same captions; the worst group counts."""
    if lacks_group(result, config.group):
        text = (
            f"compare.group = {config.group!r}: what is published has no such column to group by; carry it over, or "
            "leave the key out"
        )
        return Verdict(name="compare", passed=False, figure=None, limit=-config.max_drop, message=text)
    found, rule = compare_with_published(result, config), thresholds(config)
    if not found:
        text = "both models have too few captions with an image in common to compare them"
        return Verdict(name="compare", passed=not config.prove, figure=None, limit=-config.max_drop, message=text)
    worst = min(found, key=lambda each: each.high)
    text = describe_failures(found, rule, config.metric) or (
        f"{config.metric} of {plural(found[0].num_queries, 'caption')} is {found[0].before:.3f} by the published "
        f"model and {found[0].after:.3f} by this one"
    )
    return Verdict(
        name="compare",
        passed=not any(each.fails(rule) for each in found),
        figure=worst.difference,
        limit=-config.max_drop,
        message=text,
        num_judged=found[0].num_queries,
    )
