"""Parquet files read by ranges: the same tables as Arrow's own reader makes, of the bytes that they need."""

from io import BytesIO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embedder.storage.parquet_ranges import read_parquet

NUM_ROWS = 5_000
TABLE = pa.table(
    {
        "item_id": [f"{n:06d}" for n in range(NUM_ROWS)],
        "kind": ["image", "caption"] * (NUM_ROWS // 2),
        "vector": pa.FixedSizeListArray.from_arrays(pa.array(range(4 * NUM_ROWS), pa.float32()), 4),
        "wide": [b"%0128d" % n for n in range(NUM_ROWS)],
    }
)


class CountedBytes:
    """Bytes in memory that note which ranges were asked for."""

    def __init__(self, content: bytes) -> None:
        self.content, self.size, self.asked = content, len(content), []

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        assert 0 <= offset <= self.size
        self.asked.append((offset, num_bytes))
        return self.content[offset : offset + num_bytes]


def written(table: pa.Table, **options) -> CountedBytes:
    sink = BytesIO()
    pq.write_table(table, sink, **options)
    return CountedBytes(sink.getvalue())


@pytest.mark.parametrize("columns", [None, ["vector"], ["kind", "item_id"], ["item_id", "missing"], []])
@pytest.mark.parametrize("options", [{"row_group_size": 700}, {"use_dictionary": False, "compression": "none"}])
def test_a_table_is_the_one_that_arrow_reads_itself(columns, options):
    ranges = written(TABLE, **options)
    expected = pq.ParquetFile(BytesIO(ranges.content)).read(columns)
    assert read_parquet(ranges, columns).equals(expected)


def test_only_the_footer_and_the_wanted_columns_are_fetched():
    ranges = written(TABLE)
    read_parquet(ranges, ["item_id", "vector"])
    footer = pq.ParquetFile(BytesIO(ranges.content)).metadata
    columns = [footer.row_group(0).column(number) for number in (0, 2)]
    assert [column.path_in_schema for column in columns] == ["item_id", "vector.list.element"]
    data_bytes = sum(column.total_compressed_size for column in columns)
    assert sum(num_bytes for _, num_bytes in ranges.asked) == 4 + footer.serialized_size + 8 + data_bytes


def test_neighbouring_columns_are_fetched_together():
    ranges = written(TABLE, row_group_size=700)
    read_parquet(ranges)
    assert len(ranges.asked) == 3, "the footer's length, the footer and all columns of all row groups"


def test_a_table_without_rows_keeps_its_columns():
    assert read_parquet(written(TABLE.slice(0, 0))).equals(TABLE.slice(0, 0))


@pytest.mark.parametrize("content", [b"", b"PAR1", b"no table at all", b"PAR1" + b"\xff" * 40 + b"PAR1"])
def test_what_is_no_parquet_file_is_an_error_of_arrow(content):
    with pytest.raises(pa.ArrowInvalid):
        read_parquet(CountedBytes(content))


def test_a_file_that_was_cut_or_damaged_is_an_error_of_arrow():
    whole = written(TABLE).content
    for content in (whole[: len(whole) // 2], whole[1000:], whole[:-400] + bytes(392) + whole[-8:]):
        with pytest.raises((pa.ArrowInvalid, OSError)):
            read_parquet(CountedBytes(content))
