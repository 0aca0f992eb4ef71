"""Rows in parts are the same rows, whether memory holds them or a file does."""

import random
import resource

import pyarrow as pa
import pytest

from embedder.errors import RunFailedError
from embedder.sources.listing import with_unique_ids
from embedder.storage.hashed_rows import NUM_PARTS, NUMBER, HashedRows, RowsInOrder, parts_of, read_parts

SCHEMA = pa.schema({"item_id": pa.string(), "size": pa.int64(), "kind": pa.dictionary(pa.int32(), pa.string())})


def rows(numbers):
    """Rows with ids of their numbers, and a dictionary of each table's own."""
    kinds = pa.array([f"kind {number % 3}" for number in numbers]).dictionary_encode()
    ids = pa.array([f"item {number}" for number in numbers], pa.string())
    return pa.table({"item_id": ids, "size": pa.array(numbers, pa.int64()), "kind": kinds}, SCHEMA)


def tables(num_rows, step=700):
    return [rows(range(start, min(start + step, num_rows))) for start in range(0, num_rows, step)]


@pytest.fixture(params=[1 << 30, 0], ids=["memory", "disk"])
def hashed(request):
    """Makes hashed rows of tables, in memory or on disk."""
    return lambda tables: HashedRows(tables, SCHEMA, memory_bytes=request.param)


def test_the_parts_together_are_all_rows_and_each_part_keeps_their_order(hashed):
    held = hashed(tables(5000))
    parts = [held.part(number, NUM_PARTS) for number in range(NUM_PARTS)]
    assert held.num_rows == 5000
    assert sum(part.num_rows for part in parts) == 5000
    assert all(part[NUMBER].to_pylist() == sorted(part[NUMBER].to_pylist()) for part in parts)
    found = pa.concat_tables([part.cast(parts[0].schema) for part in parts]).sort_by(NUMBER)
    assert found.drop_columns([NUMBER]).to_pylist() == pa.concat_tables(tables(5000)).to_pylist()


def test_equal_ids_lie_in_the_same_part_wherever_the_rows_lie():
    in_memory = HashedRows(tables(3000), SCHEMA, memory_bytes=1 << 30)
    on_disk = HashedRows(reversed(tables(3000, step=90)), SCHEMA, memory_bytes=0)
    parts = list(read_parts(in_memory, on_disk))
    assert len(parts) == NUM_PARTS
    assert all(len({frozenset(each["item_id"].to_pylist()) for each in together}) == 1 for together in parts)


def test_rows_that_fit_into_memory_stay_one_part_as_they_are(hashed):
    held = HashedRows(tables(3000), SCHEMA)
    ((own, nothing),) = read_parts(held, HashedRows([], SCHEMA))
    assert (held.num_parts, nothing.num_rows) == (1, 0)
    assert own.equals(pa.concat_tables(tables(3000)))
    assert hashed([]).part(7, NUM_PARTS).num_rows == 0


@pytest.mark.parametrize("memory_bytes", [0, 20_000, 1 << 30])
def test_what_is_chosen_of_all_parts_comes_back_in_the_order_of_the_whole(memory_bytes, monkeypatch):
    monkeypatch.setattr("embedder.storage.hashed_rows.ORDER_ROWS", 100)
    held = HashedRows(tables(5000), SCHEMA, memory_bytes=0)
    monkeypatch.setattr("embedder.storage.hashed_rows.MEMORY_BYTES", memory_bytes)
    chosen = RowsInOrder()
    for number in range(NUM_PARTS):
        part = held.part(number, NUM_PARTS)
        chosen.add(part.filter(pa.array([size % 3 == 0 for size in part["size"].to_pylist()], pa.bool_())))
    found = chosen.table()
    assert found.schema.names == SCHEMA.names
    assert found.to_pylist() == rows(range(0, 5000, 3)).to_pylist()


def test_nothing_chosen_has_the_columns_all_the_same(monkeypatch):
    monkeypatch.setattr("embedder.storage.hashed_rows.MEMORY_BYTES", 0)
    held, chosen = HashedRows(tables(500), SCHEMA), RowsInOrder()
    for number in range(NUM_PARTS):
        chosen.add(held.part(number, NUM_PARTS).slice(0, 0))
    assert (chosen.table().num_rows, chosen.table().schema.names) == (0, SCHEMA.names)


@pytest.mark.medium
def test_an_id_and_all_that_its_duplicates_may_be_named_are_in_one_part():
    ids = ["a", "a#duplicate-1", "a#duplicate-12", "a#duplicate-1#duplicate-3", "a#duplicate-x"]
    assert len(set(parts_of(pa.chunked_array([ids])))) == 1
    others = parts_of(pa.chunked_array([[f"{number:06d}" for number in range(20_000)]]))
    assert min(list(others).count(part) for part in range(NUM_PARTS)) > 30, "ids that count up are spread"


def test_repeated_ids_are_named_alike_in_one_part_and_in_many():
    choices = ["a", "b", "a#duplicate-1", "a#duplicate-2", "b#duplicate-1", "c"]
    chance = random.Random(5)
    columns = {"item_id": pa.array(chance.choices(choices, k=60), pa.string())}
    columns |= {name: pa.nulls(60, pa.string()) for name in ("error_type", "error")}
    listed = pa.table(columns | {"source": pa.array([""] * 60), "place": pa.array(range(60))})
    whole = with_unique_ids(listed)
    assert len(set(whole["item_id"].to_pylist())) == 60
    held, order = HashedRows([listed], listed.schema, memory_bytes=0), RowsInOrder()
    for number in range(NUM_PARTS):
        order.add(with_unique_ids(held.part(number, NUM_PARTS)))
    assert order.table().to_pylist() == whole.to_pylist()


def test_the_file_of_the_rows_has_no_name(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    held = HashedRows(tables(3000), SCHEMA, memory_bytes=0)
    assert list(tmp_path.iterdir()) == [], "a kill leaves nothing behind"
    assert held.part(3, NUM_PARTS).num_rows > 0


def test_a_full_disk_is_told_with_the_folder_and_the_cure(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(RunFailedError, match="TMPDIR") as refused:
            HashedRows(tables(20_000), SCHEMA, memory_bytes=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(tmp_path) in str(refused.value)
