"""Hive folders: what `lang=de` says is a column of the files below it."""

import duckdb
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from embedder.errors import SourceError

NAMED = {"id": "id", "caption": "cap"}


@pytest.fixture
def write_tables(tmp_path):
    """Write Parquet files of one row; `columns` by path."""

    def written(files, root="hive"):
        for name, columns in files.items():
            path = tmp_path / root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.table({key: [value] for key, value in columns.items()}), path)
        return tmp_path / root

    return written


def row(item):
    return {"id": item, "cap": f"caption of {item}"}


@pytest.mark.parametrize(
    ("folders", "kind", "values"),
    [
        (("lang=de", "lang=en"), "string", ["de", "en"]),
        (("lang=1", "lang=02"), "int64", [1, 2]),
        (("lang=-3", "lang=__HIVE_DEFAULT_PARTITION__"), "int64", [-3, None]),
        (("lang=pt%20br", "lang=a%2Fb%25"), "string", ["pt br", "a/b%"]),
        (("lang=日本", "lang=%E6%97%A5"), "string", ["日本", "日"]),
        (("lang=2024-01-01", "lang=2024-01-02"), "string", ["2024-01-01", "2024-01-02"]),
        (("lang=1.5", "lang=2.5"), "string", ["1.5", "2.5"]),
        (("lang=true", "lang=false"), "string", ["true", "false"]),
        (("lang=9" + "9" * 20, "lang=1"), "string", ["9" + "9" * 20, "1"]),
        (("lang=a=b", "lang=c"), "string", ["a=b", "c"]),
        (("lang=", "lang=c"), "string", [None, "c"]),
        (("lang=de/x", "other"), "string", ["de", None]),
        (("lang=__HIVE_DEFAULT_PARTITION__", "lang=__HIVE_DEFAULT_PARTITION__/x"), "string", [None, None]),
    ],
)
def test_values_and_types(write_tables, list_items, folders, kind, values):
    path = write_tables({f"{folder}/p.parquet": row(str(n)) for n, folder in enumerate(folders)})
    rows = list_items(path, columns=NAMED, carryover=("lang",))
    assert [rows["0"]["lang"], rows["1"]["lang"]] == values
    assert rows["1"]["caption"] == "caption of 1"
    expected = [type(value) for value in values if value is not None]
    assert all(each is {"int64": int, "string": str}[kind] for each in expected)


def test_nested_folders_agree_with_pyarrow(write_tables, list_items):
    path = write_tables({"year=2024/month=01/p.parquet": row("a"), "year=2023/month=12/p.parquet": row("b")})
    rows = list_items(path, columns=NAMED, carryover=("year", "month"))
    ours = {(item, each["year"], each["month"]) for item, each in rows.items()}
    assert ours == {("a", 2024, 1), ("b", 2023, 12)}
    found = duckdb.sql(f"SELECT id, year FROM read_parquet('{path}/**/*.parquet', hive_partitioning=true)")
    assert {each[:2] for each in ours} == set(found.fetchall())  # its months are texts or numbers, by its version
    theirs = pa.dataset.dataset(path, partitioning="hive").to_table().to_pylist()
    assert ours == {(each["id"], each["year"], each["month"]) for each in theirs}


def test_partitions_give_ids_and_captions_as_they_are_written(write_tables, list_items):
    path = write_tables({"code=007/cap=12/p.parquet": {"n": 1}, "code=8/cap=x%20y/p.parquet": {"n": 2}})
    rows = list_items(path, columns={"id": "code", "caption": "cap"}, carryover=("n",))
    assert {item: (each["caption"], each["n"]) for item, each in rows.items()} == {"007": ("12", 1), "8": ("x y", 2)}


def test_a_column_that_the_files_have_is_read_from_them(write_tables, list_items):
    path = write_tables(
        {"lang=de/p.parquet": row("a") | {"lang": "file's"}, "lang=en/p.parquet": row("b") | {"lang": "b"}}
    )
    assert list_items(path, columns=NAMED, carryover=("lang",))["a"]["lang"] == "file's"


@pytest.mark.parametrize("source", ["", "/lang=*/*.parquet", "/**/*.parquet", "/lang=de", "/lang=de/p.parquet"])
def test_a_folder_a_pattern_or_one_partition(write_tables, list_items, source):
    path = write_tables({"lang=de/p.parquet": row("a"), "lang=en/p.parquet": row("b")})
    (path / "lang=en" / "_SUCCESS").touch()
    (path / "lang=en" / ".p.parquet.crc").touch()
    rows = list_items(f"{path}{source}", columns=NAMED, carryover=("lang",))
    assert rows["a"]["lang"] == "de"
    assert len(rows) == (1 if "=de" in source else 2)


@pytest.mark.parametrize(("name", "text"), [("p.csv", "id,cap\na,x\n"), ("p.jsonl", '{"id": "a", "cap": "x"}\n')])
def test_text_tables_have_partitions_too(make_files, list_items, name, text):
    path = make_files({f"lang=de/{name}": text})
    assert list_items(path, columns=NAMED, carryover=("lang",))["a"]["lang"] == "de"


def test_in_a_bucket(bucket, write_tables, list_items):
    path = write_tables({"p.parquet": row("a")})
    for key in ("hive/lang=pt%20br/p.parquet", "hive/lang=x/y=1/p.parquet"):
        bucket.objects[key] = (path / "p.parquet").read_bytes()
    rows = list_items("s3://team/hive", columns={"id": "file+row", "caption": "cap"}, carryover=("lang", "y"))
    assert {(each["lang"], each["y"]) for each in rows.values()} == {("pt br", None), ("x", 1)}


def test_a_renamed_folder_is_a_change_of_the_rows_that_carry_it(write_tables, list_items):
    path = write_tables({"lang=de/p.parquet": row("a") | {"image": b"x"}})

    def version(**settings):
        return list_items(path, columns=NAMED | {"image": "image"}, **settings)["a"]["modified"]

    before, plain = version(carryover=("lang",)), version()
    (path / "lang=de").rename(path / "lang=fr")
    assert version(carryover=("lang",)) == before.replace("lang=de", "lang=fr") != before
    assert version() == plain, "stores that don't carry it see no change"


def test_a_wrong_name_is_refused_with_the_folders_column(write_tables, list_items):
    path = write_tables({"lang=de/p.parquet": row("a")})
    with pytest.raises(
        SourceError, match=r"no column 'lng' \(did you mean 'lang'\?\); it has the columns id, cap, lang"
    ):
        list_items(path, columns=NAMED, carryover=("lng",))
