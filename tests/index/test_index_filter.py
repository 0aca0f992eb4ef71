"""Through a filter the k best of what passes come back, whenever k exist."""

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from index_samples import Build, exact_rows, index_builder, make_images_and_captions, make_vectors, share_found

from index.faiss_scan import RowScan
from index.index_errors import RetrievalError
from index.search import Index, open_index, widen_search_params
from index.selector import Selector

KINDS = ("flat", "hnsw", "ivf", "LeanVec16,HNSW32,Flat", "LeanVec16,IVF32,SQ8", "IVF64,RaBitQ")
NUM_IMAGES = 6000

OpenKind = Callable[[str], tuple[Index, np.ndarray, np.ndarray]]


@pytest.fixture(scope="module")
def open_of_kind(tmp_path_factory: pytest.TempPathFactory) -> OpenKind:
    """Open the index of a kind, with its vectors and queries; each kind is built once, as no test changes it."""

    @cache
    def open_kind(kind: str) -> tuple[Index, np.ndarray, np.ndarray]:
        images, captions = make_images_and_captions(NUM_IMAGES, 400)
        out, _ = index_builder(tmp_path_factory.mktemp("kind"))(images, kind=kind, queries=captions)
        return open_index(out), images, captions[::2]

    return open_kind


@pytest.mark.medium
@pytest.mark.parametrize("kind", KINDS)
def test_recall_holds_at_every_selectivity(open_of_kind: OpenKind, kind: str) -> None:
    index, images, queries = open_of_kind(kind)
    rng = np.random.default_rng(3)
    for share in (0.9, 0.5, 0.1, 0.01, 0.002):
        mask = rng.random(NUM_IMAGES) < share
        hits = index.search(queries, 10, among=mask)
        assert mask[hits.rows].all()
        assert share_found(hits.rows, exact_rows(queries, images, among=np.flatnonzero(mask))) >= 0.95, share


@pytest.mark.parametrize("kind", KINDS)
def test_a_filter_far_from_the_query_still_finds_what_passes(open_of_kind: OpenKind, kind: str) -> None:
    """The rows that pass are those that fit the queries least: a walk that starts near finds none of them."""
    index, images, queries = open_of_kind(kind)
    scores = (images @ queries.T).mean(axis=1)
    mask = scores < np.quantile(scores, 0.2)
    hits = index.search(queries, 10, among=mask)
    assert mask[hits.rows].all()
    assert share_found(hits.rows, exact_rows(queries, images, among=np.flatnonzero(mask))) >= 0.9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_passing", [0, 1, 9, 10, 11])
def test_as_many_come_back_as_there_are(open_of_kind: OpenKind, kind: str, num_passing: int) -> None:
    index, _, queries = open_of_kind(kind)
    mask = np.zeros(NUM_IMAGES, dtype=bool)
    mask[100 : 100 + num_passing] = True
    hits = index.search(queries[:3], 10, among=mask)
    assert hits.rows.shape == hits.scores.shape == (3, min(10, num_passing))
    assert (np.sort(hits.rows, axis=1)[:, :num_passing] < 100 + num_passing).all()


def test_a_mask_of_another_length_is_refused(build: Build) -> None:
    out, _ = build()
    with pytest.raises(RetrievalError, match=r"filter: found \(299,\) for an index of 300 rows"):
        open_index(out).search(make_vectors(1), among=np.ones(299, dtype=bool))


def test_search_parameters_grow_as_the_share_shrinks_and_reranking_stays() -> None:
    assert widen_search_params({"ef_search": 64, "k_factor": 4}, 0.5) == {"ef_search": 128, "k_factor": 4}
    assert widen_search_params({"nprobe": 3}, 0.9) == {"nprobe": 4}
    assert widen_search_params({}, 0.1) == {}


@pytest.mark.parametrize("kind", KINDS)
def test_images_are_found_by_images(open_of_kind: OpenKind, kind: str) -> None:
    """Images, which a projection made for texts can't find, are searched exactly."""
    index, images, _ = open_of_kind(kind)
    queries = images[::60]
    found = index.search(queries, 10, profile="image").rows
    assert share_found(found, exact_rows(queries, images)) >= 0.93
    assert index.manifest.image_recall_at_10 >= 0.95


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_come_back_as_they_went_in(open_of_kind: OpenKind, kind: str) -> None:
    index, images, _ = open_of_kind(kind)
    rows = np.array([5, 3, 5999])
    np.testing.assert_allclose(index.vectors(rows), images[rows], atol=4e-3)


@pytest.mark.parametrize(
    "kind", ["LeanVec16,HNSW32,Flat", "LeanVec16,IVF32,Flat", "LeanVec16,Flat", "HNSW32,Flat", "LeanVec16,IVF32,SQ8"]
)
def test_scoring_projections_of_what_passes_finds_the_best_and_gives_whole_cosines(
    open_of_kind: OpenKind, kind: str
) -> None:
    index, images, queries = open_of_kind(kind)
    mask = np.random.default_rng(3).random(NUM_IMAGES) < 0.3
    scores, rows = RowScan(index._index).find(queries, 10, Selector(mask))
    assert mask[rows].all()
    assert share_found(rows, exact_rows(queries, images, among=np.flatnonzero(mask))) >= 0.95
    np.testing.assert_allclose(scores, np.einsum("qe,qke->qk", queries, images[rows]), atol=2e-3)
    assert (np.diff(scores, axis=1) <= 0).all()
