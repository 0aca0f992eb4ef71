"""Lists of projected vectors: filled by distance, searched by product; also those of earlier releases."""

from pathlib import Path

import faiss
import numpy as np
import pytest
from index_samples import make_ids
from vector_shapes import make_shape

from index import faiss_build
from index.build import build_index
from index.design_trials import QueryDirections
from index.designs import Design, candidate_designs, parse_design
from index.index_errors import RetrievalError
from index.search import open_index
from index.update import update_index
from index.vectors import VectorTable

DESIGN = parse_design("LeanVec16,IVF128,SQ8,Refine(SQfp16)")


@pytest.fixture(scope="module")
def looks() -> tuple[np.ndarray, np.ndarray]:
    """Images whose look is four times as strong as what captions say, so that projections have any norm."""
    return make_shape("sharp look", 12_000, 1_500, 64, seed=3)


def _by_direction(table: VectorTable, projection: np.ndarray) -> faiss.Index:
    """Build the design as earlier releases did, by FAISS's own training and filling."""
    lists = faiss.index_factory(len(projection), DESIGN.factory, faiss.METRIC_INNER_PRODUCT)
    coder = faiss.index_factory(table.dim, DESIGN.rerank, faiss.METRIC_INNER_PRODUCT)
    index = faiss.IndexRefine(faiss.IndexPreTransform(faiss_build.linear(projection), lists), coder)
    vectors = table.take(np.arange(table.num_vectors))
    index.train(vectors)
    index.add(vectors)
    return index


def _centroids(index: faiss.Index) -> np.ndarray:
    quantizer = faiss.downcast_index(faiss_build.innermost(index).quantizer)
    assert quantizer.metric_type == faiss.METRIC_INNER_PRODUCT
    return quantizer.reconstruct_n(0, quantizer.ntotal)


def _lists_of(index: faiss.Index) -> np.ndarray:
    """Find the list of each row."""
    inverted = faiss_build.innermost(index).invlists
    found = np.full(index.ntotal, -1)
    for number in range(inverted.nlist):
        if inverted.list_size(number):
            found[faiss.rev_swig_ptr(inverted.get_ids(number), inverted.list_size(number))] = number
    return found


def _share_found(index: faiss.Index, queries: np.ndarray, exact: np.ndarray, nprobe: int) -> float:
    probes = faiss.SearchParametersPreTransform(index_params=faiss.SearchParametersIVF(nprobe=nprobe))
    found = index.search(queries, 10, params=faiss.IndexRefineSearchParameters(k_factor=4, base_index_params=probes))[1]
    return float(np.mean([np.isin(exact[row], found[row]).mean() for row in range(len(queries))]))


def test_lists_by_distance_find_more_in_two_thirds_of_the_lists(
    looks: tuple[np.ndarray, np.ndarray],
) -> None:
    images, captions = looks
    table, projection = VectorTable(*images.shape, images), QueryDirections(captions[:1000]).matrix(16)
    queries = np.ascontiguousarray(captions[1000:])
    exact = faiss.knn(queries, images, 10, metric=faiss.METRIC_INNER_PRODUCT)[1]
    by_direction = _by_direction(table, projection)
    ours = faiss_build.build(DESIGN, table, projection)
    assert _share_found(ours, queries, exact, 4) > _share_found(by_direction, queries, exact, 6)
    assert _share_found(ours, queries, exact, 8) > _share_found(by_direction, queries, exact, 8) + 0.05
    np.testing.assert_allclose(np.linalg.norm(_centroids(by_direction), axis=1), 1, atol=1e-5)


def test_each_row_is_in_the_list_of_the_nearest_centroid_also_after_an_update(
    looks: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    images, captions = looks
    model = {"model_fingerprint": "a model", "embeddings_version": 2}
    first, second = tmp_path / "000001", tmp_path / "000002"
    kind = str(DESIGN).replace("128", "64")
    build_index(images[:5000], make_ids(5000), first, kind=kind, queries=captions[:600], num_threads=1, **model)
    added = make_ids(5500).slice(5000)
    manifest = update_index(first, second, images[5000:5500], added, np.zeros(5000, bool), embeddings_version=3)
    assert manifest.recall_at_10 >= 0.95
    index = faiss.read_index(str(second / "index.faiss"))
    projection = faiss.downcast_VectorTransform(faiss.downcast_index(index.base_index).chain.at(0))
    nearest = faiss.knn(projection.apply(images[:5500]), _centroids(index), 1)[1][:, 0]
    assert np.mean(_lists_of(index) == nearest) > 0.999  # but for ties of the last bit
    assert open_index(second).search(images[5200:5201], 1, profile="image").rows[0, 0] == 5200


def test_an_index_of_an_earlier_release_is_filled_as_it_was(looks: tuple[np.ndarray, np.ndarray]) -> None:
    images, captions = looks
    table, projection = VectorTable(*images.shape, images), QueryDirections(captions[:1000]).matrix(16)
    before, extended = _by_direction(table, projection), _by_direction(table, projection)
    before.add(images[:500])
    faiss_build.add(extended, [images[:250], images[250:500]])
    assert np.mean(_lists_of(before) == _lists_of(extended)) > 0.999
    assert _centroids(before).tobytes() == _centroids(extended).tobytes()


def test_a_failed_training_leaves_the_searched_centroids_in_place() -> None:
    index = faiss.index_factory(8, "IVF16,SQ8", faiss.METRIC_INNER_PRODUCT)
    with pytest.raises(RuntimeError), faiss_build.by_distance(index):
        index.train(np.eye(8, dtype=np.float32))  # fewer vectors than lists
    assert faiss.downcast_index(index.quantizer).metric_type == faiss.METRIC_INNER_PRODUCT
    table = VectorTable(8, 8, np.eye(8, dtype=np.float32))
    with pytest.raises(RetrievalError, match="can't train it on 8 vectors"):
        faiss_build.build(parse_design("LeanVec4,IVF16,SQ8"), table, np.eye(4, 8, dtype=np.float32))


def test_wide_projections_are_also_tried_as_codes_of_four_bits(tmp_path: Path) -> None:
    fast = [design for design in candidate_designs(100_000, 128, (16, 64)) if design.has_fast_scan]
    assert Design("IVF256,PQ64x4fs", 64, "SQfp16") in fast
    assert not any(design.projection == 16 for design in fast)
    images, captions = make_shape("matryoshka", 4_000, 600, 96, seed=4)
    manifest = build_index(
        images, make_ids(4_000), tmp_path / "000001", kind="LeanVec48,IVF32,PQ48x4fs,Refine(SQfp16)",
        queries=captions, num_threads=1, model_fingerprint="a model", embeddings_version=2,
    )  # fmt: skip
    assert manifest.recall_at_10 >= 0.95
    found = open_index(tmp_path / "000001").search(captions[:50], 10, among=np.arange(4_000) % 3 == 0)
    passing = np.ascontiguousarray(images[::3])
    exact = faiss.knn(captions[:50], passing, 10, metric=faiss.METRIC_INNER_PRODUCT)[1] * 3
    assert np.mean([np.isin(exact[row], found.rows[row]).mean() for row in range(50)]) >= 0.93
