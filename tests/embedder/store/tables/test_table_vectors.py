"""Vectors of a table: one matrix in the order of its rows, from files of this release and of earlier ones."""

import duckdb
import numpy as np
import polars
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from published_rows import delta_rows
from store_samples import begin, row, table
from store_states import new_store, state_now, vectors_now

from embedder.errors import StoreError
from embedder.storage.object_ranges import ObjectRanges
from embedder.storage.vector_pages import layout_options, read_vector_pages
from embedder.store.files import StoreFiles
from embedder.store.journal.part_writer import write_part
from embedder.store.layout import read_current
from embedder.store.maintenance.compact import compact
from embedder.store.publish.publication import ModelWork
from embedder.store.publish.publish import publish
from embedder.store.tables.tables import RecordTable

WIDTH = 48
COLUMNS = ("image_embedding", "text_embedding")


@pytest.fixture(autouse=True)
def _no_file_is_small(monkeypatch):
    monkeypatch.setattr("embedder.store.files.SMALL_BYTES", 0)


def earlier_layout(schema, vectors, _streams):
    """Options by which earlier releases wrote a part file."""
    return {"use_dictionary": [name for name in schema.names if name not in vectors]}


def write_store(files: StoreFiles, monkeypatch, num_earlier: int = 0, num_parts: int = 4) -> StoreFiles:
    """Publish part files with images, captions and both; the first ones as earlier releases wrote them."""
    rng = np.random.default_rng(0)
    run, metadata = begin(files)
    for task in range(num_parts):
        rows = []
        for number in range(60 if task != 2 else 5):
            image, text = (rng.standard_normal(WIDTH, np.float32).tolist() for _ in COLUMNS)
            kind = rng.integers(3) if task != 2 else 1
            rows.append(
                row(
                    f"{task}-{number:03d}",
                    modality="text" if kind == 1 else "image",
                    caption=None if kind == 0 else f"caption {number}",
                    image_embedding=None if kind == 1 else image,
                    text_embedding=None if kind == 0 else text,
                )
            )
        with monkeypatch.context() as patch:
            options = earlier_layout if task < num_earlier else layout_options
            patch.setattr("embedder.store.journal.part_writer.layout_options", options)
            write_part(files, metadata, task, table(*rows))
    publish([ModelWork(run, metadata)])
    return files


@pytest.fixture(params=[0, 2, 4], ids=["this release", "both", "earlier release"])
def files(request, tmp_path, monkeypatch):
    """A store of four part files, one with only captions."""
    return write_store(new_store(tmp_path / "store"), monkeypatch, request.param)


def expected(files: StoreFiles, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Vectors and the rows that have one, as deltalake reads them, in the order of the store's own rows."""
    there = delta_rows(files.folder / "embeddings")
    ids = RecordTable(files, "embeddings").read(["item_id"])["item_id"]
    values = there[column].take(pc.index_in(ids, value_set=there["item_id"]))
    present = values.is_valid().to_numpy()
    return np.array(values.drop_null().to_pylist(), np.float32), present


@pytest.mark.parametrize("column", COLUMNS)
def test_vectors_are_one_matrix_in_the_order_of_the_rows(files, column):
    values, present = expected(files, column)
    embeddings = RecordTable(files, "embeddings")
    found = embeddings.read_vectors(column)
    assert found.values.tobytes() == values.tobytes()
    assert found.values.shape == (present.sum(), WIDTH)
    assert found.present.tolist() == present.tolist()
    assert 0 < present.sum() < len(present) == 185
    blocks = list(embeddings.vector_blocks(column))
    assert [len(block.present) for block in blocks] == [60, 60, 5, 60]
    assert np.concatenate([block.values for block in blocks if len(block.values)]).tobytes() == values.tobytes()
    last = embeddings.read_vectors(column, embeddings.paths()[2:])
    assert last.values.tobytes() == values[-len(last.values) :].tobytes()
    assert last.present.tolist() == present[120:].tolist()


@pytest.mark.parametrize("column", COLUMNS)
def test_rows_with_a_vector_are_read_file_by_file(files, column):
    embeddings = RecordTable(files, "embeddings")
    read = [embeddings.read_with_vector(["item_id"], column, path) for path in embeddings.paths()]
    found = [chunk for rows in read for chunk in rows["item_id"].chunks]
    ids = embeddings.read(["item_id"])["item_id"]
    assert pa.chunked_array(found).to_pylist() == ids.filter(pa.array(expected(files, column)[1])).to_pylist()


def test_a_table_without_rows_or_the_column_has_no_vectors(files):
    for found in (
        RecordTable(files, "embeddings").read_vectors("image_embedding", []),
        RecordTable(files, "embeddings", -1).read_vectors("image_embedding"),
    ):
        assert (found.values.shape, found.present.shape) == ((0, 0), (0,))
    lacking = RecordTable(files, "items").read_vectors("image_embedding")
    assert (lacking.values.shape, lacking.present.tolist()) == ((0, 0), [False] * 185)


def test_other_programs_read_what_was_written(files):
    uri = str(files.folder / "embeddings")
    rows = {each["item_id"]: [each[column] for column in COLUMNS] for each in delta_rows(uri).to_pylist()}
    assert len(rows) == 185
    names = ("item_id", *COLUMNS)
    assert {key: [*vectors] for key, *vectors in polars.read_delta(uri).select(names).iter_rows()} == rows
    parts = [files.uri(f"embeddings/{path}") for path in RecordTable(files, "embeddings").paths()]
    found = duckdb.sql(f"SELECT {', '.join(names)} FROM read_parquet({parts})").fetchall()
    assert {key: [*vectors] for key, *vectors in found} == rows
    for column in COLUMNS:
        values, present = expected(files, column)
        ours = RecordTable(files, "embeddings").read()
        assert ours[column].is_valid().to_pylist() == present.tolist()
        assert np.array(ours[column].drop_null().to_pylist(), np.float32).tobytes() == values.tobytes()


def test_compacting_brings_files_of_earlier_releases_to_the_layout_and_changes_nothing(files):
    before, vectors = state_now(files), vectors_now(files)
    assert compact(files, min_saved=100, lay_out=False)[0] is None
    first, _ = compact(files, min_saved=1, lay_out=True)
    assert first is not None
    assert state_now(files) == before
    assert vectors_now(files) == vectors
    embeddings = RecordTable(files, "embeddings")
    assert all(embeddings.is_laid_out(path, COLUMNS) for path in embeddings.paths())
    assert compact(files, lay_out=True)[0] is None


def test_large_files_of_earlier_releases_are_brought_to_the_layout_each_by_itself(tmp_path, monkeypatch):
    files = write_store(new_store(tmp_path / "store"), monkeypatch, num_earlier=1, num_parts=2)
    monkeypatch.setattr("embedder.store.maintenance.compact.plan_groups", lambda parts, target: [])
    before, paths = state_now(files), RecordTable(files, "embeddings").paths()
    assert compact(files)[0] is None
    done, tables = compact(files, lay_out=True)
    assert done.kind == "compaction"
    assert [(each.table, each.num_files_before, each.num_files_after) for each in tables] == [
        ("items", 2, 2),
        ("embeddings", 2, 2),
    ]
    assert state_now(files) == before
    now = RecordTable(files, "embeddings", read_current(files).embeddings)
    assert len(set(now.paths()) & set(paths)) == 1, "the file of this release stays"
    assert all(now.is_laid_out(path, COLUMNS) for path in now.paths())
    assert compact(files, lay_out=True)[0] is None


def damaged(files: StoreFiles, change) -> StoreError:
    """Change a part file, and return the error of reading its vectors."""
    embeddings = RecordTable(files, "embeddings")
    path = embeddings.paths()[0]
    files.write(f"embeddings/{path}", change(files.read(f"embeddings/{path}")))
    with pytest.raises(StoreError, match=r"can't be read .*; restore the file") as caught:
        embeddings.read_vectors("image_embedding")
    assert files.uri(f"embeddings/{path}") in str(caught.value)
    with pytest.raises(StoreError, match="can't be read"):
        list(embeddings.vector_blocks("image_embedding"))
    return caught.value


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data.replace(b"image_embedding", b"imagf_embedding"),
        lambda data: data.replace(b"image_embedding", b"image\xffembedding"),
    ],
)
def test_a_damaged_file_is_named_with_the_cure(tmp_path, monkeypatch, change):
    damaged(write_store(new_store(tmp_path / "store"), monkeypatch), change)


def test_small_files_are_left_to_arrow_and_give_the_same(files, monkeypatch):
    values, present = expected(files, "image_embedding")
    monkeypatch.setattr("embedder.store.files.SMALL_BYTES", 1 << 30)
    monkeypatch.setattr("embedder.store.files.read_vector_pages", None)
    found = RecordTable(files, "embeddings").read_vectors("image_embedding")
    assert found.values.tobytes() == values.tobytes()
    assert found.present.tolist() == present.tolist()


def test_a_missing_file_is_named_with_the_cure(files):
    embeddings = RecordTable(files, "embeddings")
    files.delete(f"embeddings/{embeddings.paths()[1]}")
    with pytest.raises(StoreError, match=embeddings.paths()[1]):
        embeddings.read_vectors("text_embedding")


def test_a_file_with_fewer_rows_than_its_log_tells_is_an_error(tmp_path, monkeypatch):
    files = write_store(new_store(tmp_path / "store"), monkeypatch)
    other = files.read(f"embeddings/{RecordTable(files, 'embeddings').paths()[2]}")
    assert "0 vectors in 5 rows, and the log says" in str(damaged(files, lambda data: other))


def test_vectors_of_two_lengths_are_an_error_that_names_the_files(tmp_path):
    files = new_store(tmp_path / "store")
    run, metadata = begin(files)
    for task, width in enumerate((3, 4)):
        write_part(files, metadata, task, table(row(f"{task}", image_embedding=[1.0] * width)))
    publish([ModelWork(run, metadata)])
    embeddings = RecordTable(files, "embeddings")
    first, second = embeddings.paths()
    with pytest.raises(StoreError, match=rf"different lengths: 3 in embeddings/{first}, 4 in embeddings/{second}"):
        embeddings.read_vectors("image_embedding")


def test_a_log_that_does_not_count_nulls_costs_no_vector(files, monkeypatch):
    values, present = expected(files, "text_embedding")
    monkeypatch.setattr("embedder.store.part_file.PartFile.num_null", lambda self, column: None)
    found = RecordTable(files, "embeddings").read_vectors("text_embedding")
    assert found.values.tobytes() == values.tobytes()
    assert found.present.tolist() == present.tolist()


@pytest.mark.medium
def test_of_a_bucket_only_footers_and_vectors_are_fetched_and_checksums_compared(bucket, monkeypatch, tmp_path):
    files = write_store(new_store(f"{bucket}/store"), monkeypatch)
    on_disk = write_store(new_store(tmp_path / "store"), monkeypatch)
    monkeypatch.setattr("embedder.store.bucket_backend.TAIL_BYTES", 8)
    fetched, unpatched = [], ObjectRanges.read_at

    def read_at(self, offset, length):
        fetched.append(length)
        return unpatched(self, offset, length)

    monkeypatch.setattr(ObjectRanges, "read_at", read_at)
    found = RecordTable(files, "embeddings").read_vectors("text_embedding")
    values, present = expected(on_disk, "text_embedding")
    footers = [pq.ParquetFile(path).metadata for path in (on_disk.folder / "embeddings").glob("*.parquet")]
    chunk_bytes = [footer.row_group(0).column(8).total_compressed_size for footer in footers]
    assert sum(fetched) == sum(chunk_bytes) + sum(footer.serialized_size + 8 for footer in footers)
    assert found.values.tobytes() == values.tobytes()
    assert found.present.tolist() == present.tolist()
    blocks = RecordTable(files, "embeddings").vector_blocks("text_embedding")
    assert np.concatenate([block.values for block in blocks]).tobytes() == values.tobytes()
    path = f"embeddings/{RecordTable(files, 'embeddings').paths()[0]}"
    data = bytearray(files.read(path))
    with files.open(path) as file:
        first = read_vector_pages(file, "text_embedding", check_sums=True).values
    data[bytes(data).index(first.tobytes()) + 5] ^= 4
    files.write(path, bytes(data))
    with pytest.raises(StoreError, match="checksum"):
        RecordTable(files, "embeddings").read_vectors("text_embedding")
