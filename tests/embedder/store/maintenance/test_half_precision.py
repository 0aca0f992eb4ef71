"""Vectors in half precision: rounded where a gate allows it, and nothing else of the store changes."""

import subprocess
import sys

import duckdb
import numpy as np
import polars
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from index_stores import indexed_run, unit
from store_samples import INFO, row
from store_states import new_store, rows_at, rows_now, vectors_now

from embedder.retrieval.store_api import open_store
from embedder.store.layout import STORE_FILE, StoreInfo, read_current, read_record
from embedder.store.maintenance.compact import compact
from embedder.store.maintenance.half_precision import (
    MAX_LOST_NEIGHBOURS,
    describe_saving,
    is_half_store,
    measure_loss,
)
from embedder.store.maintenance.purge.purge import purge
from embedder.store.maintenance.rollback import rollback
from embedder.store.tables.arrow_tensors import is_half, pack_vectors, round_vectors, unpack_vectors
from embedder.store.tables.tables import RecordTable

NUM, DIM = 600, 32
COLUMN = "image_embedding"


def item(number: int, night: int = 0, scale: float = 1.0) -> dict:
    vector = unit(np.random.default_rng([night, number]).standard_normal(DIM)) * np.float32(scale)
    caption = unit(vector + 0.3 * np.random.default_rng([9, number]).standard_normal(DIM) / DIM**0.5)
    own = {"image_embedding": vector.tolist(), "text_embedding": caption.tolist(), "caption": f"{number}"}
    return row(f"{number:04d}.jpg", modified=str(night), **own)


@pytest.fixture
def files(tmp_path):
    files = new_store(tmp_path / "store")
    indexed_run(files, *(item(number) for number in range(NUM)))
    return files


def rounded(vector) -> list[float]:
    return np.float16(vector).astype(np.float32).tolist()


def encodings(files) -> set[str]:
    table = RecordTable(files, "embeddings", read_current(files).embeddings)
    found = [pq.ParquetFile(files.folder / "embeddings" / path).metadata.row_group(0) for path in table.paths()]
    columns = [group.column(each) for group in found for each in range(group.num_columns)]
    return {kind for column in columns if column.path_in_schema.startswith(COLUMN) for kind in column.encodings}


def test_compaction_rounds_what_is_published_and_changes_nothing_else(files):
    before, index = rows_now(files), read_current(files).index
    compact(files, vectors="float16")
    after = rows_now(files)
    assert before.keys() == after.keys()
    for key, old in before.items():
        new = after[key]
        for name in ("image_embedding", "text_embedding"):
            assert new[name] == rounded(old[name])
        assert {name: new[name] for name in new if "_embedding" not in name} == {
            name: old[name] for name in old if "_embedding" not in name
        }
    assert "BYTE_STREAM_SPLIT" in encodings(files)
    assert read_current(files).index == index
    assert compact(files, lay_out=True, vectors="float16")[0] is None, "a second one finds nothing to do"


def test_later_runs_round_what_they_write_and_older_publications_keep_their_bits(files):
    from embedder.executors.job import is_half_store as as_runs_ask

    first, exact = read_current(files), vectors_now(files)
    compact(files, vectors="float16")
    assert as_runs_ask(files, INFO.model_fingerprint) and not as_runs_ask(files, "another model")
    assert {key[0]: each[COLUMN] for key, each in rows_at(files, first).items()} == exact
    rollback(files, first.run_id)
    assert vectors_now(files) == exact


def test_purge_and_changes_of_single_rows_keep_the_form(files):
    compact(files, vectors="float16")
    size = sum(part.size_bytes for part in RecordTable(files, "embeddings").parts())
    indexed_run(files, item(3, night=1))
    purge(files, ["0005.jpg"])
    assert "0005.jpg" not in vectors_now(files)
    assert vectors_now(files)["0007.jpg"] == rounded(item(7)[COLUMN])
    assert "BYTE_STREAM_SPLIT" in encodings(files)
    assert sum(part.size_bytes for part in RecordTable(files, "embeddings").parts()) < 1.2 * size


def test_search_finds_the_same_rows_by_nearly_the_same_scores(files):
    queries = np.stack([item(number)[COLUMN] for number in range(20)]).astype(np.float32)
    before = [[(hit.item_id, hit.score) for hit in hits] for hits in open_store(files.address).search(queries, 5)]
    compact(files, vectors="float16")
    after = [[(hit.item_id, hit.score) for hit in hits] for hits in open_store(files.address).search(queries, 5)]
    assert [[name for name, _ in hits] for hits in before] == [[name for name, _ in hits] for hits in after]
    assert np.allclose(
        [score for hits in before for _, score in hits], [score for hits in after for _, score in hits], atol=1e-3
    )


def test_vectors_that_rounding_would_mix_up_stay_as_they_are(tmp_path, caplog):
    files, rng = new_store(tmp_path / "store"), np.random.default_rng(0)
    base = rng.standard_normal(DIM)
    near = [unit(base + 1e-4 * rng.standard_normal(DIM)) for _ in range(NUM)]
    indexed_run(files, *(row(f"{place:04d}.jpg", image_embedding=each.tolist()) for place, each in enumerate(near)))
    loss = measure_loss(files, read_current(files))
    assert loss.lost_neighbours > MAX_LOST_NEIGHBOURS
    before = vectors_now(files)
    compact(files, vectors="float16")
    assert vectors_now(files) == before
    assert not is_half_store(files, INFO.model_fingerprint)
    assert "they stay in float32, as" in caplog.text and "of the ten nearest" in caplog.text


def test_float32_ends_the_rounding_of_new_vectors(files, caplog):
    compact(files, vectors="float16")
    before = vectors_now(files)
    compact(files, vectors="float32")
    assert not is_half_store(files, INFO.model_fingerprint)
    assert vectors_now(files) == before
    assert "those that were rounded stay so" in caplog.text
    assert read_record(files, STORE_FILE, StoreInfo).half_of is None


def test_the_saving_is_told_before_and_the_precision_after(files):
    assert 'float32, about 0.00 GB; `vectors = "float16"` would save' in describe_saving(files, read_current(files))
    compact(files, vectors="float16")
    assert describe_saving(files, read_current(files)) == "float16: rounded to half precision"


def test_a_column_beyond_the_range_of_half_precision_is_not_rounded():
    present = np.array([True, False, True])
    column = pack_vectors(np.array([[1.0, 2.0], [70_000.0, 0.1]], np.float32), present)
    assert round_vectors(column).equals(column)
    small = pack_vectors(np.array([[1 / 3, 1e-6], [0.1, -2.7]], np.float32), present)
    half = round_vectors(small)
    assert is_half(half) and not is_half(small)
    assert half.null_count == 1 and half.is_null().to_pylist() == [False, True, False]
    assert np.array_equal(unpack_vectors(half.drop_null()), np.float16(unpack_vectors(small.drop_null())))


def test_other_programs_read_the_rounded_table(files):
    compact(files, vectors="float16")
    wanted, folder = vectors_now(files), files.folder / "embeddings"
    paths = [str(folder / path) for path in RecordTable(files, "embeddings").paths()]
    by_duckdb = duckdb.sql(f"SELECT item_id, {COLUMN} FROM read_parquet({paths})").fetchall()
    by_polars = polars.read_delta(str(folder)).select("item_id", COLUMN).rows()
    frame = DeltaTable(folder).to_pandas(columns=["item_id", COLUMN])
    by_pandas = zip(frame["item_id"], (each.tolist() for each in frame[COLUMN]), strict=True)
    for found in (by_duckdb, by_polars, by_pandas):
        assert {name: list(vector) for name, vector in found} == wanted


def test_damaged_streams_are_an_error_or_the_right_vectors(files):
    compact(files, vectors="float16")
    (path,) = RecordTable(files, "embeddings").paths()
    file, rng = files.folder / "embeddings" / path, np.random.default_rng(0)
    whole = file.read_bytes()
    wanted = RecordTable(files, "embeddings").read_vectors(COLUMN).values.copy()
    chunk = pq.ParquetFile(file).metadata.row_group(0).column(7)
    assert chunk.path_in_schema.startswith(COLUMN)
    num_refused = 0
    for place in rng.integers(chunk.data_page_offset, chunk.data_page_offset + 600, 60):
        damaged = bytearray(whole)
        damaged[place] ^= int(rng.integers(1, 256))
        file.write_bytes(damaged)
        try:
            found = files.read_table(f"embeddings/{path}", [COLUMN])
        except (OSError, ValueError):
            num_refused += 1
            continue
        assert np.array_equal(unpack_vectors(found[COLUMN].combine_chunks()), wanted)
    assert num_refused > 30


def test_the_module_is_light():
    code = "import embedder.store.maintenance.half_precision, sys; print([m for m in ('torch', 'ray', 'faiss') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
