"""Recall is measured against the exact answer, on queries that were held out of everything else."""

from pathlib import Path

import numpy as np
import pytest
from index_samples import Build, make_images_and_captions, make_vectors, share_found

from index import faiss_build
from index.constraints import Constraints
from index.designs import parse_design
from index.held_out_queries import MAX_MEASURED, RecallQueries, sampled_queries, split_queries, text_like_queries
from index.recall import GroundTruth, find_ground_truth, measure_recall, measure_rounding
from index.search import open_index
from index.vectors import VectorTable


def brute_force(table: VectorTable, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    scores = queries.astype(np.float64) @ np.vstack(list(table.blocks())).astype(np.float64).T
    rows = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, rows, 1).astype(np.float32), rows


def make_table(vectors: np.ndarray) -> VectorTable:
    return VectorTable(len(vectors), vectors.shape[1], vectors)


@pytest.mark.parametrize("kind", ["hnsw", "ivf", "IVF64,PQ16x4fs", "SQ8,Refine(SQfp16)"])
def test_the_manifest_tells_the_recall_that_a_reader_of_the_version_gets(build: Build, kind: str) -> None:
    images, captions = make_images_and_captions(6000, 200)
    out, manifest = build(images, kind=kind, queries=captions, constraints=Constraints(recall=0.8))
    held_out = captions[::2]
    found = open_index(out).search(held_out, 10).rows
    expected = share_found(found, brute_force(make_table(images), held_out, 10)[1])
    assert manifest.recall_at_10 == pytest.approx(expected, abs=1e-9)
    assert 0.8 <= manifest.recall_at_10 < 1.0
    assert (manifest.num_recall_queries, manifest.recall_query_kind) == (100, "text")


@pytest.mark.medium
@pytest.mark.parametrize(("kind", "name"), [("hnsw", "ef_search"), ("ivf", "nprobe")])
def test_a_higher_target_buys_recall_with_a_slower_search(build: Build, tmp_path: Path, kind: str, name: str) -> None:
    images, captions = make_images_and_captions(6000, 200)
    requests = {"fast": Constraints(recall=0.1), "thorough": Constraints(recall=0.999)}
    made = {
        request: build(images, kind=kind, queries=captions, constraints=constraints, out=tmp_path / request)[1]
        for request, constraints in requests.items()
    }
    assert made["fast"].parameters[name] < made["thorough"].parameters[name]
    assert made["fast"].recall_at_10 < made["thorough"].recall_at_10
    assert made["thorough"].recall_at_10 > 0.98


def test_without_queries_vectors_of_the_table_are_asked_at_a_careful_setting(build: Build) -> None:
    """Images find each other where captions find nothing, so the cheap settings are not trusted."""
    images, _ = make_images_and_captions(6000, 1)
    _, manifest = build(images, kind="hnsw")
    assert (manifest.num_recall_queries, manifest.recall_query_kind) == (MAX_MEASURED, "sampled")
    assert manifest.parameters["ef_search"] >= 64


def test_no_given_queries_are_none(build: Build) -> None:
    _, manifest = build(queries=np.empty((0, 16), np.float32))
    assert (manifest.num_recall_queries, manifest.recall_query_kind) == (300, "sampled")


def test_queries_of_a_kind_are_named_so_and_their_number_is_bounded(build: Build) -> None:
    _, manifest = build(queries=make_vectors(4 * MAX_MEASURED, seed=5), query_kind="image")
    assert (manifest.num_recall_queries, manifest.recall_query_kind) == (MAX_MEASURED, "image")


def test_what_is_learned_from_is_never_measured_on() -> None:
    table, given = make_table(make_vectors(50)), make_vectors(301, seed=6)
    split = split_queries(table, given, "text")
    measured, learned = ({row.tobytes() for row in part} for part in (split.tuned.vectors, split.learned))
    assert split.judged is split.tuned, "few captions do both"
    assert not measured & learned
    assert measured | learned == {row.tobytes() for row in given}


def test_search_parameters_are_judged_by_queries_that_did_not_choose_them() -> None:
    given = make_vectors(801, seed=6)
    split = split_queries(make_table(make_vectors(50)), given, "text")
    parts = [{row.tobytes() for row in part} for part in (split.tuned.vectors, split.judged.vectors, split.learned)]
    assert [len(part) for part in parts] == [201, 200, 400]
    assert set().union(*parts) == {row.tobytes() for row in given}


def test_a_sampled_query_does_not_count_itself_as_found() -> None:
    table = make_table(make_vectors(50))
    ground_truth = find_ground_truth(table, sampled_queries(table))

    def only_itself(queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        scores, rows = brute_force(table, queries, 1)
        nothing = np.full((len(queries), k - 1), -1)
        return np.hstack([scores, np.full(nothing.shape, -np.inf, np.float32)]), np.hstack([rows, nothing])

    assert measure_recall(ground_truth, only_itself, table.take) == 0.0
    assert measure_recall(ground_truth, lambda queries, k: brute_force(table, queries, k), table.take) == 1.0


def test_half_of_the_neighbours_is_a_recall_of_one_half() -> None:
    table = make_table(make_vectors(500))
    ground_truth = find_ground_truth(table, RecallQueries(make_vectors(20, seed=9), "text"))

    def half(queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        scores, rows = brute_force(table, queries, 500)
        return tuple(np.hstack([each[:, :5], each[:, -5:]]) for each in (scores, rows))  # type: ignore[return-value]

    assert measure_recall(ground_truth, half, table.take) == 0.5


def test_any_of_equal_vectors_counts_as_found() -> None:
    """Forty copies of one image: which ten of them come back does not matter."""
    copies = np.repeat(make_vectors(1), 40, axis=0)
    table = make_table(np.vstack([copies, make_vectors(60, seed=3)]))
    ground_truth = find_ground_truth(table, RecallQueries(copies[:1], "text"), num_kept=10)

    def rows_from(start: int) -> float:
        answer = (np.ones((1, 10), np.float32), np.arange(start, start + 10)[None])
        return measure_recall(ground_truth, lambda _queries, _k: answer, table.take)

    assert (rows_from(30), rows_from(35)) == (1.0, 0.5)


@pytest.mark.parametrize(("rounded", "expected"), [(0.55, 0.9), (0.5, 1.0), (0.45, 0.9)])
def test_rounding_does_not_make_another_row_one_of_the_nearest(rounded: float, expected: float) -> None:
    """Row 10 was found in the place of row 9, whose rounded score is 0.5; as a twin of it, it would do."""
    scores = np.linspace(0.95, 0.5, 10, dtype=np.float32)
    query = RecallQueries(np.ones((1, 1), np.float32), "text")
    truth = GroundTruth(query, scores[None], np.arange(10)[None])
    found = np.array([[*range(9), 10]])
    vectors = np.append(scores, np.float32(rounded))[:, None]
    recall = measure_recall(
        truth, lambda queries, k: (vectors[found[:, :k], 0], found[:, :k]), lambda rows: vectors[rows]
    )
    assert recall == pytest.approx(expected)


@pytest.mark.parametrize("k", [1, 10, 70, 1000])
def test_brute_force_over_blocks_is_brute_force_over_the_whole(monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    """15 blocks of 64 rows and one of 40: more neighbours are wanted than one block has."""
    monkeypatch.setattr("index.vectors.BLOCK_ROWS", 64)
    table, queries = make_table(make_vectors(1000)), make_vectors(50, seed=4)
    assert len(list(table.blocks())) == 16
    assert (faiss_build.nearest_in_table(table, queries, k)[1] == brute_force(table, queries, k)[1]).all()


def test_an_exact_index_is_measured_too(build: Build) -> None:
    _, manifest = build(make_vectors(1000), queries=make_vectors(100, seed=4))
    assert (manifest.recall_at_10, manifest.image_recall_at_10, manifest.num_recall_queries) == (1.0, 1.0, 50)


def test_text_like_queries_are_as_hard_as_captions() -> None:
    """A list index finds images for images, and loses them for captions; made queries must show so."""
    images, captions = make_images_and_captions(6000, 400)
    made = text_like_queries(images[:400], captions[200:])
    assert np.linalg.norm(made, axis=1) == pytest.approx(1, abs=1e-6)
    index = faiss_build.build(parse_design("IVF64,Flat"), make_table(images))
    recalls = {}
    for name, queries in {"images": images[:200], "captions": captions[:200], "made": made[:200]}.items():
        index.nprobe = 4
        recalls[name] = share_found(index.search(queries, 10)[1], brute_force(make_table(images), queries, 10)[1])
    assert abs(recalls["made"] - recalls["captions"]) < 0.5 * (recalls["images"] - recalls["captions"])


def test_rounding_is_measured_by_the_order_that_it_leaves() -> None:
    vectors, queries = make_vectors(400, 32), make_vectors(50, 32, seed=1)
    table = make_table(vectors)
    ground_truth = find_ground_truth(table, RecallQueries(queries, "text"))
    kept = {}
    for code in ("SQfp16", "SQ8", "SQ4"):
        design = parse_design(f"IVF4,Flat,Refine({code})")
        rounding = faiss_build.train_reranking(design, table)
        kept[code] = measure_rounding(ground_truth, table, rounding)
        alike = np.argsort(-(queries @ rounding.sa_decode(rounding.sa_encode(vectors)).T), axis=1)[:, :10]
        assert kept[code] == pytest.approx(share_found(alike, brute_force(table, queries, 10)[1]), abs=0.01)
    assert 0.5 < kept["SQ4"] < kept["SQ8"] <= kept["SQfp16"]
    few = make_table(vectors[:3])  # whose vectors all are among the ten nearest
    assert measure_rounding(find_ground_truth(few, RecallQueries(queries, "text")), few, rounding) == 1.0
