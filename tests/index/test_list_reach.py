"""Lists are read in the order of what their best vector may score, as queries show."""

from pathlib import Path

import faiss
import numpy as np
import pytest
from index_samples import make_ids
from vector_shapes import make_shape

from index import faiss_build
from index.build import build_index
from index.design_trials import QueryDirections
from index.designs import parse_design
from index.list_reach import NUM_CONSTANT, Projection, learn_reach, split_reach
from index.update import update_index
from index.vectors import VectorTable

DESIGN = parse_design("LeanVec48,IVF128,PQ48x4fsr,Refine(SQfp16)")


@pytest.fixture(scope="module")
def uneven() -> tuple[np.ndarray, np.ndarray]:
    """Images in clusters whose widths differ a hundredfold, and captions."""
    return make_shape("uneven clusters", 20_000, 1_500, 64, seed=5)


def _build(images: np.ndarray, learned: np.ndarray, *, with_reach: bool) -> faiss.Index:
    matrix = QueryDirections(learned).matrix(48)
    with faiss_build.threads(1):
        return faiss_build.build(
            DESIGN, VectorTable(*images.shape, images), Projection(matrix, learned if with_reach else learned[:0])
        )


def _share_found(index: faiss.Index, queries: np.ndarray, exact: np.ndarray, nprobe: int) -> float:
    probes = faiss.SearchParametersPreTransform(index_params=faiss.SearchParametersIVF(nprobe=nprobe))
    found = index.search(queries, 10, params=faiss.IndexRefineSearchParameters(k_factor=32, base_index_params=probes))
    return float(np.mean([np.isin(exact[row], found[1][row]).mean() for row in range(len(queries))]))


def test_a_wide_list_is_read_before_a_narrow_one_whose_centroid_is_a_little_nearer() -> None:
    rng = np.random.default_rng(0)
    centres = np.float32([[0.5, 0, 0], [0.45, 0, 0], [0, 0.5, 0], [0, 0, 0]])  # the last has no vector
    owners = np.repeat([0, 1, 2], 500)
    widths = np.float32([0.001, 0.2, 0.1])[owners, None]
    vectors = centres[owners] + widths * rng.standard_normal((1500, 3), np.float32)
    queries = np.float32([[1, 0, 0], [0.9, 0.1, 0], [0.9, 0, 0.1], [0, 1, 0]]).repeat(20, axis=0)
    reach = learn_reach(centres, owners, vectors, queries)
    assert reach.shape == (4,) and np.isfinite(reach).all()
    order = np.argsort(-(queries[:1] @ centres.T + reach)[0])
    assert order[0] == 1
    assert reach[0] < min(reach[1:3])


@pytest.mark.parametrize("num_vectors", [1, 3])
def test_lists_of_one_place_all_reach_as_far(num_vectors: int) -> None:
    vectors = np.ones((num_vectors, 4), np.float32)
    reach = learn_reach(vectors[:1].repeat(2, axis=0), np.zeros(num_vectors, np.int64), vectors, vectors)
    np.testing.assert_allclose(reach, 0, atol=1e-6)
    constant, levels = split_reach(reach)
    assert constant.shape == (2, NUM_CONSTANT) and not constant.any()
    np.testing.assert_array_equal(levels, 1)


def test_constant_numbers_and_the_levels_of_their_codes_add_up_to_the_same_for_all_lists() -> None:
    reach = np.random.default_rng(1).uniform(-0.1, 0.4, 300).astype(np.float32)
    constant, levels = split_reach(reach)
    error = constant.sum(axis=1) - (reach - reach.min())
    assert np.abs(error).max() <= 0.5 / (NUM_CONSTANT * 15) * np.ptp(reach) + 1e-6
    coded = levels[np.abs((1 - constant)[..., None] - levels).argmin(axis=-1)]
    np.testing.assert_allclose(constant.sum(axis=1) + coded.sum(axis=1), NUM_CONSTANT, atol=1e-6)


@pytest.mark.medium
def test_where_clusters_differ_in_width_half_of_the_lists_find_as_much(
    uneven: tuple[np.ndarray, np.ndarray],
) -> None:
    images, captions = uneven
    queries = np.ascontiguousarray(captions[1000:])
    exact = faiss.knn(queries, images, 10, metric=faiss.METRIC_INNER_PRODUCT)[1]
    reaching, plain = (_build(images, captions[:1000], with_reach=each) for each in (True, False))
    assert _share_found(reaching, queries, exact, 6) > _share_found(plain, queries, exact, 12) + 0.01


def test_scores_of_codes_are_those_without_reach_but_for_a_constant(uneven: tuple[np.ndarray, np.ndarray]) -> None:
    images, captions = uneven
    projection = Projection(QueryDirections(captions[:1000]).matrix(48), captions[:1000])
    index = _build(images, captions[:1000], with_reach=True)
    every = faiss.SearchParametersPreTransform(index_params=faiss.SearchParametersIVF(nprobe=128))
    scores, rows = index.base_index.search(captions[1000:1040], 500, params=every)
    true = np.einsum("qkw,qw->qk", projection.apply(images)[rows], projection.apply(captions[1000:1040]))
    apart = scores - NUM_CONSTANT - true
    assert abs(apart.mean()) < 0.02 and apart.std() < 0.03
    assert np.ptp(faiss_build.innermost(index).quantizer.reconstruct_n(0, 128)[:, 48:].sum(axis=1)) > 0.1


@pytest.mark.medium
def test_an_update_puts_rows_into_the_nearest_list_however_far_it_reaches(
    uneven: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    images, captions = uneven
    first, second = tmp_path / "000001", tmp_path / "000002"
    model = {"model_fingerprint": "a model", "embeddings_version": 2}
    build_index(images[:19_000], make_ids(19_000), first, kind=str(DESIGN), queries=captions, num_threads=1, **model)
    update_index(
        first, second, images[19_000:], make_ids(20_000).slice(19_000), np.zeros(19_000, bool), embeddings_version=3
    )
    index = faiss.read_index(str(second / "index.faiss"))
    lists = faiss_build.innermost(index)
    projected = faiss.downcast_VectorTransform(faiss.downcast_index(index.base_index).chain.at(0)).apply(images)
    assert (projected[:, 48:] == 1).all()
    centroids = lists.quantizer.reconstruct_n(0, lists.nlist)
    nearest = faiss.knn(np.ascontiguousarray(projected[:, :48]), np.ascontiguousarray(centroids[:, :48]), 1)[1][:, 0]
    owner = np.empty(20_000, np.int64)
    for number in range(lists.nlist):
        if size := lists.invlists.list_size(number):
            owner[faiss.rev_swig_ptr(lists.invlists.get_ids(number), size)] = number
    assert np.mean(owner == nearest) > 0.999  # but for ties of the last bit


@pytest.mark.medium
@pytest.mark.parametrize(
    "design", ["PCA32,IVF16,Flat", "PCAR16,IVF16,SQ8", "PCA16,IVF16,PQ16x4fsr", "OPQ32_32,IVF16,PQ32x4fsr"]
)
def test_lists_behind_a_transform_that_faiss_trains_are_filled(design: str) -> None:
    """The bias of PCA is no constant number of a projection, and levels are of what the transform makes."""
    images, _ = make_shape("sharp look", 4000, 10, 64, seed=3)
    with faiss_build.threads(1):
        index = faiss_build.build(parse_design(design), VectorTable(*images.shape, images), None)
    lists = faiss_build.innermost(index)
    sizes = [lists.invlists.list_size(number) for number in range(16)]
    assert min(sizes) > 0 and sum(sizes) == 4000, sizes
    probes = faiss.SearchParametersPreTransform(index_params=faiss.SearchParametersIVF(nprobe=4))
    nearest = np.argsort(-(images[:50] @ images.T), axis=1)[:, :10]
    found = index.search(images[:50], 10, params=faiss.IndexRefineSearchParameters(base_index_params=probes))[1]
    assert np.mean([np.isin(nearest[row], found[row]).mean() for row in range(50)]) > 0.4
