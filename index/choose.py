"""Choice of the design of an index: candidates are measured on a sample of the table, with the expected queries."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from index.autotune import Meter, best_point
from index.constraints import Constraints
from index.designs import Design, Kind, candidate_designs, default_design, parse_design
from index.errors import RetrievalError
from index.manifest import DesignTrial
from index.projection import QueryDirections
from index.queries import QuerySets, RecallQueries, sampled_queries
from index.ranking import judge, keeps, rank
from index.recall import find_ground_truth
from index.vectors import Floats, VectorTable

NUM_TRIED = 50_000
_SAMPLE_SEED = 2
# Exponent of the growth of a query's time with the size of the table, at one recall; of a scan 1. On hard vectors
# (`scripts/bench_retrieval.py`), between 50,000 and 1,000,000, graphs took 0.3 to 0.5 and lists 0.1.
_GROWTH: dict[Kind, float] = {"flat": 1.0, "ivf": 0.4, "hnsw": 0.4}

Say = Callable[[str], None]


@dataclass(frozen=True)
class DesignRequest:
    """Requested design: `auto`, `flat`, `hnsw`, `ivf`, or a design's notation."""

    text: str

    def design(self, num_vectors: int) -> Design | None:
        """Resolve the design for a table of this size; None to choose by measuring.

        Raises:
            RetrievalError: there is no such design.
        """
        if self.text == "auto":
            return None
        if self.text in ("flat", "hnsw", "ivf"):
            return default_design(self.text, num_vectors)  # type: ignore[arg-type]  # one of the three
        return parse_design(self.text)


@dataclass(frozen=True)
class DesignChoice:
    """Designs to build, the best first, and the measurements that led to them.

    Attributes:
        designs: the designs, the best first.
        trials: all measurements; empty for a requested design.
        directions: directions to project onto; None without queries to learn from.
    """

    designs: tuple[Design, ...]
    trials: tuple[DesignTrial, ...]
    directions: QueryDirections | None

    def projection(self, design: Design) -> Floats | None:
        """Compute the matrix that a design projects with, (width, E); None where it has none.

        Raises:
            RetrievalError: it projects, and there are no queries to learn the directions from.
        """
        if design.projection is None:
            return None
        if self.directions is None:
            raise RetrievalError(
                f"index design {design}: it projects onto what text queries ask for, and there are no captions to "
                "learn that from; give queries, or choose a design without LeanVec"
            )
        return self.directions.matrix(design.projection)


def choose(
    table: VectorTable,
    sets: QuerySets,
    request: DesignRequest,
    constraints: Constraints,
    *,
    measure_all: bool,
    say: Say,
) -> DesignChoice:
    """Choose designs for a table.

    Exact search is measured first, and taken where it keeps the constraints, because its recall is 1. Else every
    candidate is built on a sample and measured with held-out queries.

    Args:
        table: the vectors.
        sets: queries to learn from and queries to measure with.
        request: the requested design.
        constraints: limits that the choice must keep.
        measure_all: whether to measure all candidates even where exact search will do, for comparison.
        say: called with a line of text before each measurement.

    Raises:
        RetrievalError: no candidate keeps the constraints; the nearest is named.
    """
    directions = QueryDirections(sets.learned) if len(sets.learned) else None
    requested = request.design(table.num_vectors)
    if requested is not None:
        return DesignChoice((requested,), (), directions)
    sample = VectorTable(len(rows := table.sample(NUM_TRIED, _SAMPLE_SEED)), table.dim, table.take(rows))
    widths = directions.useful_widths() if directions else ()
    candidates = candidate_designs(table.num_vectors, table.dim, widths)
    tried: list[tuple[Design, DesignTrial]] = []
    asked = sets.measured if sets.measured.own_rows is None else sampled_queries(sample)
    tester = _Tester(sample, asked, table.num_vectors, constraints, DesignChoice((), (), directions))
    for place, design in enumerate(candidates):
        say(f"measuring {design} on {sample.num_vectors:,} vectors ({place + 1} of {len(candidates)})")
        tried.append((design, tester.measure(design)))
        if design.is_exact and not measure_all and keeps(tried[0][1], constraints, constraints.exact_latency_ms):
            break
    ranked = rank([trial for _, trial in tried], constraints)
    by_name = {trial.design: design for design, trial in tried}
    chosen = tuple(by_name[trial.design] for trial in ranked)
    return DesignChoice(chosen, tuple(judge([trial for _, trial in tried], ranked, constraints)), directions)


class _Tester:
    """Measures candidates, built on one sample, with the same queries."""

    def __init__(
        self,
        sample: VectorTable,
        asked: RecallQueries,
        num_vectors: int,
        constraints: Constraints,
        choice: DesignChoice,
    ) -> None:
        from index import faiss_build

        self._sample, self._num_vectors, self._constraints, self._choice = sample, num_vectors, constraints, choice
        self._ground_truth = find_ground_truth(sample, asked, faiss_build.nearest_in_table)

    def measure(self, design: Design) -> DesignTrial:
        from index import faiss_build

        started = time.perf_counter()
        on_sample = _with_fewer_lists(design, self._sample.num_vectors)
        index = faiss_build.build(on_sample, self._sample, self._choice.projection(design))
        build_s = time.perf_counter() - started
        points = Meter(index, on_sample, self._sample.take).curve(self._ground_truth, self._constraints.recall)
        point = best_point(points, self._constraints.recall)
        size = self._num_vectors / self._sample.num_vectors
        return DesignTrial(
            design=str(design),
            num_vectors=self._sample.num_vectors,
            parameters=point.parameters,
            recall_at_10=point.recall_at_10,
            latency_ms=point.latency_ms,
            expected_latency_ms=round(point.latency_ms * size ** _GROWTH[design.kind], 5),
            expected_bytes=round(faiss_build.num_bytes(index) * size),
            build_s=round(build_s, 3),
            is_efficient=False,
            verdict="",
        )


def _with_fewer_lists(design: Design, num_vectors: int) -> Design:
    """Reduce the lists of a design to the number for a sample of this size."""
    if not design.num_lists:
        return design
    fewer = default_design("ivf", num_vectors).num_lists
    return Design(design.factory.replace(f"IVF{design.num_lists}", f"IVF{fewer}"), design.projection, design.rerank)
