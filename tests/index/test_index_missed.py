"""There is an index whatever comes: where no design keeps the constraints, the nearest one, which says so."""

import os
import shutil
from typing import ClassVar

import faiss
import numpy as np
import pytest
from index_samples import Build, make_images_and_captions, make_vectors

import index.build as building
from index.autotune import Meter
from index.constraints import Constraints, excess
from index.designs import Parameters, parse_design
from index.held_out_queries import CAPTIONS, RecallQueries
from index.index_errors import ConstraintsMissedError
from index.manifest import Point
from index.recall import GroundTruth, find_ground_truth
from index.search import open_index
from index.vectors import Floats, VectorTable

IMPOSSIBLE = Constraints(latency_ms=1e-6)


@pytest.mark.medium
def test_where_none_keeps_the_latency_the_nearest_is_built_and_says_what_it_misses(build: Build) -> None:
    images, captions = make_images_and_captions(1500, 400)
    out, manifest = build(images, queries=captions, constraints=IMPOSSIBLE)
    assert manifest.missed is not None
    assert manifest.missed.endswith(" ms (asked for: recall = 0.95, latency_ms = 1e-06)")
    assert [trial.design for trial in manifest.trials if trial.verdict == "chosen"] == [manifest.design]
    fastest = min(trial.expected_latency_ms for trial in manifest.trials)
    chosen = next(trial for trial in manifest.trials if trial.verdict == "chosen")
    assert chosen.expected_latency_ms == fastest
    assert open_index(out).search(captions[:3], 10).rows.min() >= 0


@pytest.mark.medium
@pytest.mark.parametrize("on_missed", ["keep", "fail"])
def test_the_nearest_is_not_built_unless_it_is_to_be_published(build: Build, on_missed: str) -> None:
    with pytest.raises(ConstraintsMissedError, match=r"none of \d+ designs keeps recall = 0.95, latency_ms = 1e-06"):
        build(make_vectors(1000), constraints=IMPOSSIBLE, on_missed=on_missed)


def test_what_is_kept_misses_nothing(build: Build) -> None:
    assert build()[1].missed is None


def let_miss(monkeypatch: pytest.MonkeyPatch, num_missed: int) -> list[str]:
    """Let the first indexes of whole tables miss the constraints; returns those measured, as they come."""
    measured: list[str] = []

    def missed_text(*arguments: object) -> str | None:
        measured.append("")
        return "too little" if len(measured) <= num_missed else None

    monkeypatch.setattr(building, "missed_text", missed_text)
    return measured


@pytest.mark.medium
@pytest.mark.parametrize("num_missed", [1, 2])
def test_where_a_design_misses_on_the_whole_table_another_is_measured_and_built(
    build: Build, monkeypatch: pytest.MonkeyPatch, num_missed: int
) -> None:
    images, captions = make_images_and_captions(3000, 400)
    measured = let_miss(monkeypatch, num_missed)
    limits = Constraints(memory_bytes=700_000)
    _, manifest = build(images, queries=captions, constraints=limits)
    verdicts = [trial.verdict for trial in manifest.trials]
    assert verdicts.count("whole table: too little") == num_missed
    assert verdicts.count("chosen") == 1
    assert len(measured) == num_missed + 1
    assert manifest.missed is None
    assert manifest.recall_at_10 >= 0.95


@pytest.mark.medium
def test_without_a_limit_exact_search_ends_the_misses(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("index.constraints.DEFAULT_LATENCY_MS", 1e-6)
    images, captions = make_images_and_captions(2000, 400)
    measured = let_miss(monkeypatch, 99)
    _, manifest = build(images, queries=captions)
    assert (manifest.design, manifest.recall_at_10, manifest.missed) == ("Flat", 1.0, None)
    assert len(measured) == 3, "at most four indexes are built"


@pytest.mark.medium
def test_a_recall_that_only_exact_search_reaches_is_reached(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("index.constraints.DEFAULT_LATENCY_MS", 1e-6)
    _, manifest = build(
        make_vectors(2000, 32), queries=make_vectors(200, 32, seed=1), constraints=Constraints(recall=1)
    )
    assert (manifest.recall_at_10, manifest.missed) == (1.0, None)


@pytest.mark.medium
@pytest.mark.parametrize("on_missed", ["publish", "fail"])
def test_exact_search_that_misses_a_latency_is_no_way_out(
    build: Build, monkeypatch: pytest.MonkeyPatch, on_missed: str
) -> None:
    """It keeps the latency on the sample, and misses it on the whole table as all others do."""
    let_miss(monkeypatch, 99)
    limits = Constraints(latency_ms=1e5)
    if on_missed == "fail":
        with pytest.raises(ConstraintsMissedError, match="Flat has too little"):
            build(make_vectors(1000), constraints=limits, on_missed=on_missed)
    else:
        assert build(make_vectors(1000), constraints=limits)[1].missed == "too little"


class LevellingOff(Meter):
    """Meter of a graph whose recall levels off between the target and its margin."""

    recalls: ClassVar = {16: 0.93, 32: 0.951, 64: 0.953, 128: 0.9534}

    def point(self, ground_truth: GroundTruth, parameters: Parameters) -> Point:
        effort = parameters["ef_search"]
        below = max((each for each in self.recalls if each <= effort), default=16)
        return Point(parameters=parameters, recall_at_10=self.recalls[below], latency_ms=effort / 100)

    def times_s(self, queries: Floats, parameters: Parameters) -> list[float]:
        return [parameters["ef_search"] / 100_000] * len(queries)


def test_an_effort_beyond_the_target_is_not_paid_for_where_recall_levels_off(build: Build) -> None:
    images, captions = make_images_and_captions(300, 40)
    table = VectorTable(len(images), images.shape[1], images)
    asked = find_ground_truth(table, RecallQueries(captions, CAPTIONS))
    meter = LevellingOff(faiss.IndexFlatIP(images.shape[1]), parse_design("HNSW32,Flat"), table.take)
    assert meter.tune_finely(asked, 0.95)[1].latency_ms == 0.32
    assert meter.tune_finely(asked, 0.94)[1].latency_ms == 0.32, "with the margin"
    assert meter.tune_finely(asked, 0.99)[1].recall_at_10 == 0.9534


def test_a_recall_beyond_the_target_counts_for_a_latency_below_that_of_the_step_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = [
        Point(parameters={"nprobe": nprobe, "k_factor": factor}, recall_at_10=recall, latency_ms=latency_ms)
        for nprobe, factor, recall, latency_ms in [
            (4, 8, 0.9, 1.0),
            (8, 8, 0.975, 2.0),
            (4, 4, 0.94, 0.5),
            (8, 4, 0.95, 1),
        ]
    ]
    images, captions = make_images_and_captions(300, 40)
    table = VectorTable(len(images), images.shape[1], images)
    asked = find_ground_truth(table, RecallQueries(captions, CAPTIONS))
    meter = Meter(faiss.IndexFlatIP(images.shape[1]), parse_design("HNSW32,Flat"), table.take)
    times_ms = {str(step.parameters): step.latency_ms for step in steps}
    monkeypatch.setattr(
        "index.autotune.compare_ms", lambda compared, _: [times_ms[str(parameters)] for _, parameters in compared]
    )

    def share(points: list[Point], chosen: Point, target: float) -> float:
        return meter.share_at_target(points, chosen, asked, target)

    assert share(steps, steps[1], 0.95) == pytest.approx(0.75), "half of the way: 0.1, 0.05, 0.025 are missing"
    assert share(steps, steps[1], 0.9001) == pytest.approx(0.5, abs=0.01)
    assert share(steps[1:], steps[1], 0.95) == 1.0, "other factors show nothing"
    assert share(steps, steps[3], 0.95) == 1.0
    assert share(steps, steps[0], 0.95) == 1.0, "it misses"


def test_the_nearest_is_the_one_that_exceeds_its_limits_by_the_smallest_factor() -> None:
    limits = Constraints(latency_ms=2.0, memory_bytes=1000)
    kept, a_little_less, slow, large = (0.96, 1.0, 900), (0.94, 1.0, 900), (1.0, 12.0, 900), (1.0, 1.0, 1001)
    assert excess(kept, limits) == (False, 1.0)
    assert excess(a_little_less, limits) == (False, pytest.approx(1.2))
    assert excess(slow, limits) == (False, 6.0)
    assert sorted([large, slow, a_little_less, kept], key=lambda each: excess(each, limits)) == [
        kept,
        a_little_less,
        slow,
        large,
    ]


KINDS = ("random", "all equal", "two clusters", "one direction")


def make_table(rng: np.random.Generator, kind: str, num: int, dim: int) -> np.ndarray:
    vectors = rng.standard_normal((num, dim), dtype=np.float32)
    if kind == "all equal":
        vectors[:] = vectors[0]
    elif kind == "two clusters":
        vectors = vectors[rng.integers(0, min(2, num), num)] + np.float32(1e-3) * vectors
    elif kind == "one direction":
        vectors[:, 1:] *= np.float32(1e-4)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.fixture
def equal_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of designs that all miss a latency, the nearest would be chosen by chance."""
    monkeypatch.setattr(Meter, "_times_s", lambda _, run, given: [1e-5 for _ in given])


def assert_index_of_every_table(build: Build, tmp_path, num_tables: int, most: int, widest: int) -> None:
    for number in range(num_tables):
        rng = np.random.default_rng(number)
        num, dim = (int(high ** rng.random()) for high in (most + 1, widest + 1))
        num, dim = max(1, num), max(2, dim)
        kind, num_queries = KINDS[number % len(KINDS)], int(rng.choice([0, 1, 7, 60]))
        vectors, queries = make_table(rng, kind, num, dim), make_table(rng, "random", num_queries, dim)
        limits = Constraints(latency_ms=1e-6) if number % 3 == 0 else Constraints()
        out, manifest = build(vectors, queries=queries, constraints=limits, out=tmp_path / f"{number}")
        where = f"table {number}: {num} x {dim}, {kind}, {num_queries} queries, {manifest.design}"
        assert manifest.num_vectors == num, where
        assert (manifest.missed is not None) == (number % 3 == 0), where
        asked = queries if num_queries else vectors[:20]
        found = open_index(out).search(asked, 10)
        assert found.rows.shape == (len(asked), min(10, num)), where
        tenth = np.sort(asked @ vectors.T, axis=1)[:, -min(10, num)]
        share = np.mean(np.einsum("qke,qe->qk", vectors[found.rows], asked) >= tenth[:, None] - 1e-5)
        if num_queries == 0 or num_queries >= 60:
            assert share >= manifest.recall_at_10 - 0.06, where
        shutil.rmtree(out)


@pytest.mark.usefixtures("equal_times")
@pytest.mark.medium
def test_tables_of_any_size_and_width_get_an_index(build: Build, tmp_path) -> None:
    assert_index_of_every_table(build, tmp_path, 48, 700, 64)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_larger_tables_of_any_size_and_width_get_an_index(build: Build, tmp_path) -> None:
    """NUM_TABLES=1000 tries as many as were promised, which takes an hour."""
    assert_index_of_every_table(build, tmp_path, int(os.environ.get("NUM_TABLES", "40")), 50_000, 2048)
