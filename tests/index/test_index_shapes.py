"""The design that is chosen keeps what it promised, however the vectors lie."""

from pathlib import Path

import numpy as np
import pytest
from index_samples import Build
from vector_shapes import SHAPES, make_shape

from index.constraints import Constraints
from index.manifest import Manifest
from index.search import open_index


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


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SHAPES)
def test_a_table_of_any_shape_keeps_its_recall_within_a_latency(build: Build, name: str) -> None:
    build_and_check(build, name, 100_000, 128, Constraints(latency_ms=2.0))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["nonlinear look", "sharp look"])
def test_where_small_codes_promise_too_much_another_design_keeps_the_latency(build: Build, name: str) -> None:
    """The first design that kept 2 ms on the sample found 0.91 on the table, and no index was built."""
    manifest = build_and_check(build, name, 200_000, 192, Constraints(latency_ms=2.0))
    graph_bytes = 200_000 * (192 * 4 + 272)
    assert manifest.memory_bytes <= graph_bytes / 2
    assert manifest.latency_ms <= 2.0
