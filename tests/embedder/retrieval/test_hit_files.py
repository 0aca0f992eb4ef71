"""Hits as files: tables that hold what was found and are no programs, copies of whatever holds an item."""

import csv
import json
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal

import pyarrow as pa
import pytest
import samples
from pyarrow import parquet

import embedder
from embedder.config import load_config
from embedder.errors import ConfigError
from embedder.ingest.embed import embed
from embedder.retrieval import hit_files
from embedder.retrieval.hit import Hit
from embedder.retrieval.hit_files import MAX_NAME_BYTES, file_name, save_table
from embedder.retrieval.hits import Hits

PNG, JPEG = samples.image_bytes(1), samples.image_bytes(1, "JPEG")
DANGEROUS = ["=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "\uff1d1+1"]


def hit(item_id="a.png", **fields):
    given = {
        "score": 0.5,
        "item_id": item_id,
        "segment": 0,
        "modality": "image",
        "uri": "/nowhere/" + item_id,
        "start_s": None,
        "end_s": None,
        "caption": None,
        "carryover": {},
    }
    return Hit(**(given | fields))


def read_csv(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def store(tiny_model, tmp_path_factory):
    """A store of files, cells of a table and a clip."""
    folder = tmp_path_factory.mktemp("files")
    source = samples.folder(folder / "in", num_images=4, num_clips=1)
    rows = {"sku": ["x/1", "x/2"], "photo": [samples.image_bytes(11), samples.image_bytes(12, "JPEG")]}
    parquet.write_table(pa.table(rows | {"price": [1.5, 2.5]}), folder / "t.parquet")
    table = {"path": str(folder / "t.parquet"), "columns": {"id": "sku", "image": "photo"}, "carryover": ["price"]}
    sources = [{"path": str(source), "name": "f"}, table | {"name": "t"}]
    settings = {"model": str(tiny_model), "store": str(folder / "s"), "source": sources, "segment_s": 1.0}
    embed(load_config(overrides=settings | {"engine": "local"}))
    return embedder.open_store(folder / "s")


def originals(store):
    """Content of each item."""
    root = store.files.folder.parent
    found = {f"f:{path.relative_to(root / 'in').as_posix()}": path.read_bytes() for path in (root / "in").rglob("*.*")}
    return found | {"t:x/1": samples.image_bytes(11), "t:x/2": samples.image_bytes(12, "JPEG")}


def test_each_format_holds_rank_score_id_caption_and_columns(store, tmp_path):
    hits = store.search("a red car", k=20)
    for suffix in (".csv", ".parquet", ".jsonl"):
        hits.save(tmp_path / f"hits{suffix}")
    as_parquet = parquet.read_table(tmp_path / "hits.parquet")
    assert as_parquet.equals(hits.to_arrow())
    rows = as_parquet.to_pylist()
    as_lines = [json.loads(line) for line in (tmp_path / "hits.jsonl").read_text().splitlines()]
    assert [(row["rank"], row["item_id"], row["uri"], row["price"]) for row in as_lines] == [
        (row["rank"], row["item_id"], row["uri"], row["price"]) for row in rows
    ]
    assert [row["score"] for row in as_lines] == [row["score"] for row in rows]
    for row, text in zip(rows, read_csv(tmp_path / "hits.csv"), strict=True):
        assert (int(text["rank"]), float(text["score"])) == (row["rank"], row["score"])
        assert (text["item_id"], text["caption"]) == (row["item_id"], row["caption"] or "")
        assert text["price"] == ("" if row["price"] is None else str(row["price"]))
    assert {row["price"] for row in rows} == {1.5, 2.5, None}


def test_no_text_of_a_csv_file_is_a_formula_and_other_formats_hold_it_as_it_is(tmp_path):
    hits = Hits([hit(text, caption=text, carryover={"=name": text}, score=-0.5) for text in DANGEROUS])
    hits.save(tmp_path / "hits.csv")
    hits.save(tmp_path / "hits.jsonl")
    rows = read_csv(tmp_path / "hits.csv")
    assert [row["caption"] for row in rows] == [f"'{text}" for text in DANGEROUS]
    assert [row["item_id"] for row in rows] == [f"'{text}" for text in DANGEROUS]
    assert [row["'=name"] for row in rows] == [f"'{text}" for text in DANGEROUS]
    assert {row["score"] for row in rows} == {"-0.5"}, "numbers are no texts"
    lines = [json.loads(line) for line in (tmp_path / "hits.jsonl").read_text().splitlines()]
    assert [line["caption"] for line in lines] == DANGEROUS


def test_values_of_every_kind_are_written(tmp_path):
    values = {
        "text": 'a, "b"\nc é \u4e2d',
        "bytes": b"\x00\xff",
        "time": datetime(2026, 1, 2, 3, 4, tzinfo=UTC),
        "list": ["a", "b"],
        "struct": {"a": 1, "b": [None, 2.5]},
        "none": None,
        "nan": float("nan"),
        "flag": True,
        "less": Decimal("-12.50"),
    }
    Hits([hit(carryover=values)]).save(tmp_path / "hits.csv")
    Hits([hit(carryover=values)]).save(tmp_path / "hits.jsonl")
    (row,) = read_csv(tmp_path / "hits.csv")
    (line,) = [json.loads(each, parse_constant=pytest.fail) for each in (tmp_path / "hits.jsonl").open("rb")]
    assert row["text"] == line["text"] == values["text"]
    assert (row["bytes"], line["bytes"]) == ("AP8=", "AP8=")
    assert row["time"] == line["time"] == "2026-01-02T03:04:00+00:00"
    assert (json.loads(row["list"]), line["list"]) == (["a", "b"], ["a", "b"])
    assert (json.loads(row["struct"]), line["struct"]) == (values["struct"], values["struct"])
    assert (row["none"], line["none"], row["nan"], line["nan"]) == ("", None, "", None)
    assert row["less"] == line["less"] == "-12.50", "a number is no formula"
    assert (json.loads(row["flag"].lower()), line["flag"]) == (True, True)


def test_signatures_of_addresses_stay_out_of_files(tmp_path):
    address = "https://shop.example/a.jpg?X-Amz-Signature=secret123"
    for suffix in (".csv", ".parquet", ".jsonl"):
        path = tmp_path / f"hits{suffix}"
        Hits([hit(uri=address)]).save(path)
        assert b"shop.example" in path.read_bytes()
        assert b"secret123" not in path.read_bytes()


@pytest.mark.parametrize(
    ("name", "message"), [("a.xlsx", "known are .csv, .parquet, .jsonl"), ("no/a.csv", "mkdir -p")]
)
def test_another_format_or_a_missing_folder_is_refused(name, message, tmp_path):
    with pytest.raises(ConfigError, match="^[^\n]*$") as caught:
        Hits([hit()]).save(tmp_path / name)
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_older_table_stays_where_the_new_one_fails(tmp_path, monkeypatch):
    path = tmp_path / "hits.csv"
    path.write_text("old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(hit_files.TABLE_FORMATS, ".csv", fail)
    with pytest.raises(ConfigError, match="No space left"):
        save_table(path, Hits([hit()]).to_arrow())
    assert (path.read_text(), list(tmp_path.iterdir())) == ("old", [path])


def test_files_tables_and_clips_are_copied_by_rank(store, tmp_path):
    hits = store.search("a red car", k=20)
    copied = hits.copy_files(tmp_path / "out")
    rows = read_csv(tmp_path / "out" / "hits.csv")
    assert (copied.num_files, copied.problems) == (len(hits), [])
    assert [row["item_id"] for row in rows] == [hit.item_id for hit in hits]
    expected = originals(store)
    for rank, row in enumerate(rows, 1):
        assert row["file"].startswith(f"{rank:03d}-")
        assert (tmp_path / "out" / row["file"]).read_bytes() == expected[row["item_id"]]
    names = {row["item_id"]: row["file"][4:] for row in rows}
    assert names["f:pictures/0000.png"] == "0000.png"
    assert names["f:clips/0.mp4"] == "0.mp4", "a moment's video is whole"
    assert (names["t:x/1"], names["t:x/2"]) == ("1.png", "2.jpg"), "the content says what has no suffix"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"hits.csv", *(row["file"] for row in rows)}


def test_a_file_of_several_hits_is_copied_once(store, tmp_path):
    answers = store.search(["a red car", "two cats"], k=20, group=False)
    copied = answers.copy_files(tmp_path / "out")
    rows = read_csv(tmp_path / "out" / "hits.csv")
    assert len(rows) == sum(map(len, answers)) > copied.num_files == len(originals(store)) - 2  # captions are no items
    assert all(row["file"].startswith("q1-") for row in rows)
    assert len({row["file"] for row in rows if row["item_id"] == "f:clips/0.mp4"}) == 1
    assert len(list((tmp_path / "out").iterdir())) == copied.num_files + 1


def test_what_is_gone_is_named_and_the_rest_is_copied(store, tmp_path):
    hits = store.search("a red car", k=3)
    gone = replace(hits[1], uri=str(tmp_path / "gone.png"), item_id="gone")
    copied = Hits([hits[0], gone, hits[2]]).copy_files(tmp_path / "out")
    assert (copied.num_files, len(copied.problems)) == (2, 1)
    assert copied.problems[0].startswith("gone: ") and "gone.png" in copied.problems[0]
    rows = read_csv(tmp_path / "out" / "hits.csv")
    assert [bool(row["file"]) for row in rows] == [True, False, True]
    assert "gone.png" in rows[1]["problem"] and not rows[0]["problem"]


@pytest.mark.parametrize("name", ["full", "file", "none/out", "link"])
def test_a_folder_that_holds_something_is_not_written(name, store, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "full")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match="^copies [^\n]*$"):
        store.search("a red car", k=1).copy_files(tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "full" / "mine.txt").read_text() == "mine"


def test_nothing_is_left_of_copies_that_end_early(store, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(hit_files, "_write_listing", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.search("a red car", k=3).copy_files(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_ends_early_is_no_copy(store, tmp_path, monkeypatch):
    def short(self, fetcher):
        yield PNG[:10]
        raise embedder.sources.fetch.FetchError("Truncated", "it ends after 10 bytes")

    monkeypatch.setattr(Hit, "pieces", short)
    copied = store.search("a red car", k=1).copy_files(tmp_path / "out")
    assert (copied.num_files, len(copied.problems)) == (0, 1)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["hits.csv"]


def test_no_id_leads_out_of_the_folder_or_replaces_a_file(tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    ids = ["../../etc/passwd", "/root/.ssh/id", "..\\..\\win", "a/..", "..", "", "hits.csv", "a\x00b", "con", "x" * 999,
           "é" * 500 + ".png", "\u202egnp.exe", "a:b*c?.png", "b/same.png", "c/same.png"]  # fmt: skip
    hits = Hits([hit(each, uri=str(tmp_path / "a.png")) for each in ids])
    copied = hits.copy_files(tmp_path / "out")
    assert (copied.num_files, copied.problems) == (len(ids), [])
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == len(ids) + 2
    assert {path.parent.name for path in files} == {"out", tmp_path.name}
    assert all(path.read_bytes() == PNG for path in files if path.name != "hits.csv")
    for row in read_csv(tmp_path / "out" / "hits.csv"):
        assert len(row["file"].encode()) <= MAX_NAME_BYTES
        assert row["file"].isprintable() and not set(row["file"]) & set('/\\:*?"<>|')


@pytest.mark.parametrize(
    ("item_id", "head", "name"),
    [
        ("cats/a.jpg", JPEG, "a.jpg"),
        ("a.JPEG", JPEG, "a.JPEG"),
        ("a.jpg", PNG, "a.png"),
        ("a", PNG, "a.png"),
        ("v1.2", PNG, "v1.2.png"),
        ("photo.final", JPEG, "photo.final.jpg"),
        ("a.jpg", b"RIFF\0\0\0\0WEBPVP8 ", "a.webp"),
        ("a", b"RIFF\0\0\0\0AVI LIST", "a.avi"),
        ("a.mov", b"\0\0\0\x14ftypqt  ", "a.mov"),
        ("a", b"\0\0\0\x18ftypisom", "a.mp4"),
        ("a.nef", b"II*\0", "a.nef"),
        ("a", b"\0\0\0\x1cftypavif", "a.avif"),
        ("a.bmp", b"BM", "a.bmp"),
        ("a.txt", b"text", "a.txt"),
        ("", b"", "item"),
    ],
)
def test_names_have_the_suffix_of_their_content(item_id, head, name):
    assert file_name(item_id, head[:64], "001-") == f"001-{name}"


def test_ranks_have_as_many_digits_as_there_are_hits(tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    hits = Hits([hit(f"{number}.png", uri=str(tmp_path / "a.png")) for number in range(1200)])
    hits.copy_files(tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert (names[0], names[-2]) == ("0001-0.png", "1200-1199.png")


def test_a_folder_of_copies_may_have_the_longest_name_there_is_and_a_longer_one_is_refused(tmp_path):
    longest = tmp_path / ("日" * 85)
    assert Hits().copy_files(longest).num_files == 0 and (longest / "hits.csv").is_file()
    with pytest.raises(ConfigError, match="^copies [^\n]*: File name too long; name a place"):
        Hits().copy_files(tmp_path / ("日" * 86))
