"""Choice of the design of an index: candidates are measured on a sample of the table, with the expected queries.

A graph of some ten thousand vectors takes longer to build than all of a table's lists. So candidates are measured in
the order in which they may win, until none can win any more: the smallest first if a latency is requested, else the
fastest on a small sample, on which all are measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from index.constraints import Constraints, judge, keeps, rank
from index.design_trials import DesignTrials, Projections
from index.designs import KINDS, Design, candidate_designs, default_design, designs_in_parts, parse_design
from index.held_out_queries import RecallQueries
from index.manifest import DesignTrial
from index.vectors import Floats, VectorTable

# Rows of the sample: a quarter of the table within these bounds, because trials take as long as building so many.
MIN_TRIED, NUM_TRIED = 20_000, 32_768
# Rows of the small sample (a second for a graph); how much slower than the best a candidate may be there and still win
# on the large one; and by how much it may miss the recall.
NUM_SCREENED, _SLACK, _RECALL_SLACK = 10_000, 1.5, 0.01
_FEW = 2  # candidates that are all measured on the large sample, as when memory is short


@dataclass(frozen=True)
class DesignChoice:
    """Designs to build, best first, their `projections`, and all measurements (none for a requested design)."""

    designs: tuple[Design, ...]
    trials: tuple[DesignTrial, ...]
    projections: Projections


def choose(
    table: VectorTable,
    measured: RecallQueries,
    learned: Floats,
    kind: str,
    constraints: Constraints,
    *,
    measure_all: bool,
) -> DesignChoice:
    """Choose designs for a table.

    Exact search is measured first, and chosen if it keeps the constraints, because its recall is 1. Otherwise
    candidates are built on a sample and measured with held-out queries, until no other can be better.

    `learned` (L, E) are queries to learn directions from, possibly none. `kind` is `flat`, `hnsw`, `ivf` or a design's
    notation; `auto` chooses by measuring. With `measure_all`, all candidates are measured, even if exact search does.
    Raises a RetrievalError if there is no such design, or none keeps the constraints; the message names the nearest.
    """
    projections = Projections(learned)
    if kind != "auto":
        requested = default_design(kind, table.num_vectors) if kind in KINDS else parse_design(kind)
        return DesignChoice((requested,), (), projections)
    exact, *others = _candidates(table, projections.useful_widths(), constraints, measure_all=measure_all)
    num_tried = min(NUM_TRIED, max(MIN_TRIED, table.num_vectors // 4))
    large = DesignTrials(table, num_tried, measured, projections, constraints.recall)
    trials = [large.measure(exact)]
    screened: dict[Design, DesignTrial] = {}
    if measure_all:
        trials += [large.measure(design) for design in others]
    elif not keeps(trials[0], constraints, constraints.exact_latency_ms):
        if constraints.latency_ms is not None:
            others.sort(key=lambda design: design.estimated_bytes(table.num_vectors, table.dim))
        elif len(others) > _FEW and min(table.num_vectors, num_tried) > 2 * NUM_SCREENED:
            small = DesignTrials(table, NUM_SCREENED, measured, projections, constraints.recall)
            screened = {design: small.measure(design) for design in others}
            others.sort(key=lambda design: _screened_cost(screened[design], constraints))
        for design in others:
            if may_stop(trials, screened, design, constraints):
                break
            trials.append(large.measure(design))
    ranked = rank(trials, constraints)
    left = [trial for design, trial in screened.items() if str(design) not in {each.design for each in trials}]
    # Unmeasured designs come after the measured ones: the whole table decides.
    unmeasured = [design for design in others if str(design) not in {trial.design for trial in trials}]
    chosen = (*(parse_design(trial.design) for trial in ranked), *unmeasured)
    return DesignChoice(chosen, tuple(judge([*trials, *left], ranked, constraints)), projections)


def _screened_cost(trial: DesignTrial, constraints: Constraints) -> tuple[bool, float]:
    allowed = replace(constraints, recall=max(constraints.recall - _RECALL_SLACK, _RECALL_SLACK))
    return not keeps(trial, allowed, None), trial.expected_latency_ms


def may_stop(
    trials: Sequence[DesignTrial], screened: dict[Design, DesignTrial], following: Design, constraints: Constraints
) -> bool:
    """Whether no candidate from `following` on can beat those measured on the large sample (`trials`).

    `screened` are the measurements on the small sample, if there is one.
    """
    kept = [trial for trial in trials if keeps(trial, constraints, constraints.latency_ms)]
    if constraints.latency_ms is not None:
        return bool(kept)  # candidates are in order of size
    times = {str(design): trial.expected_latency_ms for design, trial in screened.items()}
    kept = [trial for trial in kept if trial.design in times]
    if not kept:
        return False
    best = min(kept, key=lambda trial: trial.expected_latency_ms)
    misses, expected_ms = _screened_cost(screened[following], constraints)
    return misses or expected_ms > _SLACK * times[best.design]


def _candidates(
    table: VectorTable, widths: tuple[int, ...], constraints: Constraints, *, measure_all: bool
) -> list[Design]:
    """List the designs to measure, exact search first; only those that can fit, on disk only if memory is short."""
    size, limit = (table.num_vectors, table.dim), constraints.memory_bytes
    designs = [*candidate_designs(*size, widths)]
    if limit is None:
        return designs
    if not measure_all:  # exact search is measured anyway, for comparison
        designs = [design for design in designs if design.is_exact or design.least_bytes(*size) <= limit]
    # If memory holds the vectors in 16 bits each, no design needs the disk.
    return designs + [*designs_in_parts(*size, on_disk=True)] * (Design("SQfp16").least_bytes(*size) > limit)
