"""Rows of another table, joined to the listed items: what they bring, and what is refused."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import samples

from embedder.batch_schema import CARRIED
from embedder.config import load_config
from embedder.errors import ConfigError, SourceError
from embedder.sources.listing import list_sources
from embedder.sources.selection import LeftOut


@pytest.fixture
def pictures(tmp_path):
    return samples.folder(tmp_path / "in", num_images=4)  # 0000 and 0002 have captions of their own


def listed(pictures, *joins, sources=None, left_out=None):
    """The listing by the last part of the ids."""
    config = load_config(overrides={"source": sources or [{"path": str(pictures)}], "join": list(joins)})
    tables = list(list_sources(config.source, joins=config.join, left_out=left_out, rows_per_chunk=3))
    return {row["item_id"].rpartition("/")[2][:4]: row for row in pa.concat_tables(tables).to_pylist()}


def write(path, **columns):
    pq.write_table(pa.table(columns), path)
    return str(path)


def ids(*numbers):
    return [f"pictures/{number:04d}.png" for number in numbers]


def test_columns_and_captions_come_to_the_items_of_their_keys(pictures, tmp_path):
    table = write(tmp_path / "t.parquet", file=ids(3, 0, 1, 99), price=[3.5, None, 1.5, 9.0], text=["a", " ", "b", "x"])
    left_out = LeftOut()
    join = {"path": table, "on": {"id": "file"}, "columns": ["price"], "caption": "text"}
    before = listed(pictures)
    found = listed(pictures, join, left_out=left_out)
    assert {key: row[CARRIED + "price"] for key, row in found.items()} == {
        "0000": None,
        "0001": 1.5,
        "0002": None,
        "0003": 3.5,
    }
    assert (found["0001"]["caption"], found["0003"]["caption"]) == ("b", "a")
    for key in ("0000", "0002"):  # a blank caption, and no row: the own one stays
        assert found[key]["caption_uri"] == before[key]["caption_uri"] is not None
    assert found["0002"]["modified"] == before["0002"]["modified"]
    assert found["0000"]["modified"] != before["0000"]["modified"]
    assert left_out.unjoined == {table: 1}
    (line,) = left_out.lines()
    assert line.startswith(f"1 item has no row in the [[join]] {table}: what it brings is null there")


def test_a_caption_of_a_row_takes_the_place_of_the_file_beside_the_picture(pictures, tmp_path):
    table = write(tmp_path / "t.parquet", file=ids(0), text=["from the table"])
    row = listed(pictures, {"path": table, "on": {"id": "file"}, "caption": "text"})["0000"]
    assert (row["caption"], row["caption_uri"]) == ("from the table", None)


def test_only_items_of_a_changed_row_look_changed(pictures, tmp_path):
    join = {"path": str(tmp_path / "t.csv"), "on": {"id": "file"}, "columns": ["price"], "caption": "text"}

    def versions(*lines):
        (tmp_path / "t.csv").write_text("\n".join(["file,price,text", *lines]) + "\n")
        return {key: row["modified"] for key, row in listed(pictures, join).items()}

    rows = [f"{name},{price},words" for price, name in enumerate(ids(0, 1, 2))]
    before = versions(*rows)
    assert versions(*reversed(rows)) == before, "the order of the rows means nothing"
    dearer = versions(rows[0], rows[1].replace(",1,", ",7,"), rows[2])
    assert {key for key in before if dearer[key] != before[key]} == {"0001"}
    said = versions(rows[0], rows[1], rows[2].replace("words", "others"))
    assert {key for key in before if said[key] != before[key]} == {"0002"}
    added = versions(*rows, f"{ids(3)[0]},1,words")
    assert {key for key in before if added[key] != before[key]} == {"0003"}


def test_a_join_of_one_source_leaves_the_others_alone_and_needs_no_name_before_its_keys(pictures, tmp_path):
    table = write(tmp_path / "t.parquet", file=ids(0, 1), lang=["de", "fr"])
    sources = [{"path": str(pictures), "name": "mine"}, {"path": str(pictures), "name": "other"}]
    config = load_config(
        overrides={
            "source": sources,
            "join": [{"path": table, "on": {"id": "file"}, "columns": ["lang"], "source": "mine", "missing": "null"}],
        }
    )
    left_out = LeftOut()
    rows = pa.concat_tables(list(list_sources(config.source, joins=config.join, left_out=left_out))).to_pylist()
    languages = {row["item_id"]: row[CARRIED + "lang"] for row in rows if row[CARRIED + "lang"]}
    assert languages == {f"mine:{ids(0)[0]}": "de", f"mine:{ids(1)[0]}": "fr"}
    assert left_out.unjoined == {table: 2}, "of the source that it is for"


def test_carried_columns_join_too_also_with_those_of_an_earlier_join(tmp_path):
    items = {"sku": [7, 8], "photo": ["a.png", "b.png"], "maker": pa.array([20, None], pa.int32())}
    source = {
        "path": write(tmp_path / "items.parquet", **items),
        "columns": {"id": "sku", "image": "photo"},
        "carryover": ["maker"],
    }
    makers = write(tmp_path / "makers.parquet", code=["20", "21"], country=["PT", "IT"])
    countries = write(tmp_path / "countries.parquet", short=pa.array(["PT"]).dictionary_encode(), tax=[23])
    on_maker = {"path": makers, "on": {"left": "maker", "right": "code"}, "columns": ["country"]}
    on_country = {"path": countries, "on": {"left": "country", "right": "short"}, "columns": ["tax"]}
    config = load_config(overrides={"source": [source], "join": [on_maker, on_country]})
    (table,) = list_sources(config.source, joins=config.join)
    assert table[CARRIED + "country"].to_pylist() == ["PT", None]
    assert table[CARRIED + "tax"].to_pylist() == [23, None]
    by_id = {"path": write(tmp_path / "n.parquet", number=[8, 7], stock=[0, 5]), "on": {"id": "number"}}
    config = load_config(overrides={"source": [source], "join": [by_id | {"columns": ["stock"]}]})
    (table,) = list_sources(config.source, joins=config.join)
    assert table[CARRIED + "stock"].to_pylist() == [5, 0], "numbers are compared as text"


@pytest.mark.parametrize(
    ("columns", "changes", "message"),
    [
        (
            {"file": ids(0, 0, 1, 1, 2, 2, 3, 3), "price": range(8)},
            {},
            "on: column 'file' has 4 keys more than once (first: 'pictures/0000.png', 'pictures/0001.png', "
            "'pictures/0002.png'); an item has one row",
        ),
        ({"file": [0.5], "price": [1]}, {}, "on: column 'file' is double; keys are compared as text"),
        ({"fiel": ["a"], "price": [1]}, {}, "on: there is no column 'file' (did you mean 'fiel'?); it has the columns"),
        ({"file": ["a"], "cost": [1]}, {}, "columns: there is no column 'price'"),
        ({"file": ["a"], "price": [1]}, {"caption": "price"}, "caption: column 'price' is int64; captions are strings"),
        ({"file": ["a"], "uri": ["x"]}, {"columns": ["uri"]}, "columns: 'uri' is already a column of the embeddings"),
        (
            {"file": ids(0), "price": [1]},
            {"missing": "error"},
            "no row for 3 items (first: 'pictures/0001.png', 'pictures/0002.png', 'pictures/0003.png'); add rows",
        ),
        ({"file": ["a"], "price": [1]}, {"on": {"left": "sku", "right": "file"}}, "no source carries a column 'sku'"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_table_and_the_key(pictures, tmp_path, columns, changes, message):
    table = write(tmp_path / "t.parquet", **{name: list(values) for name, values in columns.items()})
    with pytest.raises(SourceError) as caught:
        listed(pictures, {"path": table, "on": {"id": "file"}, "columns": ["price"]} | changes)
    assert str(caught.value).startswith(f"{table}: [[join]]")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_name_that_two_columns_have_is_refused(pictures, tmp_path):
    pq.write_table(pa.Table.from_arrays([pa.array(["a"])] * 3, ["file", "price", "price"]), tmp_path / "t.parquet")
    with pytest.raises(SourceError, match=r"\[\[join\]\] columns: two columns are named 'price'; rename one"):
        listed(pictures, {"path": str(tmp_path / "t.parquet"), "on": {"id": "file"}, "columns": ["price"]})


def test_rows_without_a_key_are_counted_and_join_nothing(pictures, tmp_path):
    table = write(tmp_path / "t.parquet", file=[None, "", None, *ids(0, 1, 2, 3)], price=range(7))
    left_out = LeftOut()
    found = listed(pictures, {"path": table, "on": {"id": "file"}, "columns": ["price"]}, left_out=left_out)
    assert {row[CARRIED + "price"] for row in found.values()} == {3, 4, 5, 6}
    assert left_out.lines() == [f"3 rows of the [[join]] {table} left out: without a key"]


@pytest.mark.parametrize(
    ("joins", "message"),
    [
        ([{"path": "t.csv", "on": {"id": "a"}}], "it brings nothing; name columns, a caption, or both"),
        ([{"path": "t.csv", "on": {"id": "a", "left": "b"}, "caption": "c"}], 'on takes id = "KEY COLUMN", or left'),
        ([{"path": "t.csv", "on": {"left": "b"}, "caption": "c"}], 'on takes id = "KEY COLUMN", or left'),
        ([{"path": "t.csv", "on": {}, "caption": "c"}], 'on takes id = "KEY COLUMN", or left'),
        ([{"path": "t.csv", "on": {"id": "a"}, "columns": ["b", "b"]}], "columns names 'b' twice"),
        ([{"path": "t.csv", "on": {"id": "a"}, "caption": "c", "source": "x"}], 'there is no source "x" (none has a'),
        (
            [{"path": f"{name}.csv", "on": {"id": "a"}, "columns": ["b"]} for name in "pq"],
            "[[join]] of p.csv and of q.csv both bring 'b'; leave it out of one of them",
        ),
    ],
)
def test_a_section_that_means_nothing_is_refused_when_it_is_read(joins, message):
    with pytest.raises(ConfigError) as caught:
        load_config(overrides={"source": [{"path": "in"}], "join": joins})
    assert message in str(caught.value)


def test_a_path_of_a_join_follows_its_configuration_file(pictures, tmp_path):
    write(tmp_path / "t.parquet", file=ids(0), price=[1])
    file = tmp_path / "run.toml"
    file.write_text(
        '[[source]]\npath = "in"\n[[join]]\npath = "t.parquet"\non = { id = "file" }\ncolumns = ["price"]\n'
    )
    config = load_config(str(file))
    assert config.join[0].path == str(tmp_path / "t.parquet")
