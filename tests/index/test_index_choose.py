"""A design is chosen by what was measured with texts, within what the user allows."""

import itertools
import re
import time
from pathlib import Path

import numpy as np
import pytest
from index_samples import Build, exact_rows, make_images_and_captions, make_vectors, share_found, unit

from index import faiss_build
from index.autotune import Meter
from index.choose import DesignSearch, may_stop
from index.constraints import Constraints, judge, no_design_text, rank
from index.design_trials import DesignTrials, Projections, QueryDirections
from index.designs import Design, candidate_designs, count_lists, parse_design
from index.held_out_queries import RecallQueries, split_queries
from index.index_errors import RetrievalError
from index.manifest import DesignTrial
from index.recall import find_ground_truth
from index.search import open_index
from index.vectors import VectorTable


def trial(design: str, recall: float, latency_ms: float, num_bytes: int) -> DesignTrial:
    return DesignTrial(
        design=design,
        num_vectors=100,
        parameters={},
        recall_at_10=recall,
        latency_ms=latency_ms,
        expected_latency_ms=latency_ms,
        expected_bytes=num_bytes,
        build_s=1.0,
        is_efficient=False,
        verdict="",
    )


FLAT = trial("Flat", 1.0, 50.0, 1000)
GRAPH = trial("HNSW32,Flat", 0.97, 0.5, 1300)
LEAN = trial("LeanVec32,HNSW32,Flat,Refine(SQ8)", 0.96, 0.2, 600)
CODES = trial("IVF64,RaBitQ,Refine(SQ8)", 0.94, 0.4, 300)
SLOW_CODES = trial("IVF64,SQ8,Refine(SQfp16)", 0.96, 2.0, 500)
ALL = [FLAT, GRAPH, LEAN, CODES, SLOW_CODES]


@pytest.mark.parametrize(
    ("constraints", "order"),
    [
        (Constraints(), [LEAN, GRAPH, SLOW_CODES, FLAT]),
        (Constraints(recall=0.94), [LEAN, CODES, GRAPH, SLOW_CODES, FLAT]),
        (Constraints(recall=0.965), [GRAPH, FLAT]),
        (Constraints(latency_ms=3.0), [LEAN, SLOW_CODES, GRAPH]),
        (Constraints(latency_ms=3.0, recall=0.9), [LEAN, CODES, SLOW_CODES, GRAPH]),
        (Constraints(latency_ms=60.0), [FLAT, LEAN, SLOW_CODES, GRAPH]),
        (Constraints(memory_bytes=1000), [LEAN, SLOW_CODES, FLAT]),
    ],
)
def test_the_fastest_is_best_and_of_those_fast_enough_one_at_most_twice_as_large_as_the_smallest(
    constraints: Constraints, order: list[DesignTrial]
) -> None:
    assert rank(ALL, constraints) == order


def test_where_none_keeps_the_constraints_the_nearest_is_named() -> None:
    asked = r"recall = 0.95, latency_ms = 0.1, memory_bytes = \d+ \(0.0 MiB\)"
    constraints = Constraints(memory_bytes=100, latency_ms=0.1)
    assert rank(ALL, constraints) == []
    assert re.match(f"index: none of 5 designs keeps {asked}; the nearest, ", no_design_text(ALL, constraints))


def test_the_table_says_why_each_was_not_chosen_and_which_are_beaten_in_everything() -> None:
    constraints = Constraints(memory_bytes=1100)
    judged = {each.design: each for each in judge(ALL, rank(ALL, constraints)[0], constraints, {})}
    assert judged[LEAN.design].verdict == "chosen"
    assert judged[FLAT.design].verdict == "slower"
    assert judged[CODES.design].verdict == "recall 0.940"
    assert judged[GRAPH.design].verdict == "0.0 MiB"
    assert {name for name, each in judged.items() if not each.is_efficient} == set()
    exact_is_quick = Constraints(latency_ms=1000)
    verdicts = {each.design: each.verdict for each in judge(ALL, rank(ALL, exact_is_quick)[0], exact_is_quick, {})}
    assert (verdicts[FLAT.design], verdicts[LEAN.design]) == ("chosen", "not exact")
    worse = trial("HNSW32,SQ8,Refine(SQfp16)", 0.95, 0.6, 1300)
    assert not judge([*ALL, worse], rank(ALL, constraints)[0], constraints, {})[-1].is_efficient


@pytest.mark.parametrize(
    "changes",
    [{"memory_bytes": 0}, {"latency_ms": -1.0}, {"latency_ms": float("nan")}, {"recall": 0.0}, {"recall": 1.1}],
)
def test_a_limit_that_means_nothing_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(RetrievalError, match=next(iter(changes))):
        Constraints(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "Flat",
        "HNSW32,Flat",
        "SQ8,Refine(SQfp16)",
        "LeanVec48,HNSW32,Flat,Refine(SQ8)",
        "First64,IVF1024,SQ8,Refine(SQfp16)",
        "OPQ64,IVF4096,PQ64x4fs,Refine(SQfp16)",
        "Weighted,IVF256,PQ96x4fs,Refine(SQ8)",
        "IVF256,PQ96x4fs,Disk(SQ8)",
    ],
)
def test_notation_and_design_are_the_same(text: str) -> None:
    assert str(parse_design(text)) == text


@pytest.mark.parametrize(
    ("text", "design"),
    [
        ("LeanVec48,HNSW16,Flat", Design("HNSW16,Flat", 48, "SQfp16")),
        ("IVF64,PQ16x4fs", Design("IVF64,PQ16x4fs", None, "SQfp16")),
        ("HNSW16,SQ8,RFlat", Design("HNSW16,SQ8", None, "Flat")),
    ],
)
def test_scores_that_are_no_cosines_are_scored_again(text: str, design: Design) -> None:
    assert parse_design(text) == design


@pytest.mark.parametrize("text", ["annoy", "", "LeanVec,HNSW", "First,Flat"])
def test_an_unknown_design_is_refused(text: str) -> None:
    with pytest.raises(RetrievalError, match="is unknown; write auto, flat, hnsw or ivf"):
        parse_design(text)


@pytest.mark.parametrize(
    "text",
    [
        "LeanVec0,Flat",
        "HNSW0,Flat",
        "HNSW1,Flat",
        "IVF64_HNSW1,Flat",
        "NSG0,Flat",
        "PQ4x0",
        "IVF0,PQ4x4fs,Disk(SQ8)",
        "IVF8,Flat,Refine(HNSW0)",
    ],
)
def test_numbers_with_which_faiss_ends_the_process_are_refused(text: str) -> None:
    with pytest.raises(RetrievalError, match="a number of it is too small; write 1 or more, after HNSW 2 or more"):
        parse_design(text)


@pytest.mark.parametrize("kind", ["First32,Flat", "LeanVec32,Flat"])
def test_a_projection_onto_more_than_there_is_is_refused(build: Build, kind: str) -> None:
    images, captions = make_images_and_captions(200, 100, dim=16)
    with pytest.raises(RetrievalError, match="vectors have 16 dimensions; project onto fewer"):
        build(images, queries=captions, kind=kind)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("IVF4,PQ7x4fs", "can't make it for 16 dimensions"),
        ("IVF2,FlatDedup", "can't fetch vectors from it, as searches with a filter do"),
        ("HNSW1000000000,Flat", "can't add .* vectors to it"),
    ],
)
def test_a_design_that_faiss_can_not_make_fill_or_read_is_one_line(build: Build, kind: str, problem: str) -> None:
    with pytest.raises(RetrievalError, match=f"FAISS .* {problem}") as caught:
        build(kind=kind)
    assert "\n" not in str(caught.value)


def test_a_projection_without_texts_is_refused(build: Build) -> None:
    with pytest.raises(RetrievalError, match="there are no captions to learn that from"):
        build(kind="LeanVec8,HNSW16,Flat")


@pytest.mark.parametrize(
    ("num_vectors", "num_lists"),
    [(1, 1), (63, 1), (128, 2), (10_000, 156), (100_000, 1024), (1_000_000, 4096), (10_000_000, 16_384)],
)
def test_lists_grow_with_the_root_and_have_vectors_to_train_on(num_vectors: int, num_lists: int) -> None:
    assert count_lists(num_vectors) == num_lists
    assert num_lists == 1 or num_vectors >= 64 * num_lists


@pytest.mark.medium
@pytest.mark.parametrize("dim", [7, 100, 768])
def test_every_candidate_can_be_built_and_searched(build: Build, tmp_path: Path, dim: int) -> None:
    vectors, queries = make_vectors(400, dim), make_vectors(40, dim, seed=1)
    projections = (dim // 2,)
    candidates = candidate_designs(400, dim, projections)
    for place, design in enumerate(candidates if dim == 7 else candidates[-5:]):
        out, _ = build(vectors, kind=str(design), queries=queries, out=tmp_path / str(place))
        assert open_index(out).search(vectors[:3], 1).rows.shape == (3, 1)


def test_search_parameters_go_from_fast_to_thorough() -> None:
    graph = [each["ef_search"] for each in next(Design("HNSW32,Flat").search_params())]
    lists = [each["nprobe"] for each in next(Design("IVF4096,Flat").search_params())]
    assert graph == sorted(graph)
    assert lists == sorted(lists)
    assert lists[-1] == 4096  # at the worst all lists are read: the recall is always reached
    assert list(Design("Flat").search_params()) == [[{}]]


def test_directions_are_those_in_which_texts_vary() -> None:
    _, captions = make_images_and_captions(1000, 800)
    directions = QueryDirections(captions)
    assert directions.useful_widths() == (16,)  # 8 of meaning and an offset, of 64
    projected = captions @ directions.matrix(16).T
    np.testing.assert_allclose(np.linalg.norm(projected, axis=1), 1, atol=1e-3)
    assert QueryDirections(captions[:20]).useful_widths() == ()
    assert QueryDirections(make_vectors(5000, 64)).useful_widths() == ()


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_table_too_large_for_exact_search_gets_what_measures_best(
    build: Build, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr("index.choose.NUM_TRIED", 2000)
    images, captions = make_images_and_captions(6000, 800)
    out, manifest = build(images, queries=captions, constraints=Constraints(memory_bytes=1_000_000), num_threads=2)
    assert manifest.memory_bytes <= 1_000_000  # whole vectors take 1.5 MB
    assert manifest.recall_at_10 >= 0.95
    assert len(manifest.trials) == len(said) - 1
    chosen = [each for each in manifest.trials if each.verdict == "chosen"]
    assert len(chosen) == 1
    assert all(
        each.expected_latency_ms >= chosen[0].expected_latency_ms
        for each in manifest.trials
        if each.verdict == "slower"
    )
    assert share_found(open_index(out).search(captions[::2], 10).rows, exact_rows(captions[::2], images)) >= 0.95


@pytest.mark.medium
@pytest.mark.parametrize("measure_all", [False, True])
def test_a_small_table_is_searched_exactly_and_all_is_measured_on_demand(build: Build, measure_all: bool) -> None:
    queries = make_vectors(100, seed=2)
    _, manifest = build(make_vectors(1000), queries=queries, measure_all=measure_all, num_threads=2)
    assert manifest.design == "Flat"
    assert (len(manifest.trials) > 5) == measure_all


@pytest.mark.parametrize("num_vectors", [3, 100])
def test_a_table_too_small_for_some_designs_is_measured_without_them(build: Build, num_vectors: int) -> None:
    _, manifest = build(make_vectors(num_vectors), measure_all=True)
    assert manifest.design == "Flat"
    assert len(manifest.trials) > 4


def test_a_named_design_that_so_few_vectors_cannot_train_is_refused(build: Build) -> None:
    with pytest.raises(RetrievalError, match="can't train it on 50 vectors"):
        build(make_vectors(50), kind="OPQ4,IVF1,PQ4x4fs")


@pytest.mark.medium
def test_the_memory_of_a_candidate_is_known_before_it_is_built(build: Build, tmp_path: Path) -> None:
    vectors, queries = make_vectors(800, 32), make_vectors(60, 32, seed=1)
    for place, design in enumerate(candidate_designs(800, 32, (16,))):
        _, manifest = build(vectors, kind=str(design), queries=queries, out=tmp_path / str(place), num_threads=2)
        centroids = 4 * 32 * (design.num_lists + 3 * 32 + 50)
        assert abs(manifest.memory_bytes - design.estimated_bytes(800, 32)) <= centroids + 800 * 10


SCREENED = {
    parse_design(each.design): each
    for each in (
        trial("IVF64,SQ8,Refine(SQfp16)", 0.96, 1.0, 500),
        trial("HNSW32,Flat", 0.97, 1.4, 1300),
        trial("HNSW32,SQ8,Refine(SQfp16)", 0.97, 1.6, 800),
        trial("IVF64,RaBitQ,Refine(SQ8)", 0.9, 0.5, 300),
    )
}
LISTS, NEAR, FAR, MISSING = SCREENED


@pytest.mark.parametrize(
    ("measured", "following", "constraints", "stops"),
    [
        ([FLAT], LISTS, Constraints(), False),
        ([FLAT, SLOW_CODES], NEAR, Constraints(), False),
        ([FLAT, SLOW_CODES], FAR, Constraints(), True),
        ([FLAT, SLOW_CODES], MISSING, Constraints(), True),
        ([FLAT, CODES], FAR, Constraints(), False),
        ([FLAT, SLOW_CODES], NEAR, Constraints(recall=0.97), False),
        ([FLAT], LISTS, Constraints(latency_ms=3.0), False),
        ([FLAT, CODES], LISTS, Constraints(latency_ms=3.0), False),
        ([FLAT, SLOW_CODES], NEAR, Constraints(latency_ms=3.0), True),
        ([FLAT, SLOW_CODES], FAR, Constraints(latency_ms=3.0), False),
        ([FLAT, SLOW_CODES], NEAR, Constraints(latency_ms=1.0), False),
    ],
)
def test_measuring_ends_where_no_other_can_be_better(
    measured: list[DesignTrial], following: Design, constraints: Constraints, stops: bool
) -> None:
    screened = SCREENED if constraints.latency_ms is None else {}
    assert may_stop(measured, screened, following, SCREENED[following].expected_bytes, constraints) == stops


@pytest.mark.medium
def test_where_a_latency_is_asked_for_only_those_up_to_twice_the_smallest_that_keeps_it_are_measured(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("index.choose.NUM_TRIED", 1500)
    images, captions = make_images_and_captions(3000, 400)
    limits = Constraints(latency_ms=10_000, memory_bytes=700_000)  # whole vectors take 770 KB
    _, manifest = build(images, queries=captions, constraints=limits, num_threads=2)
    assert manifest.recall_at_10 >= 0.95
    others = [trial for trial in manifest.trials if trial.design != "Flat"]
    kept = [trial for trial in others if trial.recall_at_10 >= 0.95]
    smallest = min(trial.expected_bytes for trial in kept)
    small = [trial for trial in kept if trial.expected_bytes <= 2 * smallest]
    fastest_ms = min(trial.expected_latency_ms for trial in small)
    as_fast = [trial for trial in small if trial.expected_latency_ms <= 1.25 * fastest_ms]
    chosen = min(as_fast, key=lambda trial: trial.expected_bytes)
    assert (chosen.design, chosen.verdict) == (manifest.design, "chosen")
    assert all("recall" in trial.verdict for trial in others if trial not in kept)
    assert {trial.verdict for trial in kept if trial != chosen} <= {"larger", "slower"}
    assert all(trial.expected_bytes <= 2 * smallest * 1.2 for trial in others)  # larger ones are not built


@pytest.mark.medium
def test_without_a_latency_all_are_measured_on_a_small_sample_and_few_on_a_large_one(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("index.choose.NUM_TRIED", 1500)
    monkeypatch.setattr("index.choose.NUM_SCREENED", 700)
    images, queries = make_vectors(3000, 64), make_vectors(400, 64, seed=1)  # which no projection serves
    limit = Constraints(memory_bytes=700_000)
    _, manifest = build(images, queries=queries, constraints=limit, num_threads=2)
    sizes = {trial.design: trial.num_vectors for trial in manifest.trials}
    assert sizes[manifest.design] == sizes["Flat"] == 1500
    assert {700, 1500} == set(sizes.values())
    assert len(sizes) == len(manifest.trials)
    fitting = [each for each in candidate_designs(3000, 64, ()) if each.least_bytes(3000, 64) <= 700_000]
    assert {parse_design(each) for each in sizes} == {parse_design("Flat"), *fitting}
    assert len(fitting) >= 4
    codes = [str(each) for each in fitting if each.has_small_codes]
    assert codes
    assert {sizes[each] for each in codes} == {1500}, "a smaller sample makes whole vectors look faster than codes"
    assert manifest.memory_bytes <= 700_000
    assert manifest.recall_at_10 >= 0.95


def test_a_trial_counts_what_rounding_loses_where_the_whole_table_lies_closer() -> None:
    """On the sample each of many groups of neighbours has one vector, which 8 bits distinguish from all others."""
    rng = np.random.default_rng(0)
    images = unit(np.repeat(make_vectors(500, 32), 16, axis=0) + 0.002 * rng.standard_normal((8000, 32)))
    table = VectorTable(*images.shape, images)
    answers = find_ground_truth(table, RecallQueries(make_vectors(200, 32, seed=1), "text"))
    trials = DesignTrials(table, 500, answers, Projections(np.empty((0, 32), np.float32), table), target=0.95)
    with faiss_build.threads(1):
        fine, coarse = (trials.measure(parse_design(f"IVF4,Flat,Refine({code})")) for code in ("SQfp16", "SQ8"))
        whole = Meter(faiss_build.build(parse_design("SQ8"), table), parse_design("SQ8"), table.take)
    assert fine.recall_at_10 >= 0.95
    assert whole.point(answers, {}).recall_at_10 < 0.9, "or rounding loses nothing"
    assert coarse.recall_at_10 == pytest.approx(whole.point(answers, {}).recall_at_10, abs=0.05)
    assert rank([fine, coarse], Constraints()) == [fine]


WEIGHTED = "Weighted,IVF16,PQ16x4fs,Refine(SQ8)"


def test_a_graph_larger_than_all_that_is_kept_costs_no_other_its_place() -> None:
    """A graph over narrow vectors is larger than several samples of them."""
    images = make_vectors(2000, 8)
    table = VectorTable(*images.shape, images)
    answers = find_ground_truth(table, RecallQueries(make_vectors(100, 8, seed=1), "text"))
    trials = DesignTrials(table, 2000, answers, Projections(np.empty((0, 8), np.float32), table), target=0.95)
    with faiss_build.threads(1):
        measured = [trials.measure(parse_design(design)) for design in ("Flat", "HNSW32,Flat", "SQfp16")]
        compared = trials.compare(measured)
    changed = [before.design for before, now in zip(measured, compared, strict=True) if before != now]
    assert changed == ["Flat", "SQfp16"]


@pytest.mark.medium
def test_where_what_kept_the_latency_misses_it_when_compared_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images, captions = make_images_and_captions(6000, 800)
    table = VectorTable(*images.shape, images)
    split = split_queries(table, captions, "text")
    answers, projections = find_ground_truth(table, split.tuned), Projections(split.learned, table)
    rounds = []

    def compare_ms(indexes: list[tuple[Meter, object]], _: object, *, least_s: float) -> list[float]:
        rounds.append(len(indexes))
        return [1e6 if len(rounds) == 1 else 0.01] * len(indexes)

    monkeypatch.setattr("index.design_trials.compare_ms", compare_ms)
    limits = Constraints(latency_ms=1000.0, recall=0.5)
    search = DesignSearch(table, answers, projections, "auto", limits, measure_all=False)
    with faiss_build.threads(1):
        exact, second = itertools.islice(search.designs(), 2)
    assert exact.is_exact and not second.is_exact
    assert len(rounds) == 2, "those that were measured before are compared, then those after them"


@pytest.mark.medium
def test_designs_that_were_measured_while_the_machine_was_slow_are_compared_as_if_it_had_not_been(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = make_vectors(4000, 32)
    table = VectorTable(*images.shape, images)
    answers = find_ground_truth(table, RecallQueries(make_vectors(200, 32, seed=1), "text"))
    measured_ms = {}

    def measure(slow: str, kept: int = 4, slower: float = 50.0) -> dict[str, DesignTrial]:
        trials = DesignTrials(table, 4000, answers, Projections(np.empty((0, 32), np.float32), table), target=0.95)
        monkeypatch.setattr("index.design_trials._KEPT_SAMPLES", kept)
        # The machine itself may be half as fast for a moment: with 2.5, that is beyond what is compared as a rule.
        monkeypatch.setattr("index.design_trials._SLOWER", slower)
        found = []
        for design in ("Flat", WEIGHTED, "SQfp16"):
            with monkeypatch.context() as patched:
                if design == slow:
                    patched.setattr("index.autotune.time.thread_time", lambda now=time.thread_time: 2.5 * now())
                found.append(trials.measure(parse_design(design)))
        measured_ms[slow] = {trial.design: trial.latency_ms for trial in found}
        return {trial.design: trial for trial in trials.compare(found)}

    with faiss_build.threads(1):
        compared = [measure(slow) for slow in ("Flat", "SQfp16")]
        first_ms = measured_ms["Flat"]
        let_go = measure("Flat", kept=0), measured_ms["Flat"]
        too_slow = measure("Flat", slower=1.0), measured_ms["Flat"]
    for name in ("Flat", WEIGHTED):
        ratios = [each[name].expected_latency_ms / each["SQfp16"].expected_latency_ms for each in compared]
        assert 0.6 < ratios[0] / ratios[1] < 1.67, "2.5 * 2.5 = 6.25 as Flat was first measured"
    assert compared[0][WEIGHTED].latency_ms != first_ms[WEIGHTED]
    for found, before_ms in (let_go, too_slow):
        assert {name: trial.latency_ms for name, trial in found.items()} == before_ms


def test_where_the_fastest_is_wanted_a_smaller_one_must_be_as_fast() -> None:
    small = trial("LeanVec32,IVF64,PQ32x4fsr,Refine(SQ8)", 0.96, 0.24, 300)
    assert rank([FLAT, LEAN, small], Constraints()) == [LEAN, small, FLAT]
    assert rank([FLAT, LEAN, small], Constraints(latency_ms=3.0)) == [small, LEAN]
    as_fast = small.model_copy(update={"expected_latency_ms": 0.21})
    assert rank([FLAT, LEAN, as_fast], Constraints()) == [as_fast, LEAN, FLAT]
    slower = small.model_copy(update={"expected_latency_ms": 0.6})
    assert rank([FLAT, GRAPH, slower], Constraints()) == [slower, GRAPH, FLAT], "a graph is larger than the vectors"


@pytest.mark.medium
def test_where_codes_of_4_bits_of_projections_keep_the_recall_little_else_is_measured(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph over a sample takes longer to build than the table's lists: choosing was half of a build."""
    monkeypatch.setattr("index.choose.NUM_TRIED", 1500)
    monkeypatch.setattr("index.choose.NUM_SCREENED", 700)
    images, captions = make_images_and_captions(3000, 400)
    _, manifest = build(images, queries=captions, constraints=Constraints(memory_bytes=700_000), num_threads=2)
    measured = {parse_design(trial.design) for trial in manifest.trials}
    codes = [each for each in candidate_designs(3000, 64, (16,)) if each.projection and each.has_fast_scan]
    assert {*codes} <= measured
    assert parse_design(manifest.design) in codes
    left = {*candidate_designs(3000, 64, (16,))} - measured
    assert len(left) > len(measured)
    assert {each.kind for each in left} == {"flat", "hnsw", "ivf"}
    fitting = [each for each in left if each.least_bytes(3000, 64) <= 700_000]
    assert all(any(each.is_outdone_by(other, is_small_wanted=False) for other in codes) for each in fitting)
    assert manifest.memory_bytes <= 700_000
    assert manifest.recall_at_10 >= 0.95


@pytest.mark.medium
@pytest.mark.parametrize("latency_ms", [None, 1000.0])
def test_what_others_outdo_is_measured_after_all_where_these_miss_on_the_whole_table(
    monkeypatch: pytest.MonkeyPatch, latency_ms: float | None
) -> None:
    monkeypatch.setattr("index.constraints.DEFAULT_LATENCY_MS", 1e-6)
    monkeypatch.setattr("index.choose.NUM_TRIED", 1500)
    monkeypatch.setattr("index.choose.NUM_SCREENED", 700)
    images, captions = make_images_and_captions(3000, 400)
    table = VectorTable(*images.shape, images)
    split = split_queries(table, captions, "text")
    projections = Projections(split.learned, table)
    constraints = Constraints(recall=0.5, latency_ms=latency_ms)
    search = DesignSearch(
        table, find_ground_truth(table, split.tuned), projections, "auto", constraints, measure_all=False
    )
    designs, built = search.designs(), list[Design]()
    with faiss_build.threads(1):
        while not any(design.has_fast_scan and design.projection for design in built):
            built.append(next(designs))
        first = len(search.trials)
        built += [*designs]
    measured = {parse_design(trial.design) for trial in search.trials}
    assert len(measured) > first
    assert measured == set(projections.candidates())
    small = latency_ms is not None
    outdone = [each for each in measured if any(each.is_outdone_by(other, is_small_wanted=small) for other in measured)]
    assert {design.kind for design in outdone} == {"flat", "hnsw", "ivf"}


@pytest.mark.parametrize("small", [True, False])
def test_more_bits_graphs_whole_vectors_and_weighted_codes_are_outdone_by_four_bits_of_projections(small: bool) -> None:
    four_bits = parse_design("LeanVec32,IVF64,PQ32x4fsr,Refine(SQ8)")
    others = {
        str(each): each.is_outdone_by(four_bits, is_small_wanted=small)
        for each in candidate_designs(10_000, 128, (32, 64))
    }
    projected = {name for name in others if "LeanVec" in name and "PQ" not in name}
    if small:  # those with larger vectors for re-ranking may find more
        projected = {name for name in projected if name.endswith("Refine(SQ8)")}
    assert {name for name, is_outdone in others.items() if is_outdone and "LeanVec" in name} == projected
    assert all(is_outdone for name, is_outdone in others.items() if "LeanVec" not in name), "whole vectors are larger"
    assert not four_bits.is_outdone_by(parse_design("LeanVec32,IVF64,SQ8,Refine(SQ8)"), is_small_wanted=small)
    assert not parse_design("IVF64,PQ32x4fs,Disk(SQ8)").is_outdone_by(four_bits, is_small_wanted=small)
