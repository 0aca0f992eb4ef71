"""Columns of files in conditions: folder, name, type, time and size, made of ids and the items table."""

import pyarrow as pa
import pytest

from embedder.errors import ConfigError
from embedder.retrieval.filters import RowFilter

IDS = ["2024/01 a/x.JPG", "2024/b.png", "top.webm", "shop:sku 7", "2024/01 a/y.tar.gz"]
TIMES = ["2024-01-05T00:00:00.123456789Z|2026-01-01T00:00:00Z", "2025-01-01T00:00:00Z", "an etag", None, "@5ns"]


def items():
    return pa.table({"item_id": IDS[::-1], "modified": TIMES[::-1], "size_bytes": pa.array([5, 4, 3, None, 1])})


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ("folder = '2024/01 a'", [0, 4]),
        ("folder = '2024' OR starts_with(folder, '2024/')", [0, 1, 4]),
        ("folder = ''", [2, 3]),
        ("file_name = 'x.JPG'", [0]),
        ("file_type = 'jpg'", [0]),
        ("file_type IS NULL", [3]),
        ("file_date >= '2024-01-05' AND file_date < '2024-01-06'", [0]),
        ("file_date IS NULL", [2, 3, 4]),
        ("file_size > 3", [3, 4]),
        ('"FILE_SIZE" = 1', [0]),
    ],
)
def test_conditions_read_what_the_files_are(where, found):
    rows = RowFilter(pa.table({"item_id": IDS}), items)
    assert [n for n, is_one in enumerate(rows.matching(where)) if is_one] == found


def test_the_type_is_that_of_the_file_where_the_id_is_none_of_its_names():
    rows = {
        "1987.11.8": "/museum/scans/8.TIF",
        "sku.7": "https://x.org/a/b.webp?size=3.png#top",
        "0001": "s3://b/shard-0.tar#member=a%20b/0001.jpeg&offset=512&size=99",
        "c.jpg": "/t/pictures.parquet#column=photo&row_group=0&row=3",
        "2024/a.heic": "/archive/2024/a.heic",
        "9.5": None,
    }
    table = RowFilter(pa.table({"item_id": list(rows), "uri": list(rows.values())}))
    assert table.read(["file_type"])["file_type"].to_pylist() == ["tif", "webp", "jpeg", "jpg", "heic", "5"]


def test_the_items_table_is_read_for_its_columns_alone_and_once():
    reads = []
    rows = RowFilter(pa.table({"item_id": IDS}), lambda: reads.append(1) or items())
    rows.matching("folder = 'a'")
    assert not reads
    rows.matching("file_size = 1")
    rows.matching("file_date > '2024-01-01'")
    assert reads == [1]
    assert rows.read(["file_size"])["file_size"].to_pylist() == [1, None, 3, 4, 5]


def test_a_column_that_the_table_has_stays_its_own():
    rows = RowFilter(pa.table({"item_id": IDS, "Folder": ["mine"] * 5}))
    assert rows.matching("folder = 'mine'").all()
    assert "folder" not in rows.computed
    without = RowFilter(pa.table({"price": [1, 2]}))
    assert without.computed == []
    with pytest.raises(ConfigError, match="there is no column 'folder'"):
        without.matching("folder = 'a'")
