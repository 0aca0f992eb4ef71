from typing import get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embedder.batch_schema import CARRIED
from embedder.config_toml.run_sections import Columns, SourceConfig, SourceKind
from embedder.errors import SourceError
from embedder.sources.listing import LISTING_SCHEMA, list_sources, rechunk, reject_duplicates, with_unique_ids
from embedder.sources.listing_schema import Row, shown_modified, table_of_rows
from embedder.sources.selection import take_all
from embedder.sources.source_kinds import KINDS, detect_kind
from embedder.store.schema import EMBEDDINGS


def write_table(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def kind_of(path):
    return detect_kind(path, take_all(path))


def table_source(path, name=None, carryover=(), **columns):
    return SourceConfig(path=str(path), name=name, carryover=carryover, columns=Columns(**columns))


def test_several_sources_put_their_names_before_ids_and_share_carryover_columns(make_files, tmp_path):
    files = make_files({"a.jpg": b"A"})
    table = write_table(tmp_path / "t.parquet", sku=["a.jpg", "p2"], title=["one", "two"], price=[1.5, None])
    other = write_table(tmp_path / "u.parquet", id=[7], cap=["seven"], price=[7.0], stock=[3])
    sources = [
        SourceConfig(path=str(files), name="web"),
        table_source(table, "shop", ("price",), id="sku", caption="title"),
        table_source(other, "depot", ("stock", "price"), id="id", caption="cap"),
    ]
    (listing,) = list_sources(sources)
    assert listing.schema.names == [*LISTING_SCHEMA.names, CARRIED + "price", CARRIED + "stock"]
    rows = listing.select(["item_id", "source", "caption", CARRIED + "price", CARRIED + "stock"]).to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        ("web:a.jpg", "web", None, None, None),
        ("shop:a.jpg", "shop", "one", 1.5, None),
        ("shop:p2", "shop", "two", None, None),
        ("depot:7", "depot", "seven", 7.0, 3),
    ]


def test_one_name_with_two_types_is_refused(tmp_path):
    first = write_table(tmp_path / "a.parquet", id=["1"], cap=["x"], price=[1.5])
    second = write_table(tmp_path / "b.parquet", id=["1"], cap=["x"], price=["1.50"])
    sources = [table_source(path, path.stem, ("price",), id="id", caption="cap") for path in (first, second)]
    with pytest.raises(SourceError, match=r"b\.parquet: carryover 'price' is string, and double in .*a\.parquet"):
        list_sources(sources)


@pytest.mark.parametrize("name", EMBEDDINGS.names)
def test_carryover_cannot_take_the_name_of_an_embedding_column(tmp_path, name):
    path = write_table(tmp_path / "a.parquet", **{"id": ["1"], "cap": ["x"], name: ["y"]})
    with pytest.raises(SourceError, match=f"carryover '{name}' is already a column of the embeddings table; rename"):
        list_sources([table_source(path, None, (name,), id="id", caption="cap")])


def test_carryover_can_have_any_other_name_but_stands_once(tmp_path):
    names = ("pixels", "error", "source", "modified", "size_bytes")
    path = write_table(tmp_path / "a.parquet", id=["1"], cap=["x"], **{name: [f"my {name}"] for name in names})
    (listing,) = list_sources([table_source(path, None, names, id="id", caption="cap")])
    assert [listing[CARRIED + name].to_pylist() for name in names] == [[f"my {name}"] for name in names]
    assert listing["error"].to_pylist() == [None]
    with pytest.raises(SourceError, match="names a column twice"):
        list_sources([table_source(path, None, ("error", "error"), id="id", caption="cap")])


def test_duplicates_after_the_first_become_rejects_with_ids_of_their_own(list_items, tmp_path):
    path = write_table(tmp_path / "a.parquet", id=["x", "y", "x", "x"], cap=["first", "b", "second", "third"])
    rows = list_items(path, columns={"id": "id", "caption": "cap"})
    assert [(item, row["caption"], row["error_type"]) for item, row in rows.items()] == [
        ("x", "first", None),
        ("y", "b", None),
        ("x#duplicate-1", "second", "DuplicateId"),
        ("x#duplicate-2", "third", "DuplicateId"),
    ]
    assert rows["x#duplicate-1"]["error"] == "the id 'x' was listed before; ids must be unique in a source"


def test_a_duplicate_never_takes_an_id_that_an_item_has():
    table = table_of_rows([Row(item, "u", 1, "m") for item in ("x", "x#duplicate-1", "x", "x#duplicate-2")])
    ids = reject_duplicates(table, set())["item_id"].to_pylist()
    assert ids == ["x", "x#duplicate-1", "x#duplicate-2", "x#duplicate-2#duplicate-1"]


def test_duplicates_are_found_across_tables_of_one_source():
    seen: set[str] = set()
    first, second = (reject_duplicates(table_of_rows([Row("x", "u", 1, "m")]), seen) for _ in range(2))
    assert first["error_type"].to_pylist() == [None]
    assert second["item_id"].to_pylist() == ["x#duplicate-1"]


def test_ids_that_are_made_unique_later_are_those_of_the_listing(tmp_path):
    first = write_table(tmp_path / "t.parquet", id=["x", "y", "x", "x#duplicate-1"], cap=["a", "b", "c", "d"])
    second = write_table(tmp_path / "u.parquet", id=["x", "y", "y"], cap=["e", "f", "g"])
    for names in (("one", "two"), (None,)):
        tables = zip(names, (first, second), strict=False)
        sources = [table_source(path, name, id="id", caption="cap") for name, path in tables]
        at_once = pa.concat_tables(list_sources(sources, rows_per_chunk=2))
        later = with_unique_ids(pa.concat_tables(list_sources(sources, rows_per_chunk=2, unique=False)))
        assert later.to_pylist() == at_once.to_pylist()
        assert "DuplicateId" in later["error_type"].to_pylist()


def test_chunks_have_one_size_and_columns_in_one_piece():
    tables = [pa.table({"n": range(start, start + 7)}) for start in range(0, 70, 7)]
    chunks = list(rechunk(tables, 16))
    assert [chunk.num_rows for chunk in chunks] == [16, 16, 16, 16, 6]
    assert [value for chunk in chunks for value in chunk["n"].to_pylist()] == list(range(70))
    assert all(chunk["n"].num_chunks == 1 for chunk in chunks)


def test_mistakes_are_said_in_the_call_before_a_row_is_taken(make_files):
    root = make_files({"a.jpg": b"A"})
    with pytest.raises(SourceError, match="files have no columns to carry over"):
        list_sources([SourceConfig(path=str(root), carryover=("a",))])
    with pytest.raises(SourceError, match="columns = .* names columns of a table, and this is files"):
        list_sources([table_source(root, id="a")])


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (["a.tar", "b.tar"], "webdataset"),
        (["train/a.tar", "val/a.tar", ".DS_Store"], "webdataset"),
        (["a.tar.gz"], "webdataset"),
        (["a.tar", "b.jpg"], "files"),
        (["a.parquet", "sub/b.parquet", "_SUCCESS", ".a.crc"], "table"),
        (["a.csv", "b.jsonl"], "files"),
        (["00000.tar", "00000.parquet", "00000_stats.json", "00001.tar", "00001_stats.json"], "webdataset"),
        (["00000.tar", "00000.parquet", "00000.csv"], "files"),
        (["00000.parquet", "00000_stats.json"], "table"),
        (["00000_stats.json"], "files"),
        (["a.csv", "a.xmp"], "files"),
        (["a.parquet", "b.tar"], "files"),
        (["a.jpg", "captions.csv"], "files"),
        (["_delta_log/00000000000000000000.json", "part.parquet"], "table"),
        ([], "files"),
        ([".hidden"], "files"),
    ],
)
def test_the_kind_of_a_folder_is_detected_by_its_content(make_files, files, kind):
    root = make_files(dict.fromkeys(files, b""))
    assert kind_of(str(root)) == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.tar", "webdataset"), ("a.tgz", "webdataset"), ("a.CSV", "table"), ("a.ndjson", "table"), ("a.jpg", "files"),
     ("noext", "files"), ("a{1}.jpg", "files")],
)  # fmt: skip
def test_the_kind_of_a_file_is_detected_by_its_name(make_files, name, kind):
    assert kind_of(str(make_files({name: b""}) / name)) == kind


def test_the_kind_of_a_pattern_is_detected_by_its_suffix(tmp_path):
    assert kind_of(f"{tmp_path}/x-{{000..099}}.tar") == "webdataset"
    assert kind_of(f"{tmp_path}/*.parquet") == "table"
    with pytest.raises(SourceError, match="names no kind; set kind"):
        kind_of(f"{tmp_path}/*.jpg")


def test_every_kind_of_source_has_its_entry():
    assert set(KINDS) == set(get_args(SourceKind)) - {"auto"}


@pytest.mark.parametrize(
    ("modified", "shown"),
    [
        ("2026-11-28T00:36:01.123456789Z", "2026-11-28 00:36:01 UTC"),
        ("2026-11-28T00:36:01.1Z|2026-11-27T00:00:00.0Z", "2026-11-28 00:36:01 UTC, caption 2026-11-27 00:00:00 UTC"),
        ('"5d41402abc4b2a76"', '"5d41402abc4b2a76"'),
        ("2026-11-28T00:36:01.1Z|caption:c5c7eab78b9f1bfb", "2026-11-28 00:36:01 UTC"),  # of a table
        ("@5ns", "@5ns"),
        (None, None),
    ],
)
def test_times_are_shown_to_the_second(modified, shown):
    assert shown_modified(modified) == shown
