"""The state of a table, read from its log without deltalake: the same as deltalake's, or a reason."""

import json
from datetime import UTC, date, datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from embedder.store.files import StoreFiles
from embedder.store.tables.delta_state import LogError, read_state

EVERY_TYPE = pa.table(
    {
        "byte é": pa.array([1], pa.int8()),
        "short": pa.array([1], pa.int16()),
        "integer": pa.array([1], pa.int32()),
        "long": pa.array([1], pa.int64()),
        "float": pa.array([1.5], pa.float32()),
        "double": pa.array([1.5]),
        "boolean": pa.array([True]),
        "binary": pa.array([b"x"]),
        "string": pa.array(["x"]),
        "date": pa.array([date(2020, 1, 1)]),
        "time": pa.array([datetime(2020, 1, 1, tzinfo=UTC)], pa.timestamp("us", "UTC")),
        "local": pa.array([datetime(2020, 1, 1)], pa.timestamp("us")),
        "decimal": pa.array([Decimal("1.50")], pa.decimal128(20, 2)),
        "list": pa.array([[1.0, None]], pa.list_(pa.float32())),
        "struct": pa.array([{"x": 1, "y": ["a"]}], pa.struct({"x": pa.int64(), "y": pa.list_(pa.string())})),
        "map": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int32())),
    }
)


@pytest.fixture
def files(tmp_path):
    return StoreFiles(tmp_path / "store")


@pytest.fixture
def table(files):
    """A table of four versions: a file, another, the first one deleted, a checkpoint there, and a third."""
    path = files.uri("items")
    for number in range(2):
        write_deltalake(path, pa.table({"n": [number]}), mode="append")
    DeltaTable(path).delete("n = 0")
    DeltaTable(path).create_checkpoint()
    write_deltalake(path, pa.table({"n": [2]}), mode="append")
    return DeltaTable(path)


def as_deltalake_has_it(table: DeltaTable) -> set[tuple]:
    actions = pa.table(table.get_add_actions()).select(["path", "size_bytes", "num_records"])
    return {tuple(row.values()) for row in actions.to_pylist()}


def as_read(files, version=None) -> set[tuple]:
    state = read_state(files, "items", version)
    return {(path, add["size"], json.loads(add["stats"])["numRecords"]) for path, add in state.adds.items()}


def rewrite(files, number, change):
    path = f"items/_delta_log/{number:020d}.json"
    actions = [change(json.loads(line)) for line in files.read(path).decode().splitlines()]
    files.write(path, "\n".join(map(json.dumps, actions)).encode())


def test_columns_of_every_type_are_those_of_deltalake(files):
    fields = [*EVERY_TYPE.schema, pa.field("needed", pa.int64(), nullable=False, metadata={"key": "value"})]
    rows = EVERY_TYPE.append_column("needed", pa.array([1])).cast(pa.schema(fields))
    write_deltalake(files.uri("items"), rows)
    expected = pa.schema(DeltaTable(files.uri("items")).schema().to_arrow())
    assert read_state(files, "items").schema.equals(expected, check_metadata=True)


def test_each_version_has_the_files_that_deltalake_finds(files, table):
    for version in range(4):
        table.load_as_version(version)
        assert as_read(files, version) == as_deltalake_has_it(table), version
    assert read_state(files, "items").version == 3


def test_entries_before_the_checkpoint_may_be_gone(files, table):
    for number in range(3):
        files.delete(f"items/_delta_log/{number:020d}.json")
    assert as_read(files, 2) <= as_read(files) == as_deltalake_has_it(table)
    with pytest.raises(LogError, match="the log lacks entry 0"):
        read_state(files, "items", 1)


def test_what_precedes_the_last_checkpoint_is_not_listed_for_a_version_after_it(files, table, monkeypatch):
    found, listing = [], StoreFiles.list

    def noted(self, folder, after=None):
        for info in listing(self, folder, after):
            found.append(info.path.rpartition("/")[2])
            yield info

    monkeypatch.setattr(StoreFiles, "list", noted)
    assert as_read(files) == as_deltalake_has_it(table)
    assert min(found)[:20] == f"{2:020d}"
    read_state(files, "items", 1)
    assert f"{0:020d}.json" in found
    files.write("items/_delta_log/_last_checkpoint", b'{"version":9}')
    assert as_read(files) == as_deltalake_has_it(table), "a wrong hint costs a second listing"


def test_a_checkpoint_in_two_files_counts_when_both_are_there(files, table):
    import pyarrow.parquet as pq

    log = files.folder / "items/_delta_log"
    whole = log / f"{2:020d}.checkpoint.parquet"
    rows = pq.read_table(whole)
    halves = [log / f"{2:020d}.checkpoint.{part:010d}.{2:010d}.parquet" for part in (1, 2)]
    for path, piece in zip(halves, (rows[:2], rows[2:]), strict=True):
        pq.write_table(piece, path)
    whole.unlink()
    for number in range(3):
        files.delete(f"items/_delta_log/{number:020d}.json")
    assert as_read(files) == as_deltalake_has_it(table)
    halves[1].unlink()
    with pytest.raises(LogError, match="the log lacks entry 0"):
        read_state(files, "items")


def test_no_log_is_no_table_and_a_version_ahead_is_refused(files, table):
    assert read_state(files, "embeddings") is None
    with pytest.raises(LogError, match="the log lacks entry 4"):
        read_state(files, "items", 9)


@pytest.mark.parametrize(
    ("protocol", "reason"),
    [
        ({"minReaderVersion": 2, "minWriterVersion": 5}, "reader version 2"),
        ({"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": ["columnMapping"]}, "columnMapping"),
    ],
)
def test_what_the_stores_tables_do_not_use_is_refused(files, table, protocol, reason):
    rewrite(files, 3, lambda action: {"protocol": protocol} if "add" in action else action)
    with pytest.raises(LogError, match=f"another tool has given it {reason}"):
        read_state(files, "items")


@pytest.mark.parametrize("content", [b"{", b"3", b'{"add": {}}', b'{"metaData": {"schemaString": "{}"}}'])
def test_a_damaged_entry_is_refused(files, table, content):
    files.write(f"items/_delta_log/{3:020d}.json", content)
    with pytest.raises(LogError):
        read_state(files, "items")
