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
from index.designs import candidate_designs, parse_design
from index.index_errors import RetrievalError
from index.list_reach import Projection
from index.search import open_index
from index.update import update_index
from index.vectors import VectorTable

DESIGN = parse_design("LeanVec16,IVF128,SQ8,Refine(SQfp16)")


@pytest.fixture(scope="module")
def looks() -> tuple[np.ndarray, np.ndarray]:
    """Images whose look is four times as strong as what captions say, so that projections have any norm."""
    return make_shape("sharp look", 12_000, 1_500, 64, seed=3)


def _searched(looks: tuple[np.ndarray, np.ndarray]) -> tuple[VectorTable, np.ndarray, np.ndarray, np.ndarray]:
    """Return the table, what projects it to 16 numbers, and the other captions with the images nearest to each."""
    images, captions = looks
    queries = np.ascontiguousarray(captions[1000:])
    exact = faiss.knn(queries, images, 10, metric=faiss.METRIC_INNER_PRODUCT)[1]
    return VectorTable(*images.shape, images), QueryDirections(captions[:1000]).matrix(16), queries, exact


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


def _share_found(index: faiss.Index, queries: np.ndarray, exact: np.ndarray, nprobe: int, k_factor: float = 4) -> float:
    probes = faiss.SearchParametersPreTransform(index_params=faiss.SearchParametersIVF(nprobe=nprobe))
    found = index.search(
        queries, 10, params=faiss.IndexRefineSearchParameters(k_factor=k_factor, base_index_params=probes)
    )[1]
    return float(np.mean([np.isin(exact[row], found[row]).mean() for row in range(len(queries))]))


def test_lists_by_distance_find_more_in_two_thirds_of_the_lists(
    looks: tuple[np.ndarray, np.ndarray],
) -> None:
    table, projection, queries, exact = _searched(looks)
    by_direction = _by_direction(table, projection)
    ours = faiss_build.build(DESIGN, table, Projection(projection))
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
    projected = faiss.IndexPreTransform(faiss_build.linear(np.eye(8, dtype=np.float32)), index)
    with pytest.raises(RuntimeError), faiss_build.by_distance(projected):
        projected.train(np.eye(8, dtype=np.float32))  # fewer vectors than lists
    assert faiss.downcast_index(index.quantizer).metric_type == faiss.METRIC_INNER_PRODUCT
    table = VectorTable(8, 8, np.eye(8, dtype=np.float32))
    with pytest.raises(RetrievalError, match="can't train it on 8 vectors"):
        faiss_build.build(parse_design("LeanVec4,IVF16,SQ8"), table, Projection(np.eye(4, 8, dtype=np.float32)))


CODES = parse_design("LeanVec16,IVF64,PQ16x4fsr,Refine(SQ8)")
MODEL = {"model_fingerprint": "a model", "embeddings_version": 2}


@pytest.fixture
def exact_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small tables be tried as large ones are."""
    monkeypatch.setattr("index.constraints.DEFAULT_LATENCY_MS", 1e-6)
    monkeypatch.setattr("index.choose.NUM_TRIED", 3000)
    monkeypatch.setattr("index.choose.MIN_TRIED", 3000)


def _codes_of(index: faiss.Index) -> faiss.IndexIVFPQFastScan:
    found = faiss_build.innermost(index)
    assert isinstance(found, faiss.IndexIVFPQFastScan)
    return found


def _levels(index: faiss.Index) -> np.ndarray:
    pq = _codes_of(index).pq
    return faiss.vector_to_array(pq.centroids).reshape(pq.M, pq.ksub)


def test_projections_of_any_width_are_also_tried_in_four_bits_a_number() -> None:
    fast = {str(design) for design in candidate_designs(100_000, 128, (16, 64)) if design.projection}
    for width in (16, 64):
        assert {f"LeanVec{width},IVF256,PQ{width}x4fsr,Refine({code})" for code in ("SQfp16", "SQ8")} <= fast
    assert not any("fsr" in str(design) for design in candidate_designs(600, 128, (16, 64)))  # too few to train on


def test_levels_are_spaced_evenly_and_find_more_than_those_where_most_vectors_are(
    looks: tuple[np.ndarray, np.ndarray],
) -> None:
    table, projection, queries, exact = _searched(looks)
    with faiss_build.threads(1):
        ours, theirs = (faiss_build.build(CODES, table, Projection(projection)) for _ in range(2))
    steps = np.diff(_levels(ours), axis=1)
    assert (steps > 0).all()
    np.testing.assert_allclose(steps, steps.mean(axis=1, keepdims=True).repeat(15, axis=1), rtol=1e-3)
    lists = _codes_of(theirs)
    with faiss_build.threads(1), faiss_build.by_distance(theirs):
        projected = looks[0] @ projection.T
        nearest = lists.quantizer.search(projected, 1)[1][:, 0]
        residuals = projected - lists.quantizer.reconstruct_n(0, lists.nlist)[nearest]
        lists.reset()
        lists.train_encoder(len(residuals), faiss.swig_ptr(residuals), faiss.swig_ptr(nearest.copy()))
        lists.add(projected)
    assert not np.allclose(_levels(theirs), _levels(ours), atol=1e-3)
    found = [_share_found(index, queries, exact, 16, k_factor=2) for index in (ours, theirs)]
    assert found[0] > found[1] + 0.01


def test_what_is_no_file_s_is_set_again_when_an_index_is_read(
    looks: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    images, captions = looks
    table, projection = VectorTable(2000, 64, images[:2000]), QueryDirections(captions).matrix(16)
    path = tmp_path / "index.faiss"
    with faiss_build.threads(1):
        built, again = (faiss_build.build(CODES, table, Projection(projection)) for _ in range(2))
    faiss_build.write(built, path)
    with path.open("rb") as file:
        opened = [built, faiss_build.read(file), faiss_build.map_file(path)]
    assert len({_codes_of(index).implem for index in opened} - {0}) == 1
    assert faiss.serialize_index(again).tobytes() == faiss.serialize_index(built).tobytes()


@pytest.mark.medium
@pytest.mark.parametrize("shape", ["sharp look", "steep power law", "few directions"])
def test_codes_of_four_bits_are_chosen_saved_updated_and_filtered(
    exact_is_slow: None, tmp_path: Path, shape: str
) -> None:
    images, captions = make_shape(shape, 12_000, 1_600, 64, seed=3)
    queries, first, second = captions[1200:], tmp_path / "000001", tmp_path / "000002"
    manifest = build_index(images[:11_880], make_ids(11_880), first, queries=captions[:1200], num_threads=1, **MODEL)
    tried = {trial.design: trial for trial in manifest.trials}
    assert any("x4fsr" in design for design in tried)
    if "x4fsr" not in manifest.design:  # so small a table may be as fast otherwise
        width = QueryDirections(captions[:1200]).useful_widths()[0]
        kind = f"LeanVec{width},IVF64,PQ{width}x4fsr,Refine(SQfp16)"
        first = tmp_path / "named" / "000001"
        second = tmp_path / "named" / "000002"
        arguments = {"kind": kind, "queries": captions[:1200], "num_threads": 1, **MODEL}
        manifest = build_index(images[:11_880], make_ids(11_880), first, **arguments)
    assert manifest.recall_at_10 >= 0.95
    removed = np.arange(11_880) % 100 == 7
    added = make_ids(12_000).slice(11_880)
    update_index(first, second, images[11_880:], added, removed, embeddings_version=3)
    index = open_index(second)
    live = ~np.pad(removed, (0, 120))
    assert _found_of(index.search(queries, 10).rows, images, queries, live) >= 0.94
    third = np.arange(12_000) % 3 == 0
    found = index.search(queries, 10, among=third).rows
    assert third[found].all()
    assert _found_of(found, images, queries, live & third) >= 0.93
    deep = index.search(queries[:20], 1000).rows
    assert (np.sort(deep, axis=1)[:, 1:] != np.sort(deep, axis=1)[:, :-1]).all()
    alone = np.concatenate([index.search(query[None], 10).rows for query in queries[:40]])
    assert np.mean(alone == index.search(queries[:40], 10).rows) > 0.99


def _found_of(rows: np.ndarray, images: np.ndarray, queries: np.ndarray, may: np.ndarray) -> float:
    """Share of the ten nearest rows that may be found, by score."""
    scores = np.where(may, queries @ images.T, -np.inf)
    tenth = np.sort(scores, axis=1)[:, -10]
    assert may[rows].all()
    return float(np.mean(np.take_along_axis(scores, rows, axis=1) >= tenth[:, None] - 1e-6))


@pytest.mark.parametrize("kind", ["alike", "two places", "one direction"])
def test_a_table_without_any_spread_is_coded_in_four_bits_too(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(2)
    captions = make_shape("few directions", 10, 300, 32, seed=1)[1]
    images = np.zeros((1200, 32), np.float32)
    images[:, 0] = 1
    if kind == "two places":
        images[::2] = np.roll(images[::2], 1, axis=1)
    elif kind == "one direction":
        angle = rng.uniform(0, 0.1, len(images)).astype(np.float32)
        images[:, 0], images[:, 1] = np.cos(angle), np.sin(angle)
    manifest = build_index(
        images, make_ids(1200), tmp_path / "000001", kind="LeanVec24,IVF4,PQ24x4fsr", queries=captions, num_threads=1,
        **MODEL,
    )  # fmt: skip
    assert manifest.recall_at_10 >= 0.95
    rows = open_index(tmp_path / "000001").search(images[:3], 1200).rows
    assert (np.sort(rows, axis=1) == np.arange(1200)).all()


@pytest.mark.medium
def test_an_index_of_whole_codes_as_earlier_releases_chose_it_is_built_updated_and_filtered(tmp_path: Path) -> None:
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
