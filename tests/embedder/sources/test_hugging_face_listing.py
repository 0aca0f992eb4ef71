"""Listing of tables as Hugging Face's `datasets` writes them: structs, labels, lists, and rows without an id."""

import json
import os
from hashlib import blake2b

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hugging_face import write_shard

from embedder.config_toml.run_sections import Columns, SourceConfig
from embedder.errors import SourceError
from embedder.sources import row_ids
from embedder.sources.column_keys import ColumnOptions
from embedder.sources.fetch import Fetcher
from embedder.sources.listing import list_sources
from embedder.sources.selection import LeftOut

PICTURES = [b"first", b"second", b"third"]


def digest(data):
    return blake2b(data, digest_size=16).hexdigest()


def column(rows, name):
    return [row[name] for row in rows.values()]


def fetched(rows):
    with Fetcher() as fetcher:
        return [fetcher.fetch(uri, max_bytes=10**6).data for uri in column(rows, "uri")]


def listed(path, columns, left_out):
    table = pa.concat_tables(list_sources([SourceConfig(path=str(path), columns=columns)], left_out=left_out))
    return {row["item_id"]: row for row in table.to_pylist()}


@pytest.mark.parametrize(("image", "rows"), [("image", [None, b"inner"]), ("image.bytes", [None, b"inner"])])
def test_a_field_of_a_struct_is_a_column(tmp_path, list_items, image, rows):
    path = write_shard(tmp_path / "t.parquet", [None, b"inner"], row_group_size=1, id=["a", "b"])
    found = list_items(path, columns={"id": "id", "image": image})
    assert column(found, "uri") == [f"{path}#column={image}&row_group={n}&row=0" for n in range(2)]
    assert fetched(found) == rows


@pytest.mark.parametrize("order", [("image", "image.bytes"), ("image.bytes", "image")])
def test_a_column_whose_very_name_has_a_dot_wins(tmp_path, list_items, order):
    values = {"image": [{"bytes": b"inside", "path": "p"}], "image.bytes": [b"outside"]}
    pq.write_table(pa.table({name: values[name] for name in order} | {"id": ["a"]}), tmp_path / "t.parquet")
    assert fetched(list_items(tmp_path / "t.parquet", columns={"id": "id", "image": "image.bytes"})) == [b"outside"]
    assert fetched(list_items(tmp_path / "t.parquet", columns={"id": "id", "image": "image"})) == [b"inside"]


def test_fields_give_ids_addresses_and_carried_values(tmp_path, list_items):
    (tmp_path / "a.png").write_bytes(b"1234")
    meta = [{"id": 7, "by": {"name": "x"}}, {"id": 8, "by": None}]
    path = write_shard(
        tmp_path / "t.parquet", [{"bytes": None, "path": "a.png"}, {"bytes": b"b", "path": "b.png"}], meta=meta
    )
    columns = {"id": "meta.id", "image": "image.path", "caption": "meta.by.name"}
    rows = list_items(path, columns=columns, carryover=("meta.id", "image.path"))
    assert list(rows) == ["7", "8"]
    assert column(rows, "uri") == [f"{tmp_path}/a.png", f"{tmp_path}/b.png"]
    assert column(rows, "size_bytes") == [4, None]
    assert column(rows, "caption") == ["x", None]
    assert (column(rows, "meta.id"), column(rows, "image.path")) == ([7, 8], ["a.png", "b.png"])


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list])
@pytest.mark.parametrize("nested", [False, True])
def test_of_a_list_of_captions_the_first_that_is_not_blank_is_taken(tmp_path, list_items, kind, nested):
    texts = [["one", "two"], None, [" ", None, "three"], []]
    if nested:  # as a sequence of structs
        structs = [None if each is None else [{"text": text, "n": 1} for text in each] for each in texts]
        values = pa.array(structs, kind(pa.struct([("text", pa.string()), ("n", pa.int32())])))
    else:
        values = pa.array(texts, kind(pa.string()))
    path = write_shard(tmp_path / "t.parquet", [b"a", b"b", b"c", b"d"], notes=values)
    columns = {"id": "file+row", "image": "image", "caption": "notes.text" if nested else "notes"}
    assert column(list_items(path, columns=columns), "caption") == ["one", None, "three", None]


def test_captions_in_lists_of_fields(tmp_path, list_items):
    path = write_shard(tmp_path / "t.parquet", [b"a", b"b"], notes=[{"text": ["one", "two"]}, None])
    rows = list_items(path, columns={"id": "file+row", "image": "image", "caption": "notes.text"})
    assert column(rows, "caption") == ["one", None]


def test_labels_are_captions_by_the_names_that_their_own_file_gives(tmp_path, list_items):
    folder = tmp_path / "data"
    write_shard(folder / "a.parquet", [b"a", b"b", b"c"], labels={"kind": ("cat", "dog")}, kind=[1, 0, -1])
    write_shard(folder / "b.parquet", [b"d", b"e"], labels={"kind": ("dog", "cat")}, kind=[1, None])
    rows = list_items(folder, columns={"id": "file+row", "image": "image", "caption": "kind"}, carryover=("kind",))
    assert column(rows, "caption") == ["dog", "cat", None, "cat", None]
    assert column(rows, "kind") == [1, 0, -1, 1, None]


def test_a_label_without_a_name_is_named_by_file_and_row(tmp_path, list_items):
    path = write_shard(tmp_path / "t.parquet", [b"a", b"b"], labels={"kind": ("cat",)}, kind=[0, 1])
    with pytest.raises(SourceError, match=r"t\.parquet: row 1: column 'kind' is 1, and the file names 1 labels"):
        list_items(path, columns={"id": "file+row", "image": "image", "caption": "kind"})


@pytest.mark.parametrize(
    "about", [b"{", b"[]", b'{"info": {"features": {"kind": {"_type": "ClassLabel", "names": 3}}}}']
)
def test_metadata_of_another_form_names_no_labels(tmp_path, list_items, about):
    table = pa.table({"kind": [0], "caption": ["x"]}).replace_schema_metadata({"huggingface": about})
    pq.write_table(table, tmp_path / "t.parquet")
    assert len(list_items(tmp_path / "t.parquet", columns={"id": "kind", "caption": "caption"})) == 1
    with pytest.raises(
        SourceError, match=r'columns\.caption = "kind" is int64; it must be strings, lists of strings, or'
    ):
        list_items(tmp_path / "t.parquet", columns={"id": "kind", "caption": "kind"})


def test_json_lines_have_fields_too(tmp_path, list_items):
    objects = [{"id": 1, "image": {"path": "a.jpg"}, "image.title": "outer"}, {"id": 2, "image": {"title": "inner"}}]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, objects)))
    columns = {"id": "id", "image": "image.path", "caption": "image.title"}
    rows = list_items(tmp_path / "t.jsonl", columns=columns, carryover=("image",))
    assert column(rows, "uri") == [f"{tmp_path}/a.jpg", f"{tmp_path}/t.jsonl#row=1"]
    assert column(rows, "caption") == ["outer", "inner"]
    assert column(rows, "image") == ['{"path": "a.jpg"}', '{"title": "inner"}']


def test_ids_by_file_and_row_count_within_each_file_of_all_splits(tmp_path, list_items):
    repository = tmp_path / "flowers"
    for name in ("data/train-00000-of-00002", "data/train-00001-of-00002", "data/test-00000-of-00001"):
        write_shard(repository / f"{name}.parquet", [b"same", b"same"], row_group_size=1, text=["a", ""])
    (repository / "README.md").write_text("---\nlicense: mit\n---\n")
    (repository / ".gitattributes").touch()
    rows = list_items(repository, columns={"id": "file+row", "image": "image", "caption": "text"})
    assert list(rows) == [
        f"data/{name}.parquet#{row}"
        for name in ("test-00000-of-00001", "train-00000-of-00002", "train-00001-of-00002") for row in range(2)
    ]  # fmt: skip
    assert fetched(rows) == [b"same"] * 6
    single = list_items(repository / "data/test-00000-of-00001.parquet", columns={"id": "file+row", "image": "image"})
    assert list(single) == ["test-00000-of-00001.parquet#0", "test-00000-of-00001.parquet#1"]


def test_a_rule_for_ids_is_a_column_where_one_is_called_so(tmp_path, list_items):
    path = write_shard(tmp_path / "t.parquet", [b"a"], **{"content": ["c"], "file+row": ["f"]})
    assert list(list_items(path, columns={"id": "content", "image": "image"})) == ["c"]
    assert list(list_items(path, columns={"id": "file+row", "image": "image"})) == ["f"]


def test_ids_by_content_are_hashes_and_the_same_content_twice_is_one_item(tmp_path):
    folder = tmp_path / "data"
    write_shard(folder / "a.parquet", [*PICTURES, b"first"], row_group_size=2, text=["one", "two", None, "uno"])
    write_shard(
        folder / "b.parquet", [b"second", b"fourth", None, None, None], text=["x", "four", "alone", "alone", " "]
    )
    left_out = LeftOut()
    rows = listed(folder, Columns(id="content", image="image", caption="text"), left_out)
    held = [b"first", b"second", b"third", b"fourth", b"alone"]
    assert list(rows) == [*map(digest, held), "b.parquet#row=4"]
    assert column(rows, "caption") == ["one", "two", None, "four", "alone", None]
    assert fetched(rows)[:4] == held[:4]
    assert rows["b.parquet#row=4"]["error_type"] == "Empty"
    assert left_out.lines() == [
        '3 rows hold what an earlier one does, left out with captions that may differ; columns.id = "file+row" keeps '
        "every row"
    ]
    again = LeftOut()
    assert listed(folder, ColumnOptions(id="content", image="image", caption="text"), again) == rows
    assert again.lines()[0].endswith("--id-column file+row keeps every row")


def test_carried_values_stay_with_their_rows_where_others_are_left_out(tmp_path, list_items):
    path = write_shard(tmp_path / "t.parquet", [b"a", b"a", b"b"], price=[1, 2, 3])
    rows = list_items(path, columns={"id": "content", "image": "image"}, carryover=("price",))
    assert {item: row["price"] for item, row in rows.items()} == {digest(b"a"): 1, digest(b"b"): 3}


def test_hashing_holds_a_few_rows_of_a_large_row_group(tmp_path, monkeypatch, list_items):
    from embedder.sources import parquet_cells

    monkeypatch.setattr(parquet_cells, "MAX_KEPT_BYTES", 1 << 20)
    images = [os.urandom(20_000) for _ in range(500)]
    path = write_shard(tmp_path / "t.parquet", images)
    held = []
    whole = row_ids.ContentIds.identify

    def watched(self, row, place):
        found = whole(self, row, place)
        held.append(len(self._cells._cells))
        return found

    monkeypatch.setattr(row_ids.ContentIds, "identify", watched)
    assert list(list_items(path, columns={"id": "content", "image": "image"})) == [digest(image) for image in images]
    assert max(held) <= parquet_cells.ROWS_PER_BATCH


def test_a_table_that_breaks_while_it_is_hashed_is_no_shorter_listing(tmp_path, list_items):
    path = tmp_path / "t.parquet"
    table = pa.table({"image": [os.urandom(500_000)] * 2, "text": ["a", "b"]})
    pq.write_table(table, path, compression="none", use_dictionary=False)
    start = pq.ParquetFile(path).metadata.row_group(0).column(0).data_page_offset
    data = bytearray(path.read_bytes())
    data[start : start + 100] = b"\xff" * 100
    path.write_bytes(data)
    with pytest.raises(SourceError, match=r"t\.parquet"):
        list_items(path, columns={"id": "content", "image": "image", "caption": "text"})


def test_images_beside_the_table_are_hashed_and_followed(tmp_path, list_items):
    (tmp_path / "pics").mkdir()
    beside = tmp_path / "pics" / "b.png"
    beside.write_bytes(b"beside")
    images = [
        {"bytes": None, "path": "pics/b.png"},
        {"bytes": b"in", "path": "c.png"},
        {"bytes": None, "path": "gone.png"},
    ]
    path = write_shard(tmp_path / "t.parquet", images)
    rows = list_items(path, columns={"id": "content", "image": "image"})
    assert list(rows) == [digest(b"beside"), digest(b"in"), "t.parquet#row=2"]
    assert rows["t.parquet#row=2"]["error_type"] == "FileNotFound"

    def versions():
        return column(list_items(path, columns={"id": "file+row", "image": "image"}), "modified")

    before = versions()
    os.utime(beside, ns=(1, 1))
    after = versions()
    assert [old == new for old, new in zip(before, after, strict=True)] == [False, True, True]


def test_images_on_the_web_are_not_fetched_for_their_hash(tmp_path, list_items):
    images = [
        {"bytes": None, "path": "https://127.0.0.1:9/a.png?X-Amz-Signature=secret"},
        {"bytes": b"in", "path": None},
    ]
    rows = list_items(write_shard(tmp_path / "t.parquet", images), columns={"id": "content", "image": "image"})
    assert list(rows) == ["t.parquet#row=0", digest(b"in")]
    assert rows["t.parquet#row=0"]["error_type"] == "NotHashed"
    assert rows["t.parquet#row=0"]["error"].endswith('fetches nothing from the web; set columns.id = "file+row"')
    assert "secret" not in rows["t.parquet#row=0"]["error"]


def test_no_file_is_looked_at_where_no_bytes_are_null(tmp_path, list_items):
    (tmp_path / "0.png").write_bytes(b"another file of that name")
    path = write_shard(tmp_path / "t.parquet", [b"a"])
    before = list_items(path, columns={"id": "file+row", "image": "image"})
    os.utime(tmp_path / "0.png", ns=(1, 1))
    assert list_items(path, columns={"id": "file+row", "image": "image"}) == before


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"image": "image.path", "id": "content"}, r"--id-column content hashes bytes.*leave --id-column out"),
        ({"image": "notes"}, r"--image-column notes is list<.*one of them in each row"),
        ({"image": "place"}, r"--image-column place is struct<.*; it has place\.path$"),
        ({"image": "image.byte"}, r"--image-column: .* no column 'image\.byte' \(did you mean 'image\.bytes'\?\)"),
        ({"image": "image"}, r"set --id-column: content .*this looks right: --image-column image --id-column content$"),
        ({"caption": "text"}, r"this looks right: --caption-column text --id-column file\+row$"),
        (
            {},
            r"needs --image-column or --caption-column; .*look right: --image-column image --caption-column text "
            r"--id-column content$",
        ),
    ],
)  # fmt: skip
def test_messages_speak_of_the_option_that_was_typed(tmp_path, columns, message):
    place = pa.array([{"path": "a.png"}])
    path = write_shard(tmp_path / "t.parquet", [b"a"], text=["x"], notes=[[{"bytes": b"x"}]], place=place)
    with pytest.raises(SourceError, match=message):
        list_sources([SourceConfig(path=str(path), columns=ColumnOptions(**columns))])
    with pytest.raises(SourceError) as caught:
        list_sources([SourceConfig(path=str(path), columns=Columns(**columns))])
    assert "--" not in str(caught.value)
    assert "columns" in str(caught.value)
