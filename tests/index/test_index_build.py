"""A build: the inputs that it accepts, the files that it writes, and that they appear whole or not at all."""

import hashlib
import tracemalloc
from pathlib import Path

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from index_samples import DIM, Build, make_ids, make_vectors

from index import faiss_build
from index.index_errors import RetrievalError
from index.manifest import read_manifest
from index.search import open_index
from index.vectors import VectorTable

KINDS = ("flat", "hnsw", "ivf")


def test_the_folder_holds_its_files_and_a_true_manifest(build: Build) -> None:
    out, manifest = build()
    assert sorted(path.name for path in out.iterdir()) == ["ids.parquet", "index.faiss", "manifest.json", "queries.npz"]
    assert read_manifest(out) == manifest
    assert (manifest.kind, manifest.dim, manifest.num_vectors) == ("flat", DIM, 300)
    assert (manifest.embeddings_version, manifest.model_fingerprint) == (7, "model-a")
    files = {name: (out / name).read_bytes() for name in ("ids.parquet", "index.faiss", "queries.npz")}
    assert manifest.sha256 == {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    assert manifest.size_bytes == sum(map(len, files.values()))
    assert manifest.built_at.endswith("+00:00")
    assert pq.read_table(out / "ids.parquet").equals(make_ids(300))
    assert (manifest.num_rows, manifest.num_masked, manifest.design) == (300, 0, "Flat")
    assert manifest.memory_bytes == len(files["index.faiss"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_of_uneven_blocks_builds_the_same_file_as_one_array(build: Build, tmp_path: Path, kind: str) -> None:
    vectors = make_vectors(1000)
    blocks = [vectors[:1], vectors[1:1], vectors[1:700], vectors[700:]]
    whole, _ = build(vectors, kind=kind, out=tmp_path / "whole")
    streamed, _ = build(iter(blocks), ids=make_ids(1000), kind=kind, out=tmp_path / "streamed")
    assert (whole / "index.faiss").read_bytes() == (streamed / "index.faiss").read_bytes()
    assert not (streamed / "vectors.f32").exists()


def test_rows_that_are_views_in_fortran_order_are_indexed_as_they_read(build: Build) -> None:
    vectors = np.asfortranarray(make_vectors(300))
    out, _ = build(vectors)
    hits = open_index(out).search(vectors[:20], 1)
    assert hits.rows[:, 0].tolist() == list(range(20))


@pytest.mark.medium
def test_a_stream_is_never_held_in_whole(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy reports its arrays to tracemalloc; memory that FAISS holds itself is the index."""
    monkeypatch.setattr("index.vectors.BLOCK_ROWS", 1000)
    num_vectors, dim = 60_000, 64
    ids = make_ids(num_vectors)
    blocks = (make_vectors(1000, dim, seed=start) for start in range(0, num_vectors, 1000))
    tracemalloc.start()
    build(blocks, ids=ids, kind="flat")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < num_vectors * dim * 4 / 3


def test_lists_are_trained_on_a_sample(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("index.designs.MAX_TRAINING_VECTORS", 1248)
    taken = []
    take = VectorTable.take
    monkeypatch.setattr(VectorTable, "take", lambda self, rows: (taken.append(len(rows)), take(self, rows))[1])
    queries = make_vectors(5, seed=3)
    out, manifest = build(make_vectors(20_000), kind="ivf", queries=queries)
    assert manifest.design == "IVF312,Flat"
    assert 1248 in taken
    assert len(open_index(out)) == 20_000


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_vectors", [1, 2, 11])
def test_a_handful_of_vectors_makes_an_index_of_every_kind(build: Build, kind: str, num_vectors: int) -> None:
    vectors = make_vectors(num_vectors)
    out, manifest = build(vectors, kind=kind)
    hits = open_index(out).search(vectors, 5)
    assert hits.rows[:, 0].tolist() == list(range(num_vectors))
    assert manifest.recall_at_10 == 1.0


SEARCHED = ("IVF4_HNSW32,Flat", "RR8,Flat", "Pad32,IVF8,Flat")
DESIGNS_OF_FAISS = (*SEARCHED, "PQ8x4fs", "NSG16,Flat", "IDMap,Flat", "IVF8,RQ4x4", "HNSW32,PQ4")


@pytest.mark.parametrize("kind", DESIGNS_OF_FAISS)
def test_a_design_in_faiss_notation_is_searched_also_by_a_filter_or_refused_in_a_line(build: Build, kind: str) -> None:
    vectors, among = make_vectors(2000), np.arange(2000) % 2 == 0
    try:
        out, _ = build(vectors, kind=kind)
    except RetrievalError as error:
        assert f"index design {kind}" in str(error) and len(str(error).splitlines()) == 1
        assert kind not in SEARCHED
        return
    hits = open_index(out).search(vectors[:20], 10, among=among)
    assert among[hits.rows].all()
    assert hits.rows[::2, 0].tolist() == list(range(0, 20, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_an_index_are_counted_without_a_copy(
    build: Build, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("faiss.serialize_index", None)
    out, manifest = build(make_vectors(2000), kind=kind)
    assert manifest.memory_bytes == (out / "index.faiss").stat().st_size


@pytest.mark.parametrize("vectors", [np.empty((0, DIM), np.float32), [], [np.empty((0, DIM), np.float32)]])
def test_an_empty_table_is_refused(build: Build, vectors: object) -> None:
    with pytest.raises(RetrievalError, match="none to index"):
        build(vectors, ids=make_ids(0))


def spoil(row: int, value: float) -> np.ndarray:
    vectors = make_vectors(300)
    vectors[row, 3] = value
    return vectors


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        (spoil(217, np.nan), "row 217 has L2 norm nan; every value must be finite"),
        (spoil(217, np.inf), "row 217 has L2 norm inf; every value must be finite"),
        (spoil(217, 1e30), "row 217 has L2 norm inf; every value must be finite"),
        (spoil(217, 0.9), "row 217 has L2 norm 1.* it must be 1; divide"),
        (make_vectors(300) * np.float32(1.01), "row 0 has L2 norm 1.01; it must be 1"),
        (make_vectors(300) * np.float32(0), "row 0 has L2 norm 0; it must be 1"),
        (make_vectors(300).astype(np.float64), "found float64 of shape"),
        (make_vectors(300)[0], r"found float32 of shape \(16,\)"),
        (make_vectors(300)[:, :0], r"found float32 of shape \(300, 0\)"),
        ([make_vectors(150), make_vectors(150, DIM + 1)], "found 17 dimensions, and 16 are needed"),
        ([make_vectors(150), spoil(60, np.nan)[:150]], "row 210 has L2 norm nan"),
        (["nonsense"], "found str; give NumPy arrays"),
    ],
)
def test_bad_vectors_are_refused_by_row_and_leave_nothing(
    build: Build, tmp_path: Path, vectors: object, message: str
) -> None:
    with pytest.raises(RetrievalError, match=message):
        build(vectors, ids=make_ids(300))
    assert list((tmp_path / "index").iterdir()) == []


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (make_ids(299), "found 299 for 300 vectors"),
        (make_ids(301), "found 301 for 300 vectors"),
        (make_ids(300).drop_columns("segment"), "found item_id, run_id; segment must be among the columns"),
        (make_ids(300).set_column(0, "item_id", [["a", None, "b"] * 100]), "item_id is null 100 times"),
        (make_ids(300).set_column(1, "segment", [["one"] * 300]), "give item_id as a string"),
        (make_ids(300).set_column(1, "segment", [[2**40] * 300]), "give item_id as a string"),
    ],
)
def test_bad_ids_are_refused(build: Build, ids: pa.Table, message: str) -> None:
    with pytest.raises(RetrievalError, match=message):
        build(ids=ids)


def test_ids_of_other_string_and_integer_types_and_more_columns_are_taken(build: Build) -> None:
    given = make_ids(300)
    ids = pa.table(
        {
            "caption": ["x"] * 300,
            "segment": given["segment"].cast(pa.int64()),
            "item_id": given["item_id"].cast(pa.large_string()).dictionary_encode(),
        }
    )
    out, _ = build(ids=ids)
    assert open_index(out).ids.equals(given.set_column(2, "run_id", pa.nulls(300, pa.string())))


def test_a_version_is_never_written_twice(build: Build) -> None:
    out, _ = build()
    before = (out / "manifest.json").read_bytes()
    with pytest.raises(RetrievalError, match="exists already"):
        build(make_vectors(300, seed=1))
    assert (out / "manifest.json").read_bytes() == before


def test_an_unknown_kind_is_refused(build: Build) -> None:
    with pytest.raises(RetrievalError, match="kind 'annoy' is unknown; write auto, flat, hnsw or ivf"):
        build(kind="annoy")


@pytest.mark.parametrize(
    ("queries", "message"),
    [
        (make_vectors(5, DIM + 1), "queries: found 17 dimensions, and 16 are needed"),
        (make_vectors(5) * np.float32(3), "queries: row 0 has L2 norm 3"),
    ],
)
def test_bad_recall_queries_are_refused(build: Build, queries: np.ndarray, message: str) -> None:
    with pytest.raises(RetrievalError, match=message):
        build(queries=queries)


@pytest.mark.parametrize("num_vectors", [4, 4000])
def test_a_full_disk_is_an_error_of_the_disk_also_where_only_the_last_bytes_are_lost(num_vectors: int) -> None:
    index = faiss.IndexFlatIP(DIM)
    index.add(make_vectors(num_vectors))
    with pytest.raises(OSError, match="No space left"):
        faiss_build.write(index, Path("/dev/full"))


def test_bfloat16_rounded_unit_vectors_are_taken(build: Build) -> None:
    """Eight bits of precision leave norms within 2**-8 of 1."""
    rounded = (make_vectors(300).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    assert np.abs(np.linalg.norm(rounded, axis=1) - 1).max() > 1e-3
    build(rounded)
