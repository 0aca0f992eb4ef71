"""Choice of the design of an index: candidates are measured on a sample of the table, with the expected queries.

A graph of some ten thousand vectors takes longer to build than all of a table's lists. So candidates are measured in
the order in which they may win, until none can win any more: the smallest first if a latency is requested, up to twice
the smallest that keeps it; else codes of a few bits, which are quick to build, then the fastest on a small sample of
those that they leave open.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from index.constraints import LARGER, Constraints, judge, keeps, rank
from index.design_trials import DesignTrials, Projections
from index.designs import KINDS, Design, default_design, designs_in_parts, parse_design
from index.manifest import DesignTrial
from index.recall import GroundTruth
from index.vectors import VectorTable

# Rows of the sample: an eighth of the table within these bounds, because trials take as long as building so many.
MIN_TRIED, NUM_TRIED = 20_000, 32_768
# Rows of the small sample (a second for a graph); how much slower than the best a candidate may be there and still win
# on the large one; and by how much it may miss the recall.
NUM_SCREENED, _SLACK, _RECALL_SLACK = 10_000, 1.5, 0.01
_FEW = 2  # candidates that are all measured on the large sample, as when memory is short


@dataclass
class DesignSearch:
    """Search for the design of a table's index; it continues where a design misses the constraints on the whole table.

    Attributes:
        table: the vectors.
        answers: exact ones of the table to the queries that recall is measured with.
        projections: learned from other queries.
        kind: `flat`, `hnsw`, `ivf` or a design's notation; `auto` chooses by measuring.
        constraints: limits to keep.
        measure_all: measure all candidates even if exact search does.
        trials: measurements on samples so far; none for a requested design.
    """

    table: VectorTable
    answers: GroundTruth
    projections: Projections
    kind: str
    constraints: Constraints
    measure_all: bool
    trials: list[DesignTrial] = field(default_factory=list)
    _screened: dict[Design, DesignTrial] = field(default_factory=dict)

    def designs(self) -> Iterator[Design]:
        """Yield designs to build of the whole table, best first: those that keep the constraints on a sample.

        Exact search is measured first, and chosen if it keeps the constraints, because its recall is 1. Otherwise
        candidates are built on a sample and measured with held-out queries, until no other can be better. To ask for
        another design says that the last one missed; measuring continues. Raises a RetrievalError if there is no such
        design as `kind`.
        """
        if self.kind != "auto":
            yield default_design(self.kind, self.table.num_vectors) if self.kind in KINDS else parse_design(self.kind)
            return
        exact, *waiting = _candidates(self.table, self.projections, self.constraints, measure_all=self.measure_all)
        num_tried = min(NUM_TRIED, max(MIN_TRIED, self.table.num_vectors // 8), self.table.num_vectors)
        large = self._trials(num_tried)
        self.trials.append(large.measure(exact))
        left, small = [*self.trials], None
        if keeps(left[0], self.constraints, self.constraints.exact_latency_ms) and not self.measure_all:
            yield parse_design(left.pop().design)
        if self.constraints.latency_ms is not None:
            waiting.sort(key=self._estimate_bytes)
        elif len(waiting) > _FEW and num_tried >= 2 * NUM_SCREENED and not self.measure_all:
            small = self._trials(NUM_SCREENED)

        if small is not None:
            self._measure_codes(large, left, waiting)
        while left or waiting:
            if small is not None:
                self._screen(small, left, waiting)
            while (following := self._find_next(left, waiting)) is not None:
                self._measure(large, following, left, waiting)
            self._compare(large, left)
            ranked = rank(left, self.constraints)
            if ranked:
                left.remove(ranked[0])
                yield parse_design(ranked[0].design)
            elif self._find_next(left, waiting) is None:
                return  # else what kept the latency misses it now, and others are left to measure

    def judge_trials(self, chosen: str, missed: Mapping[str, str]) -> tuple[DesignTrial, ...]:
        """Return all measurements with their verdicts; none for a requested design.

        `missed` says by design what those that were built of the whole table missed.
        """
        found = [trial for trial in self.trials if trial.design == chosen]
        if not found:
            return ()
        designs = {trial.design for trial in self.trials}
        left = [trial for design, trial in self._screened.items() if str(design) not in designs]
        return tuple(judge([*self.trials, *left], found[0], self.constraints, missed))

    def _measure_codes(self, large: DesignTrials, left: list[DesignTrial], waiting: list[Design]) -> None:
        """Measure codes of projections, then codes of products that they don't outdo.

        They are quick to build, and on a smaller sample lists of whole vectors look faster next to them.
        """
        for design in [each for each in waiting if each.has_projected_codes]:
            self._measure(large, design, left, waiting)
        for design in [each for each in self._list_open(left, waiting) if each.has_small_codes]:
            self._measure(large, design, left, waiting)

    def _measure(self, large: DesignTrials, design: Design, left: list[DesignTrial], waiting: list[Design]) -> None:
        waiting.remove(design)
        left.append(large.measure(design))
        self.trials.append(left[-1])

    def _compare(self, large: DesignTrials, left: list[DesignTrial]) -> None:
        """Measure the latency of those that keep memory and recall again, in turns."""
        kept = [trial for trial in left if keeps(trial, self.constraints, None)]
        compared = {trial.design: trial for trial in large.compare(kept)}
        for trials in (left, self.trials):
            trials[:] = [compared.get(trial.design, trial) for trial in trials]

    def _estimate_bytes(self, design: Design) -> float:
        return design.estimated_bytes(self.table.num_vectors, self.table.dim)

    def _may_stop(self, trials: Sequence[DesignTrial], following: Design) -> bool:
        return may_stop(trials, self._screened, following, self._estimate_bytes(following), self.constraints)

    def _find_next(self, left: Sequence[DesignTrial], waiting: Sequence[Design]) -> Design | None:
        """Return the next design to measure; None if none can beat those `left`, measured and not yet built."""
        if self.measure_all:
            return next(iter(waiting), None)
        following = next(iter(self._list_open(left, waiting)), None)
        return None if following is None or self._may_stop(left, following) else following

    def _list_kept(self, left: Sequence[DesignTrial]) -> list[Design]:
        limits = self.constraints, self.constraints.latency_ms
        return [parse_design(each.design) for each in left if keeps(each, *limits)]

    def _list_open(self, left: Sequence[DesignTrial], waiting: Sequence[Design]) -> list[Design]:
        """List those waiting that none outdoes of those `left` that keep the constraints."""
        kept, is_small_wanted = self._list_kept(left), self.constraints.latency_ms is not None
        return [
            each
            for each in waiting
            if not any(each.is_outdone_by(other, is_small_wanted=is_small_wanted) for other in kept)
        ]

    def _screen(self, small: DesignTrials, left: Sequence[DesignTrial], waiting: list[Design]) -> None:
        """Measure those waiting that none outdoes on the small sample, and sort them by that.

        The codes of a few bits that keep the constraints are measured, too, to compare.
        """
        waits = self._list_open(left, waiting)
        codes = [each for each in self._list_kept(left) if each.has_small_codes] if waits else []
        for design in [*codes, *waits]:
            if design not in self._screened:
                self._screened[design] = small.measure(design)
        compared = small.compare([*self._screened.values()])
        self._screened = dict(zip(self._screened, compared, strict=True))
        waiting.sort(key=self._waiting_cost)

    def _waiting_cost(self, design: Design) -> tuple[bool, float]:
        trial = self._screened.get(design)
        return (True, math.inf) if trial is None else _screened_cost(trial, self.constraints)

    def _trials(self, num_rows: int) -> DesignTrials:
        limits = (self.constraints.recall, self.constraints.latency_ms)
        return DesignTrials(self.table, num_rows, self.answers, self.projections, *limits)


def _screened_cost(trial: DesignTrial, constraints: Constraints) -> tuple[bool, float]:
    allowed = replace(constraints, recall=max(constraints.recall - _RECALL_SLACK, _RECALL_SLACK))
    return not keeps(trial, allowed, None), trial.expected_latency_ms


def may_stop(
    trials: Sequence[DesignTrial],
    screened: dict[Design, DesignTrial],
    following: Design,
    following_bytes: float,
    constraints: Constraints,
) -> bool:
    """Whether no candidate from `following` on can beat those measured on the large sample (`trials`).

    `screened` are the measurements on the small sample, if there is one; `following_bytes` is the memory that the
    following one would take.
    """
    kept = [trial for trial in trials if keeps(trial, constraints, constraints.latency_ms)]
    if constraints.latency_ms is not None:  # candidates are in order of size
        return any(following_bytes > LARGER * trial.expected_bytes for trial in kept)
    times = {str(design): trial.expected_latency_ms for design, trial in screened.items()}
    kept = [trial for trial in kept if trial.design in times]
    if not kept or following not in screened:
        return False
    best = min(kept, key=lambda trial: trial.expected_latency_ms)
    misses, expected_ms = _screened_cost(screened[following], constraints)
    return misses or expected_ms > _SLACK * times[best.design]


def _candidates(
    table: VectorTable, projections: Projections, constraints: Constraints, *, measure_all: bool
) -> list[Design]:
    """List the designs to measure, exact search first; only those that can fit, on disk only if memory is short."""
    size, limit = (table.num_vectors, table.dim), constraints.memory_bytes
    designs = [*projections.candidates()]
    if limit is None:
        return designs
    if not measure_all:  # exact search is measured anyway, for comparison
        designs = [design for design in designs if design.is_exact or design.least_bytes(*size) <= limit]
    # If memory holds the vectors in 16 bits each, no design needs the disk.
    return designs + [*designs_in_parts(*size, on_disk=True)] * (Design("SQfp16").least_bytes(*size) > limit)
