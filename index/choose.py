"""Which design a table gets: candidates are measured on a sample of it, with the queries it is for."""

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
from index.recall import find_truth
from index.vectors import Floats, VectorTable

NUM_TRIED = 50_000
_SAMPLE_SEED = 2
# How the time of a query grows with the table at one recall, as a power of its size: a scan in proportion. Of hard
# vectors (`scripts/bench_retrieval.py`), between 50,000 and 1,000,000, graphs took 0.3 to 0.5 and lists 0.1.
_GROWTH: dict[Kind, float] = {"flat": 1.0, "ivf": 0.4, "hnsw": 0.4}

Say = Callable[[str], None]


@dataclass(frozen=True)
class DesignRequest:
    """What to build: `auto`, `flat`, `hnsw`, `ivf`, or a design's notation."""

    text: str

    def design(self, num_vectors: int) -> Design | None:
        """Give the design that is meant; None to choose.

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
    """Designs to try, the best first, and what was measured to find them."""

    designs: tuple[Design, ...]
    trials: tuple[DesignTrial, ...]
    directions: QueryDirections | None

    def projection(self, design: Design) -> Floats | None:
        """Give the matrix that a design projects with, (width, E).

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
    table: VectorTable, sets: QuerySets, wish: DesignRequest, constraints: Constraints, *, measure_all: bool, say: Say
) -> DesignChoice:
    """Choose designs for a table.

    Exact search is measured first, and taken where it keeps the constraints: it is never wrong. Else every candidate
    is built on a sample and measured with held-out queries.

    Args:
        table: the vectors.
        sets: queries to learn from and queries to measure with.
        wish: what the user asked for.
        constraints: what the choice must keep.
        measure_all: measure all candidates even where exact search will do, to see them beside each other.
        say: is told what is being measured.

    Raises:
        RetrievalError: no candidate keeps the constraints; the nearest is named.
    """
    directions = QueryDirections(sets.learned) if len(sets.learned) else None
    wished = wish.design(table.num_vectors)
    if wished is not None:
        return DesignChoice((wished,), (), directions)
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
    """Builds candidates on one sample and measures them with the same queries."""

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
        self._truth = find_truth(sample, asked, faiss_build.nearest_in_table)

    def measure(self, design: Design) -> DesignTrial:
        from index import faiss_build

        started = time.perf_counter()
        on_sample = _with_fewer_lists(design, self._sample.num_vectors)
        index = faiss_build.build(on_sample, self._sample, self._choice.projection(design))
        build_s = time.perf_counter() - started
        points = Meter(index, on_sample, self._sample.take).curve(self._truth, self._constraints.recall)
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
    """The same design with as many lists as a sample of that size gets."""
    if not design.num_lists:
        return design
    fewer = default_design("ivf", num_vectors).num_lists
    return Design(design.factory.replace(f"IVF{design.num_lists}", f"IVF{fewer}"), design.projection, design.rerank)
