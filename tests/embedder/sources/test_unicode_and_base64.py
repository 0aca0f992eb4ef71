"""Names in two Unicode forms, images as base64 text, and JSON Lines in UTF-16."""

import base64
import codecs
import json
import unicodedata

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embedder.batch_schema import CARRIED
from embedder.config import load_config
from embedder.errors import SourceError
from embedder.sources.byte_ranges import EmbeddedFile
from embedder.sources.fetch import Fetcher
from embedder.sources.listing import list_sources

NAMES = ("café.jpg", "Ångström.jpg", "かがみ.jpg", "한글.jpg", "plain.jpg")
JPEG = base64.b64encode(b"\xff\xd8\xff" + bytes(range(200))).decode()


def composed(name):
    return unicodedata.normalize("NFC", name)


def decomposed(name):
    return unicodedata.normalize("NFD", name)


def joined(folder, table):
    join = {"path": str(table), "on": {"id": "file"}, "columns": ["price"]}
    config = load_config(overrides={"source": [{"path": str(folder)}], "join": [join]})
    rows = [row for part in list_sources(config.source, joins=config.join) for row in part.to_pylist()]
    return {row["item_id"]: row[CARRIED + "price"] for row in rows}


@pytest.mark.parametrize("in_folder", [composed, decomposed])
def test_a_join_finds_the_key_in_the_other_unicode_form(tmp_path, make_files, in_folder):
    in_table = decomposed if in_folder is composed else composed
    folder = make_files({in_folder(name): b"x" for name in NAMES})
    table = tmp_path / "t.csv"
    table.write_text("file,price\n" + "".join(f"{in_table(name)},{number}\n" for number, name in enumerate(NAMES, 1)))
    assert joined(folder, table) == {in_folder(name): number for number, name in enumerate(NAMES, 1)}


def test_twins_keep_their_own_row_and_file(tmp_path, make_files, list_items):
    folder = make_files({composed("é.jpg"): b"1", decomposed("é.jpg"): b"22"})
    table = tmp_path / "t.csv"
    table.write_text(f"file,price\n{composed('é.jpg')},1\n{decomposed('é.jpg')},2\n")
    assert joined(folder, table) == {composed("é.jpg"): 1, decomposed("é.jpg"): 2}
    rows = list_items(write_rows(folder, [composed("é.jpg"), decomposed("é.jpg")]), columns={"image": "image"})
    assert [rows[form("é.jpg")]["size_bytes"] for form in (composed, decomposed)] == [1, 2]


@pytest.mark.parametrize("of_image", [composed, decomposed])
def test_a_caption_file_in_the_other_unicode_form_belongs_to_its_image(make_files, list_items, of_image):
    of_caption = decomposed if of_image is composed else composed
    captions = {of_caption(name.replace(".jpg", ".txt")): "text" for name in NAMES}
    between = {"cafe.jpg": b"x", "cafz.jpg": b"x", "caféa.jpg": b"x", "Z.jpg": b"x"}
    folder = make_files({of_image(name): b"x" for name in NAMES} | captions | between)
    rows = list_items(folder)
    assert set(rows) == {*map(of_image, NAMES), *between}
    found = {name: row["caption_uri"] and row["caption_uri"].rpartition("/")[2] for name, row in rows.items()}
    expected = {of_image(name): of_caption(name.replace(".jpg", ".txt")) for name in NAMES}
    assert found == expected | dict.fromkeys(between)


def test_a_caption_file_belongs_to_none_where_two_are_meant(make_files, list_items):
    ohm, composed_e, decomposed_e = "\u2126", composed("é"), decomposed("é")
    files = {f"a/{composed_e}.jpg": b"1", f"a/{decomposed_e}.jpg": b"2", f"a/{decomposed_e}.txt": "own"}
    files |= {f"b/{composed_e}.jpg": b"1", f"b/{composed_e}.txt": "own", f"b/{decomposed_e}.txt": "no one's"}
    files |= {f"c/{ohm}.jpg": b"1", "c/\u03a9.txt": "of the Greek letter, equal in NFC"}
    files |= {f"d{composed_e}/x.jpg": b"1", f"d{decomposed_e}/x.txt": "another folder's"}
    rows = list_items(make_files(files))
    captions = {name: row["caption_uri"] and row["caption_uri"].rpartition("/root/")[2] for name, row in rows.items()}
    assert captions == {
        f"a/{composed_e}.jpg": None,
        f"a/{decomposed_e}.jpg": f"a/{decomposed_e}.txt",
        f"b/{composed_e}.jpg": f"b/{composed_e}.txt",
        f"c/{ohm}.jpg": "c/\u03a9.txt",
        f"d{composed_e}/x.jpg": None,
        f"b/{decomposed_e}.txt": None,
        f"d{decomposed_e}/x.txt": None,
    }, "a caption file of no image is an item of its own here"


@pytest.mark.parametrize("in_folder", [composed, decomposed])
def test_a_tables_path_finds_the_file_in_the_other_unicode_form(make_files, list_items, in_folder):
    in_table = decomposed if in_folder is composed else composed
    folder = make_files({in_folder(name): b"x" for name in NAMES})
    rows = list_items(write_rows(folder, map(in_table, NAMES)), columns={"image": "image"})
    assert {row["uri"] for row in rows.values()} == {f"{folder}/{in_folder(name)}" for name in NAMES}
    assert list(rows) == [in_table(name) for name in NAMES], "an id is what the table says"


@pytest.mark.parametrize("in_folder", [composed, decomposed])
def test_a_structs_path_finds_the_file_in_the_other_unicode_form(make_files, list_items, in_folder):
    in_table = decomposed if in_folder is composed else composed
    folder = make_files({in_folder(f"ü/{name}"): name for name in NAMES})
    paths = [in_table(f"ü/{name}") for name in NAMES]
    images = pa.StructArray.from_arrays([pa.nulls(len(paths), pa.binary()), pa.array(paths)], ["bytes", "path"])
    pq.write_table(pa.table({"id": NAMES, "image": images}), folder / "t.parquet")
    rows = list_items(folder / "t.parquet", columns={"id": "id", "image": "image"})
    embedded = EmbeddedFile(str(folder))
    with Fetcher() as fetcher:
        for name in NAMES:
            for known in (None, embedded._replace(modified=rows[name]["modified"])):
                with fetcher.fetch(rows[name]["uri"], max_bytes=99, embedded=known) as fetched:
                    assert fetched.path.read_text() == name
    assert not [row for row in rows.values() if "missing" in row["modified"]]


def write_rows(folder, images, encoding="utf-8"):
    path = folder / "t.jsonl"
    path.write_text("".join(json.dumps({"image": image}, ensure_ascii=False) + "\n" for image in images), encoding)
    return path


@pytest.mark.parametrize(
    "text",
    [JPEG, JPEG.replace("+", "-").replace("/", "_"), f"data:image/jpeg;base64,{JPEG}", f"DATA:image/png,{JPEG}",
     "data:,", f"{JPEG[:76]}\n{JPEG[76:]}", base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(99)).decode(),
     base64.b64encode(b"GIF89a" + bytes(99)).decode(), base64.b64encode(b"RIFF1234WEBP" + bytes(99)).decode(),
     base64.b64encode(b"II*\x00" + bytes(99)).decode(), base64.b64encode(b"MM\x00*" + bytes(99)).decode(),
     JPEG[:200] * 5000],
)  # fmt: skip
def test_an_image_as_base64_text_is_a_permanent_reject_that_says_so(make_files, list_items, text):
    ((item_id, row),) = list_items(write_rows(make_files({}), [text]), columns={"image": "image"}).items()
    assert row["error_type"] == "UnsupportedUri" and "from_base64" in row["error"]
    assert max(map(len, (item_id, row["uri"], row["error"]))) < 400


@pytest.mark.parametrize("name", ["/9j/a.jpg", "iVBORw0KGgo.png", "R0lGOD/" + "a" * 80 + ".gif", "UklGR"])
def test_a_name_that_begins_like_base64_is_a_name(make_files, list_items, name):
    (row,) = list_items(write_rows(make_files({}), [name]), columns={"image": "image"}).values()
    assert row["error_type"] is None and row["uri"].endswith(name)


@pytest.mark.parametrize(
    ("encoding", "mark"),
    [("utf-8", b""), ("utf-8", codecs.BOM_UTF8), ("utf-16-le", codecs.BOM_UTF16_LE), ("utf-16-be", codecs.BOM_UTF16_BE),
     ("utf-32-le", codecs.BOM_UTF32_LE), ("utf-32-be", codecs.BOM_UTF32_BE)],
)  # fmt: skip
def test_json_lines_are_read_in_the_encoding_of_their_mark(make_files, list_items, encoding, mark):
    path = write_rows(make_files({}), ["ö.jpg", "漢.jpg", "😀.jpg"], encoding)
    path.write_bytes(mark + path.read_bytes())
    assert list(list_items(path, columns={"image": "image"})) == ["ö.jpg", "漢.jpg", "😀.jpg"]


def test_json_lines_in_broken_utf_16_are_refused(make_files, list_items):
    path = (
        make_files({"t.jsonl": codecs.BOM_UTF16_LE + '{"image": "a.jpg"}\n'.encode("utf-16-le") + b"\x00"}) / "t.jsonl"
    )
    with pytest.raises(SourceError, match="not UTF-16"):
        list_items(path, columns={"image": "image"})
