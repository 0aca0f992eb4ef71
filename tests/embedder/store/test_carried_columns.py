"""Carried columns: their values, their types, and runs with others."""

from datetime import UTC, datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from store_samples import begin, publish_rows, row, rows_of, table

from embedder.errors import ConfigError, StoreError
from embedder.store.files import StoreFiles
from embedder.store.journal.part_writer import write_part
from embedder.store.journal.runs import finished_items
from embedder.store.publish.publication import ModelWork
from embedder.store.publish.publish import publish
from embedder.store.schema import EMBEDDINGS, with_carryover
from embedder.store.tables.tables import RecordTable


@pytest.fixture
def files(tmp_path):
    return StoreFiles(tmp_path / "a store with ünicode")


def test_carried_columns_keep_their_values_in_types_that_delta_has(files):
    carryover = pa.schema({"error": pa.string(), "price": pa.uint32(), "tags": pa.large_list(pa.string())})
    run, metadata = begin(files, carryover)
    values = {
        "error": pa.array(["mine"]),
        "price": pa.array([4_000_000_000], pa.uint32()),
        "tags": pa.array([["a", "b"]], pa.large_list(pa.string())),
    }
    write_part(files, metadata, 0, table(row("a.jpg"), **values))
    publish([ModelWork(run, metadata)])
    (found,) = rows_of(files)
    assert (found["error"], found["price"], found["tags"]) == ("mine", 4_000_000_000, ["a", "b"])


def test_a_carried_column_that_delta_can_not_keep_is_named(files):
    _, metadata = begin(files, pa.schema({"length": pa.duration("s")}))
    with pytest.raises(ConfigError, match=r"'length'.*duration.*leave it out"):
        write_part(files, metadata, 0, table(row("a.jpg"), length=pa.array([1], pa.duration("s"))))


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (pa.array([1_234_567_891], pa.timestamp("ns")), datetime(1970, 1, 1, 0, 0, 1, 234567)),
        (pa.array([1_000_000], pa.timestamp("us", "Europe/Berlin")), datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)),
        (pa.array([[1_001]], pa.list_(pa.timestamp("ns"))), [datetime(1970, 1, 1, microsecond=1)]),
        (pa.array([{"at": 1_001}], pa.struct({"at": pa.timestamp("ns")})), {"at": datetime(1970, 1, 1, microsecond=1)}),
        (pa.array([Decimal("1.50")], pa.decimal256(38, 2)), Decimal("1.50")),
        (pa.array([Decimal("1.50")], pa.decimal32(5, 2)), Decimal("1.50")),
        (pa.array([{"n": None}], pa.struct({"n": pa.null()})), {"n": None}),
        (pa.array([{"n": 1.5}], pa.struct({"n": pa.float16()})), {"n": 1.5}),
        (pa.array([{"n": 2_000_000_000}], pa.struct({"n": pa.uint32()})), {"n": 2_000_000_000}),
        (pa.array([[{"n": 127}]], pa.list_(pa.struct({"n": pa.uint8()}))), [{"n": 127}]),
    ],
)
def test_values_of_types_that_delta_lacks_are_kept(files, given, kept):
    run, metadata = begin(files, pa.schema({"price": given.type}))
    write_part(files, metadata, 0, table(row("a.jpg"), price=given))
    publish([ModelWork(run, metadata)])
    (found,) = rows_of(files)
    assert found["price"] == kept


@pytest.mark.parametrize(("kind", "value"), [(pa.uint8(), 200), (pa.uint32(), 4_000_000_000), (pa.uint64(), 2**63)])
def test_an_unsigned_integer_of_a_struct_that_delta_can_not_keep_is_named_before_it_is_published(files, kind, value):
    given = pa.array([{"n": value}], pa.struct({"n": kind}))
    _, metadata = begin(files, pa.schema({"price": given.type}))
    with pytest.raises(ConfigError, match=rf"'price'.* {value} not in range.*cast it in the source"):
        write_part(files, metadata, 0, table(row("a.jpg"), price=given))


@pytest.mark.parametrize("kind", [pa.decimal256(50, 2), pa.struct({"at": pa.time64("us")})])
def test_further_types_that_delta_can_not_keep_are_named_before_the_work(kind):
    with pytest.raises(ConfigError, match="keeps no"):
        with_carryover(EMBEDDINGS, pa.schema({"price": kind}))


@pytest.mark.parametrize("names", [["Caption"], ["Price", "price"]])
def test_names_that_differ_in_their_case_alone_are_refused_before_the_work(names):
    with pytest.raises(ConfigError, match="has a column of that name"):
        with_carryover(EMBEDDINGS, pa.schema([(name, pa.string()) for name in names]))


def test_an_unfinished_run_with_other_carried_columns_is_not_continued(files):
    first, metadata = begin(files)
    write_part(files, metadata, 0, table(row("a.jpg")))
    second, _ = begin(files, pa.schema({"price": pa.float64()}))
    assert second.run_id > first.run_id
    assert finished_items(second).num_rows == 0


def test_a_table_refuses_other_carried_columns_and_names_them(files):
    publish_rows(files, row("a.jpg"))
    embeddings = RecordTable(files, "embeddings")
    embeddings.check_schema(with_carryover(EMBEDDINGS, pa.schema([])))
    with pytest.raises(StoreError, match="differ in price"):
        embeddings.check_schema(with_carryover(EMBEDDINGS, pa.schema({"price": pa.float64()})))
