"""The design that is chosen keeps what it promised, however the vectors lie."""

import time
from pathlib import Path

import numpy as np
import pytest
from index_samples import Build, ids_of
from vector_shapes import SHAPES, make_shape

from index.constraints import Constraints
from index.design_trials import Projections
from index.held_out_queries import split_queries
from index.index_errors import RebuildNeededError
from index.manifest import Manifest
from index.search import Index, open_index
from index.update import update_index
from index.vectors import VectorTable

pytestmark = pytest.mark.medium

OF_SMALL_CODES = ("nonlinear look", "sharp look")
"""Shapes whose small codes promise too much."""


def recall_by_score(out: Path, images: np.ndarray, queries: np.ndarray) -> float:
    """Share of the ten found that score no less than the tenth nearest."""
    tenth = np.sort(queries @ images.T, axis=1)[:, -10]
    rows = open_index(out).search(queries, 10, num_threads=1).rows
    return float(np.mean(np.einsum("qke,qe->qk", images[rows], queries) >= tenth[:, None] - 1e-6))


def build_and_check(build: Build, name: str, num_images: int, dim: int, constraints: Constraints) -> Manifest:
    images, captions = make_shape(name, num_images, 1400, dim, seed=3)
    held_out, given = captions[:400], captions[400:]
    out, manifest = build(images, queries=given, constraints=constraints)
    assert manifest.missed is None
    assert manifest.recall_at_10 >= 0.95
    assert recall_by_score(out, images, held_out) >= 0.94  # of 400 captions, recall is off by 0.01
    return manifest


@pytest.mark.parametrize("name", SHAPES)
def test_a_small_table_of_any_shape_keeps_its_recall_on_captions_it_has_not_seen(
    build: Build, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("index.choose.NUM_TRIED", 1500)
    monkeypatch.setattr("index.choose.MIN_TRIED", 1500)
    whole_bytes = 6000 * 32 * 4
    manifest = build_and_check(build, name, 6000, 32, Constraints(memory_bytes=int(0.8 * whole_bytes)))
    assert manifest.memory_bytes <= 0.8 * whole_bytes


def update_and_check(build: Build, tmp_path: Path, name: str, num_images: int, dim: int, limits: Constraints) -> None:
    """Exchange a hundredth of the rows, as a night does; a RebuildNeededError is an answer, too."""
    images, captions = make_shape(name, num_images, 1400, dim, seed=4)
    num_changed = num_images // 100
    numbers = np.arange(num_images)
    before, _ = build(
        images[:-num_changed], ids=ids_of(numbers[:-num_changed]), queries=captions[400:], constraints=limits
    )
    removed = np.zeros(num_images - num_changed, bool)
    removed[np.random.default_rng(1).choice(len(removed), num_changed, replace=False)] = True
    out = tmp_path / "index" / "000002"
    try:
        made = update_index(
            before, out, images[-num_changed:], ids_of(numbers[-num_changed:]), removed, embeddings_version=8
        )
    except RebuildNeededError as error:
        assert "recall@10 would be" in str(error)
        return
    live = np.flatnonzero(~np.pad(removed, (0, num_changed)))
    tenth = np.sort(captions[:400] @ images[live].T, axis=1)[:, -10]
    rows = open_index(out).search(captions[:400], 10, num_threads=1).rows
    assert np.isin(rows, live).all()
    found = float(np.mean(np.einsum("qke,qe->qk", images[rows], captions[:400]) >= tenth[:, None] - 1e-6))
    assert found >= 0.94, "of 400 captions, recall is off by 0.01"
    assert made.recall_at_10 >= 0.945


@pytest.mark.parametrize("name", SHAPES)
def test_an_update_of_a_hundredth_keeps_the_recall_or_asks_for_a_build(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("index.choose.NUM_TRIED", 1500)
    monkeypatch.setattr("index.choose.MIN_TRIED", 1500)
    update_and_check(build, tmp_path, name, 6000, 32, Constraints(memory_bytes=int(0.8 * 6000 * 32 * 4)))


def test_without_captions_the_first_numbers_are_searched_where_they_carry_the_most(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a model trained for it has them (Matryoshka); all numbers order what was found."""
    monkeypatch.setattr("index.constraints.DEFAULT_LATENCY_MS", 1e-6)
    images, captions = make_shape("matryoshka", 8000, 400, 96, seed=3)
    out, manifest = build(images)
    measured = {trial.design.split(",")[0] for trial in manifest.trials}
    assert {"First32", "First48"} & measured
    _, even = build(make_shape("nearly isotropic", 8000, 1, 96, seed=3)[0], out=out.with_name("even"))
    assert not any(trial.design.startswith("First") for trial in even.trials)
    out, manifest = build(images, kind="First32,HNSW32,Flat", out=out.with_name("first"))
    assert manifest.recall_at_10 >= 0.95
    exact = open_index(build(images, kind="flat", out=out.with_name("flat"))[0]).search(captions, 10)
    found = open_index(out).search(captions, 10, parameters={"ef_search": 256, "k_factor": 16})
    assert np.mean(found.rows[:, 0] == exact.rows[:, 0]) >= 0.95
    assert found.scores[:, 0] == pytest.approx(exact.scores[:, 0], abs=0.01), "cosines of whole vectors"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name in SHAPES if name not in OF_SMALL_CODES])
def test_a_table_of_any_other_shape_keeps_its_recall_within_a_latency(
    build: Build, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Designs are tried on a fifth of the table, as those of 100,000 vectors are by default."""
    monkeypatch.setattr("index.choose.NUM_TRIED", 8000)
    monkeypatch.setattr("index.choose.MIN_TRIED", 8000)
    build_and_check(build, name, 40_000, 128, Constraints(latency_ms=0.8))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", OF_SMALL_CODES)
def test_where_small_codes_promise_too_much_another_design_keeps_the_latency(build: Build, name: str) -> None:
    """The first design that kept 2 ms on the sample found 0.91 on the table, and no index was built."""
    manifest = build_and_check(build, name, 200_000, 192, Constraints(latency_ms=2.0))
    graph_bytes = 200_000 * (192 * 4 + 272)
    assert manifest.memory_bytes <= graph_bytes / 2
    assert manifest.latency_ms <= 2.0


def times_beside(chosen: str, indexes: dict[str, Index], queries: np.ndarray) -> dict[str, float]:
    """Measure a query of each index in times that of the chosen one: the median of a hundred turns of ten queries.

    A machine that is slow for a moment is slow for neighbours. Each turn begins with ten other queries that bring an
    index back into the cache.
    """
    found: dict[str, list[float]] = {name: [] for name in indexes}
    for _ in range(5):
        for first in range(0, len(queries), 10):
            for name, index in indexes.items():
                for query in np.roll(queries, 10 - first, axis=0)[:10]:
                    index.search(query[None], 10, num_threads=1)
                started = time.thread_time()
                for query in queries[first : first + 10]:
                    index.search(query[None], 10, num_threads=1)
                found[name].append(time.thread_time() - started)
    return {name: float(np.median(np.divide(each, found[chosen]))) for name, each in found.items()}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SHAPES)
def test_no_candidate_that_is_built_whole_is_much_faster_than_the_chosen_one(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("index.constraints.DEFAULT_LATENCY_MS", 1e-6)  # or exact search is chosen, however fast others
    monkeypatch.setattr("index.choose.NUM_TRIED", 4000)
    monkeypatch.setattr("index.choose.MIN_TRIED", 4000)
    images, captions = make_shape(name, 12_000, 2200, 48, seed=5)
    table = VectorTable(len(images), 48, images)
    designs = Projections(split_queries(table, captions[:2000], "text").learned, table).candidates()
    kinds = ["auto", *(str(design) for design in designs)]
    built = [build(images, queries=captions[:2000], kind=kind, out=tmp_path / kind.replace("/", "_")) for kind in kinds]
    chosen = built[0][1].design
    indexes = {
        manifest.design: open_index(out)
        for out, manifest in built
        if manifest.recall_at_10 >= 0.95 or manifest.design == chosen
    }
    assert indexes[chosen].manifest.recall_at_10 >= 0.95
    times = times_beside(chosen, indexes, captions[2000:])
    assert min(times.values()) >= 0.8, times
