import json
import os

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embedder.errors import SourceError
from embedder.sources.fetch import Fetcher, FetchError

PNG = b"\x89PNG..."


def column(rows, name):
    return [row[name] for row in rows.values()]


def test_bytes_become_cells_that_count_within_their_row_group(tmp_path, list_items):
    path = tmp_path / "t.parquet"
    table = pa.table({"sku": [f"s{n}" for n in range(5)], "photo": [b"%d" % n for n in range(5)], "t": list("abcde")})
    pq.write_table(table, path, row_group_size=2)
    rows = list_items(path, columns={"id": "sku", "image": "photo", "caption": "t"})
    assert column(rows, "uri") == [f"{path}#column=photo&row_group={n // 2}&row={n % 2}" for n in range(5)]
    assert column(rows, "caption") == list("abcde")
    assert column(rows, "size_bytes") == [None] * 5
    with Fetcher() as fetcher:
        assert [fetcher.fetch(uri, max_bytes=9).data for uri in column(rows, "uri")] == [b"0", b"1", b"2", b"3", b"4"]


def test_bytes_of_images_are_not_read_at_listing(tmp_path, list_items):
    path = tmp_path / "t.parquet"
    table = pa.table({"id": ["a", "b"], "image": [os.urandom(500_000)] * 2})
    pq.write_table(table, path, compression="none", use_dictionary=False)
    chunk = pq.ParquetFile(path).metadata.row_group(0).column(1)
    data = bytearray(path.read_bytes())
    middle = chunk.data_page_offset
    data[middle : middle + 100] = b"\xff" * 100  # the page header: reading it would fail
    path.write_bytes(data)
    rows = list_items(path, columns={"id": "id", "image": "image"})
    assert list(rows) == ["a", "b"]
    with pytest.raises(Exception, match="TableBroken"), Fetcher() as fetcher:
        fetcher.fetch(rows["a"]["uri"], max_bytes=10**9)


def test_structs_of_bytes_and_path_as_hugging_face_writes_them(tmp_path, list_items, make_files):
    path = tmp_path / "t.parquet"
    (tmp_path / "pics").mkdir()
    (tmp_path / "pics" / "b.png").write_bytes(b"beside")
    images = [
        {"bytes": PNG, "path": "a.png"},
        {"bytes": None, "path": "pics/b.png"},
        None,
        {"bytes": None, "path": None},
        {"bytes": None, "path": f"file://{tmp_path}/pics/b.png"},
    ]
    pq.write_table(pa.table({"id": [1, 2, 3, 4, 5], "image": images}), path)
    rows = list_items(path, columns={"id": "id", "image": "image"})
    assert list(rows) == ["1", "2", "3", "4", "5"]
    with Fetcher() as fetcher:
        fetched = [fetcher.fetch(uri, max_bytes=100) for uri in column(rows, "uri")]
    assert fetched[0].data == PNG
    assert fetched[1].path == fetched[4].path == tmp_path / "pics" / "b.png"
    assert [item.is_null for item in fetched] == [False, False, True, True, False]


@pytest.mark.parametrize("ids", ["id", "content"])
def test_a_struct_whose_path_can_be_none_costs_its_row_alone(tmp_path, list_items, ids):
    images = [{"bytes": PNG, "path": None}, {"bytes": None, "path": "a\0b.png"}]
    pq.write_table(pa.table({"id": ["a", "b"], "image": images}), tmp_path / "t.parquet")
    rows = list_items(tmp_path / "t.parquet", columns={"id": ids, "image": "image"})
    _, broken = rows.values()
    if ids == "content":
        assert broken["error_type"] == "BadUri"
        return
    with pytest.raises(FetchError, match="BadUri"), Fetcher() as fetcher:
        fetcher.fetch(broken["uri"], max_bytes=100)


@pytest.mark.parametrize(
    "kind", [pa.binary(), pa.large_binary(), pa.binary_view(), pa.dictionary(pa.int32(), pa.binary())]
)
def test_all_kinds_of_bytes_columns(tmp_path, list_items, kind):
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"id": ["a"], "image": pa.array([PNG], kind)}), path)
    rows = list_items(path, columns={"id": "id", "image": "image"})
    with Fetcher() as fetcher:
        assert fetcher.fetch(rows["a"]["uri"], max_bytes=100).data == PNG


def test_string_columns_are_uris_relative_to_the_table(tmp_path, list_items, make_files):
    root = make_files({"sub dir/a#1.jpg": b"12345", "b.jpg": b"1"})
    (tmp_path / "c.jpg").write_bytes(b"123")
    uris = ["sub dir/a#1.jpg", f"{root}/b.jpg", "../c.jpg", "s3://team/d.jpg", f"file://{root}/b.jpg", "missing.jpg"]
    uris.append("file://b.jpg")  # two slashes too few
    pq.write_table(pa.table({"photo": uris}), root / "t.parquet")
    rows = list_items(root / "t.parquet", columns={"image": "photo"})
    assert list(rows) == uris  # the URI as given is the id
    assert column(rows, "uri") == [
        f"{root}/sub dir/a#1.jpg", f"{root}/b.jpg", f"{root}/../c.jpg", "s3://team/d.jpg", f"{root}/b.jpg",
        f"{root}/missing.jpg", f"{root}/b.jpg",
    ]  # fmt: skip
    assert column(rows, "size_bytes") == [5, 1, 3, None, 1, None, 1]
    assert column(rows, "error_type") == [None] * 7
    assert rows["missing.jpg"]["modified"] == "missing"


@pytest.mark.parametrize("uri", ["http://KEY:SECRET@h/a.jpg", "http://h:x/a.jpg", "ftp://h/a", "a\0b.jpg"])
def test_uris_that_are_not_served_are_rejects_of_their_rows(tmp_path, list_items, uri):
    pq.write_table(pa.table({"id": ["x", "y"], "photo": [uri, "ok.jpg"]}), tmp_path / "t.parquet")
    rows = list_items(tmp_path / "t.parquet", columns={"id": "id", "image": "photo"})
    assert column(rows, "error_type") == ["UnsupportedUri", None]
    assert "az://, without credentials; download others first" in rows["x"]["error"]
    assert "SECRET" not in repr(rows["x"])


def test_addresses_of_the_web_are_listed_without_a_request_and_compared_by_their_row(tmp_path, list_items):
    path = tmp_path / "t.csv"
    signed = "https://h.example/a.png?X-Amz-Date={}&X-Amz-Signature=SECRET"
    columns = {"image": "photo", "caption": "cap"}

    def listed(day, caption):
        path.write_text(f"photo,cap,price\n{signed.format(day)},{caption},1\nHTTP://h.example/b.png?id=5#x,same,2\n")
        return list_items(path, columns=columns, carryover=("price",))

    first, again, captioned = listed(1, "one"), listed(1, "one"), listed(1, "two")
    names = ["https://h.example/a.png", "HTTP://h.example/b.png?id=5#x"]
    assert list(first) == list(listed(2, "one")) == names  # signed again, it is the same item
    assert column(first, "uri") == [signed.format(1), names[1]]
    assert column(first, "error_type") == [None, None]
    assert column(first, "modified") == column(again, "modified")  # though the file is another
    assert [a != b for a, b in zip(column(first, "modified"), column(captioned, "modified"), strict=True)] == [1, 0]


def test_null_ids_null_images_and_blank_captions(tmp_path, list_items):
    table = pa.table(
        {
            "id": ["a", None, "c", "d", ""],
            "photo": ["a.jpg", "b.jpg", None, None, None],
            "cap": ["cap", "cap", "only a caption", " \n", "cap"],
        }
    )
    path = tmp_path / "t.parquet"
    pq.write_table(table, path)
    rows = list_items(path, columns={"id": "id", "image": "photo", "caption": "cap"})
    assert [(item, row["error_type"], row["caption"]) for item, row in rows.items()] == [
        ("a", None, "cap"),
        ("t.parquet#row=1", "NullId", "cap"),
        ("c", None, "only a caption"),
        ("d", "Empty", None),
        ("t.parquet#row=4", "NullId", "cap"),
    ]
    assert rows["c"]["uri"] == f"{path}#row=2"
    with Fetcher() as fetcher:
        assert fetcher.fetch(rows["c"]["uri"], max_bytes=0).is_null


def test_a_changed_caption_is_a_change_and_an_untouched_row_is_none(tmp_path, list_items):
    (tmp_path / "a.jpg").write_bytes(b"A")
    path = tmp_path / "t.parquet"
    columns = {"id": "id", "image": "photo", "caption": "cap"}

    def listed(caption):
        pq.write_table(pa.table({"id": ["a", "b"], "photo": ["a.jpg", None], "cap": [caption, "same"]}), path)
        return list_items(path, columns=columns)

    before, after = listed("one"), listed("two")
    assert before["a"]["modified"] != after["a"]["modified"]
    assert before["b"]["modified"] == after["b"]["modified"]


@pytest.mark.parametrize(
    "kind", [pa.int8(), pa.uint64(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
)
def test_ids_may_be_integers_or_strings_of_any_kind(tmp_path, list_items, kind):
    ids = pa.array([1, 2], kind) if pa.types.is_integer(kind) else pa.array(["1", "2"], kind)
    pq.write_table(pa.table({"id": ids, "cap": ["x", "y"]}), tmp_path / "t.parquet")
    assert list(list_items(tmp_path / "t.parquet", columns={"id": "id", "caption": "cap"})) == ["1", "2"]


@pytest.mark.parametrize(
    ("columns", "carryover", "message"),
    [
        ({"id": "sku", "image": "foto"}, (), r"no column 'foto' \(did you mean 'photo'\?\); it has the columns sku"),
        ({"id": "sku", "caption": "cap"}, ("prise",), r"no column 'prise' \(did you mean 'price'\?\)"),
        ({"image": "photo"}, (), r"set columns.id: content hashes .*without repetition \(sku, cap\); this looks right"),
        ({"caption": "cap"}, (), "nothing gives stable ids"),
        ({"id": "sku"}, (), "a table needs columns.image or columns.caption"),
        ({"id": "price", "caption": "cap"}, (), 'columns.id = "price" is double; ids must be strings or integers'),
        ({"id": "sku", "caption": "price"}, (), 'columns.caption = "price" is double; it must be strings, lists'),
        ({"id": "sku", "image": "price"}, (), 'columns.image = "price" is double; it must be bytes'),
        ({"id": "sku", "image": "tags"}, (), 'columns.image = "tags" is list.*one of them in each row'),
    ],
)  # fmt: skip
def test_wrong_columns_are_named_with_the_cure(tmp_path, list_items, columns, carryover, message):
    table = pa.table({"sku": ["a"], "photo": [PNG], "cap": ["c"], "price": [1.0], "tags": [["t"]]})
    pq.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(SourceError, match=message):
        list_items(tmp_path / "t.parquet", columns=columns, carryover=carryover)


@pytest.mark.parametrize(("columns", "carryover"), [({"id": "id", "caption": "cap"}, ()), ({"id": "id"}, ("cap",))])
def test_a_name_that_two_columns_have_is_refused(tmp_path, list_items, columns, carryover):
    table = pa.Table.from_arrays([pa.array(["a"])] * 4, ["id", "cap", "cap", "photo"])
    pq.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(SourceError, match=r"t\.parquet: \S+: two columns are named 'cap'; rename one"):
        list_items(tmp_path / "t.parquet", columns={"image": "photo"} | columns, carryover=carryover)
    assert list(list_items(tmp_path / "t.parquet", columns={"id": "id", "image": "photo"})) == ["a"]
    with pytest.raises(SourceError, match="a table needs columns.image or columns.caption"):
        list_items(tmp_path / "t.parquet")


def test_carryover_columns_keep_values_and_types(tmp_path, list_items):
    from embedder.batch_schema import CARRIED
    from embedder.config_toml.run_sections import Columns, SourceConfig
    from embedder.sources.listing import list_sources

    table = pa.table(
        {
            "id": [1, 2],
            "cap": ["x", "y"],
            "tags": [["a", "b"], None],
            "when": pa.array([0, 1], pa.timestamp("us", "UTC")),
            "group": pa.array(["g", "h"]).dictionary_encode(),
        }
    )
    pq.write_table(table, tmp_path / "t.parquet")
    source = SourceConfig(
        path=str(tmp_path / "t.parquet"),
        columns=Columns(id="id", caption="cap"),
        carryover=("tags", "when", "group", "id", "cap"),
    )
    (listing,) = list_sources([source])
    listing = listing.rename_columns([name.removeprefix(CARRIED) for name in listing.schema.names])
    assert [str(listing.schema.field(name).type) for name in source.carryover] == [
        "list<element: string>", "timestamp[us, tz=UTC]", "string", "int64", "string",
    ]  # fmt: skip
    for name in source.carryover:
        assert listing[name].to_pylist() == table[name].to_pylist()
    assert listing["item_id"].to_pylist() == ["1", "2"]


def test_a_folder_of_parquet_files_is_read_in_order_and_must_agree(tmp_path, list_items):
    folder = tmp_path / "parts"
    (folder / "sub").mkdir(parents=True)
    for name, item in (("b.parquet", "2"), ("a.parquet", "1"), ("sub/c.parquet", "3")):
        pq.write_table(pa.table({"id": [item], "cap": ["x"]}), folder / name)
    (folder / "_SUCCESS").touch()
    columns = {"id": "id", "caption": "cap"}
    assert list(list_items(folder, columns=columns)) == ["1", "2", "3"]
    assert list(list_items(f"{folder}/*.parquet", columns=columns)) == ["1", "2"]
    assert list(list_items(f"{folder}/**/*.parquet", columns=columns)) == ["1", "2", "3"]
    assert list(list_items(f"{folder}/{{b,a}}.parquet", columns=columns)) == ["2", "1"]
    pq.write_table(pa.table({"id": ["4"]}), folder / "b.parquet")
    with pytest.raises(SourceError, match=r"parts/b\.parquet: column 'cap' is missing, which the first file has"):
        list_items(folder, columns=columns)
    (folder / "b.parquet").rename(folder / "b.csv")
    with pytest.raises(SourceError, match=r"mixes \.csv and \.parquet files; name one format by a pattern"):
        list_items(folder, columns=columns, kind="table")


@pytest.mark.parametrize("damage", [b"", b"not parquet at all", None])
def test_a_corrupt_parquet_file_among_many_is_named(tmp_path, list_items, damage):
    folder = tmp_path / "parts"
    folder.mkdir()
    for name in "abc":
        pq.write_table(pa.table({"id": [name], "cap": ["x" * 1000]}), folder / f"{name}.parquet")
    bad = folder / "b.parquet"
    bad.write_bytes(bad.read_bytes()[:-20] if damage is None else damage)
    with pytest.raises(
        SourceError, match=r"parts/b\.parquet: not readable as a Parquet file .*; repair it, or take it out"
    ):
        list_items(folder, columns={"id": "id", "caption": "cap"})


def test_csv_keeps_ids_and_captions_as_text_and_types_its_carryover(tmp_path, list_items):
    path = tmp_path / "t.csv"
    path.write_text(
        '\ufeffid,cap,price,stock,code,ok\n007,"a, ""quoted""\nline",1.5,1,01,true\n8,,,,x,\n\n9,12,-2e3,-4,,FALSE\n',
        encoding="utf-8",
    )
    carryover = ("price", "stock", "code", "ok")
    rows = list_items(path, columns={"id": "id", "caption": "cap"}, carryover=carryover)
    assert [tuple(row[name] for name in ("caption", "error_type", *carryover)) for row in rows.values()] == [
        ('a, "quoted"\nline', None, 1.5, 1, "01", True),
        (None, "Empty", None, None, "x", None),
        ("12", None, -2000.0, -4, "", False),
    ]
    assert list(rows) == ["007", "8", "9"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.tsv", "id\tcap\na\tx, y\n"),
        ("t.tsv", 'id\tcap\t"r, s; t"\na\tx, y\t1\n'),
        ("t.csv", "\ufeffid\tcap\na\tx, y\n"),
        ("t.csv", "\ufeffid;cap\na;x, y\n"),  # as Excel writes it where the comma is in numbers
        ("t.csv", '"id";"cap, in\nfull";cap\na;z;"x, y"\n'),
        ("t.csv", 'id,cap,"r; s"\na,"x, y",1\n'),
        ("t.csv", 'id,r;s,cap\na,1;2,"x, y"\n'),
    ],
)
def test_values_separated_by_commas_semicolons_or_tabs(tmp_path, list_items, name, content):
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert list_items(tmp_path / name, columns={"id": "id", "caption": "cap"})["a"]["caption"] == "x, y"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
def test_a_table_of_another_encoding_says_so_by_its_mark(tmp_path, list_items, encoding):
    mark = "\ufeff" if encoding.endswith("be") else ""
    (tmp_path / "t.csv").write_bytes((mark + "id,cap\na,café\n").encode(encoding))
    assert list_items(tmp_path / "t.csv", columns={"id": "id", "caption": "cap"})["a"]["caption"] == "café"
    (tmp_path / "cut.csv").write_bytes((mark + "id,cap\na,café\n").encode(encoding)[:-1])
    with pytest.raises(SourceError, match=r"cut\.csv:\d: not UTF-(16|32) here or soon after"):
        list_items(tmp_path / "cut.csv", columns={"id": "id", "caption": "cap"})


def test_the_header_of_the_next_file_is_no_row(tmp_path, list_items, caplog):
    (tmp_path / "t.csv").write_text("id,cap\na,x\nid,cap\nb,y\n\n\ufeffid,cap\n")
    with caplog.at_level("INFO"):
        rows = list_items(tmp_path / "t.csv", columns={"id": "id", "caption": "cap"})
    assert list(rows) == ["a", "b"]
    assert caplog.text.count("t.csv: 2 lines with the header again left out") == 1
    (tmp_path / "one.csv").write_text("cap\nx\ncap\n")
    assert len(list_items(tmp_path / "one.csv", columns={"id": "cap", "caption": "cap"})) == 2, "a value of one column"


JSON_BEFORE = b'{"id": "a", "cap": "x"}\n\n'
NUMBERS = "\n".join(["id,cap,n", *(f"{n},x,{n}" for n in range(1000)), "last,x,many"]).encode()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", b"id,cap\n1,a\n2\n", r"t\.csv:3: 1 fields where the header has 2"),
        ("t.csv", b'id,cap\n1,"two\nlines"\n3,b,c\n', r"t\.csv:4: 3 fields where the header has 2"),
        ("t.csv", b'id,cap\n1,"open\n', r"t\.csv:2: no valid CSV .*unexpected end of data"),
        ("t.csv", b'id,cap\n1,a\n2,"open\n' + b"3,b\n" * 9, r"t\.csv:3: no valid CSV .*unexpected end of data"),
        ("t.csv", b"id,cap\n1,caf\xe9\n", r"t\.csv:\d: not UTF-8 here or soon after"),
        ("t.csv", b"", r"t\.csv: the file is empty; its first line must name the columns"),
        ("t.csv", b"id,id\n1,2\n", r"t\.csv:1: two columns are named 'id'"),
        ("t.csv", b"id:cap\n1:a\n", r"no column 'id'.*it has the columns id:cap$"),
        (
            "t.tsv",
            b"a house\timg/1.jpg\n",
            r"no column 'id'.*img/1\.jpg; its first line looks like a row: put a header",
        ),
        ("t.csv", NUMBERS, r"t\.csv:1002: 'many' is no int64, which the first rows hold"),
        ("t.jsonl", JSON_BEFORE + b'{"id": "b", "cap": \n', r"t\.jsonl:3: no valid JSON"),
        ("t.jsonl", JSON_BEFORE + b"[1]\n", r"t\.jsonl:3: a list where a JSON object is due"),
        ("t.jsonl", JSON_BEFORE + b"[" * 100_000, r"t\.jsonl:3: no valid JSON"),
        ("t.jsonl", JSON_BEFORE + b'{"id": "b", "cap": ["x", "y"]}\n', r"t\.jsonl:3: column 'cap' holds a list"),
        ("t.jsonl", JSON_BEFORE + b'{"id": {"$oid": 1}, "cap": "x"}\n', r"t\.jsonl:3: column 'id' holds a dict"),
        ("t.csv.gz", b"\x1f\x8b", r"no table by its suffix; known are .parquet, .csv, .tsv, .jsonl, .ndjson"),
    ],
    ids=range(16),
)
def test_what_is_wrong_in_a_table_is_named_by_file_and_line(tmp_path, list_items, name, content, message):
    (tmp_path / name).write_bytes(content)
    carryover = ("n",) if content is NUMBERS else ()
    with pytest.raises(SourceError, match=message):
        list_items(tmp_path / name, kind="table", columns={"id": "id", "caption": "cap"}, carryover=carryover)


def test_json_lines(tmp_path, list_items):
    path = tmp_path / "t.jsonl"
    objects = [
        {"id": "a", "cap": "eins \ud83d\ude00", "n": 1, "mixed": {"k": [1]}},
        {"id": "b", "n": 2.5, "mixed": "text"},
        {"id": "c\udc00", "cap": "lone \ud800 surrogate", "extra": 1},
    ]
    path.write_text("\n\n".join(json.dumps(item) for item in objects) + "\n")
    rows = list_items(path, columns={"id": "id", "caption": "cap"}, carryover=("n", "mixed"))
    assert [tuple(row[name] for name in ("caption", "n", "mixed")) for row in rows.values()] == [
        ("eins 😀", 1.0, '{"k": [1]}'),
        (None, 2.5, "text"),
        ("lone \\ud800 surrogate", None, None),
    ]
    assert list(rows) == ["a", "b", "c\\udc00"]


def test_json_that_arrow_can_not_hold_is_told_by_its_line_or_left_out(tmp_path, list_items):
    path, columns = tmp_path / "t.jsonl", {"id": "id", "caption": "cap"}
    path.write_text('{"id": "a", "cap": "x", "n": 0.5, "\\ud83d": {"b": 1}, "tags": {"\\ud83d": 1}}\n')
    assert list_items(path, columns=columns, carryover=("n",))["a"]["n"] == 0.5, "such names are no columns"
    path.write_text(path.read_text() + f'{{"id": "b", "cap": "y", "n": {10**400}}}\n')
    assert list(list_items(path, columns=columns)) == ["a", "b"]
    with pytest.raises(SourceError, match=r"t\.jsonl:2: 1000+ is beyond double; correct that row"):
        list_items(path, columns=columns, carryover=("n",))


def test_json_ids_may_be_integers(tmp_path, list_items):
    (tmp_path / "t.jsonl").write_text('{"id": 12345678901234567890, "cap": "x"}\n')
    assert list(list_items(tmp_path / "t.jsonl", columns={"id": "id", "caption": "cap"})) == ["12345678901234567890"]


@pytest.fixture
def delta(tmp_path):
    """A partitioned Delta table in a folder with a space, whose second file has a column more."""
    path = tmp_path / "my table"
    first = pa.table({"id": ["a", "b"], "image": [b"A", b"B"], "cap": ["x", "y"], "day": ["1/1 ü%", "2"]})
    deltalake.write_deltalake(path, first, partition_by=["day"])
    second = first.slice(0, 1).set_column(0, "id", pa.array(["c"])).append_column("n", pa.array([5]))
    deltalake.write_deltalake(path, second, mode="append", schema_mode="merge", partition_by=["day"])
    return path


def test_delta_tables_give_partition_values_and_columns_added_later(delta, list_items):
    rows = list_items(delta, columns={"id": "id", "image": "image", "caption": "cap"}, carryover=("day", "n"))
    assert {item: (row["caption"], row["day"], row["n"]) for item, row in rows.items()} == {
        "a": ("x", "1/1 ü%", None),
        "b": ("y", "2", None),
        "c": ("x", "1/1 ü%", 5),
    }
    with Fetcher() as fetcher:
        data = {item: fetcher.fetch(row["uri"], max_bytes=9).data for item, row in rows.items()}
    assert data == {"a": b"A", "b": b"B", "c": b"A"}
    deltalake.DeltaTable(delta).delete("id = 'a'")
    assert set(list_items(delta, columns={"id": "id", "caption": "cap"})) == {"b", "c"}, "the newest version"


def test_a_broken_delta_log_is_a_source_error(tmp_path, list_items):
    (tmp_path / "t" / "_delta_log").mkdir(parents=True)
    (tmp_path / "t" / "_delta_log" / "00000000000000000000.json").write_text("{broken")
    with pytest.raises(SourceError, match="not readable as a Delta table"):
        list_items(tmp_path / "t", columns={"id": "id", "caption": "cap"})


def listed_row_by_row(list_items, monkeypatch, *arguments, **settings):
    with monkeypatch.context() as patch:
        patch.setattr("embedder.sources.table_items._plain_rows", lambda *_: None)
        return list_items(*arguments, **settings)


@pytest.mark.parametrize("ids", ["id", "file+row"])
@pytest.mark.parametrize("odd", [None, "caption", "id"])
def test_rows_are_the_same_column_by_column_and_one_by_one(tmp_path, list_items, monkeypatch, ids, odd):
    captions = [f"a picture of {number} {'ü' * (number % 3)}" for number in range(50)]
    names = [f"n{number}" for number in range(50)]
    if odd == "caption":
        captions[17] = " \u2003\n"
    if odd == "id":
        names[17], names[18] = None, ""
    images = pa.array([b"%d" % number for number in range(50)])
    table = pa.table({"id": names, "cap": captions, "photo": images, "price": range(50)})
    (tmp_path / "t").mkdir()
    for number in range(3):  # ids stand in each of them: all but the first are duplicates
        pq.write_table(table, tmp_path / "t" / f"{number}.parquet", row_group_size=7)
    for image in (None, "photo"):
        settings = {"columns": {"id": ids, "caption": "cap"} | ({"image": image} if image else {})}
        rows = list_items(tmp_path / "t", carryover=("price",), **settings)
        assert rows == listed_row_by_row(list_items, monkeypatch, tmp_path / "t", carryover=("price",), **settings)
        assert len(rows) == 150 and [row["price"] for row in rows.values()] == [*range(50)] * 3


def test_files_of_a_table_are_read_at_once_and_listed_in_order(tmp_path, list_items, monkeypatch):
    import threading

    from embedder.sources.table_formats import FORMATS

    for number in range(4):
        pq.write_table(pa.table({"id": [f"{number}"], "cap": ["x"]}), tmp_path / f"{number}.parquet")
    together, chunks = threading.Barrier(4, timeout=60), FORMATS[".parquet"].chunks

    def waiting(uri, *others):
        together.wait()  # opened only once all four are being read
        return chunks(uri, *others)

    monkeypatch.setattr(FORMATS[".parquet"], "chunks", waiting, raising=False)
    assert list(list_items(tmp_path, columns={"id": "id", "caption": "cap"})) == ["0", "1", "2", "3"]
