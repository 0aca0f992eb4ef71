import os
import re
import socket
import subprocess
import time
from itertools import product
from pathlib import Path

import pytest

from embedder.config_toml.run_sections import SourceConfig
from embedder.errors import SourceError
from embedder.sources import local_listing
from embedder.sources.listing import list_sources
from embedder.sources.listing_schema import time_text, without_change_time
from embedder.sources.local_listing import stem_of


def test_ids_are_relative_posix_paths_with_their_suffix(make_files, list_items):
    root = make_files({"cats/a.jpg": b"AA", "b.png": b"B", "cats/deep/er/c": b""})
    rows = list_items(root)
    assert list(rows) == ["b.png", "cats/a.jpg", "cats/deep/er/c"]
    assert rows["cats/a.jpg"] == {
        "item_id": "cats/a.jpg",
        "source": "",
        "uri": f"{root}/cats/a.jpg",
        "size_bytes": 2,
        "modified": rows["cats/a.jpg"]["modified"],
        "caption": None,
        "caption_uri": None,
        "error_type": None,
        "error": None,
        "is_media": True,
        "described_by": None,
    }
    assert rows["cats/deep/er/c"]["size_bytes"] == 0
    assert rows["cats/deep/er/c"]["is_media"] is False, "its content may show that it is no image"


def test_modified_is_utc_with_nanoseconds_and_covers_the_caption(make_files, list_items):
    root = make_files({"a.jpg": b"A", "a.txt": "a cat", "b.jpg": b"B"})
    os.utime(root / "a.jpg", ns=(0, 1_700_000_000_123_456_789))
    os.utime(root / "a.txt", ns=(0, 1_700_000_001_000_000_001))
    os.utime(root / "b.jpg", ns=(0, 1))
    rows = list_items(root)
    bare = {name: without_change_time(row["modified"]) for name, row in rows.items()}
    assert bare["a.jpg"] == "2023-11-14T22:13:20.123456789Z|2023-11-14T22:13:21.000000001Z"
    assert bare["b.jpg"] == "1970-01-01T00:00:00.000000001Z"
    assert re.fullmatch(r"\S+Z[+-]\d+\|\S+Z[+-]\d+", rows["a.jpg"]["modified"]), "with the change time of each"
    os.utime(root / "a.txt", ns=(0, 1_700_000_001_000_000_002))
    assert list_items(root)["a.jpg"]["modified"] != rows["a.jpg"]["modified"]


@pytest.mark.parametrize("mtime_ns", [-1, -(10**18), 10**30, 253402300800 * 10**9])
def test_times_beyond_the_calendar_are_written_all_the_same(mtime_ns):
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z|@-?\d+ns", time_text(mtime_ns))
    assert time_text(-1) == "1969-12-31T23:59:59.999999999Z"


OF_ONE_STEM = {"a.jpg": "a.txt", "a.png": "a.txt", "a.b.jpg": None, "a-1.jpg": None, "sub/a.jpg": None}
ALONE = dict.fromkeys(("b.txt", "b.json", "c.json", ".hidden", ".txt"))  # captions of nothing are items


@pytest.mark.parametrize(
    ("others", "path", "captions"),
    [
        (("a.txt", "a.json"), "", OF_ONE_STEM),  # .txt comes before .json
        (("a.json",), "", {"a.jpg": "a.json"}),
        (("x.TXT",), "", ALONE | {"x.JPG": "x.TXT"}),
        (("x/a.txt", "y/c.png"), "*/*.jpg", {"x/a.jpg": "x/a.txt", "x/a.k.jpg": None, "y/b.jpg": None}),
        (("a.txt", "b.jpg"), "a.jpg", {"a.jpg": "a.txt"}),
        (("X.TXT",), "X.JPG", {"X.JPG": "X.TXT"}),
        (("X.JSON",), "*.JPG", {"X.JPG": "X.JSON"}),
        (("a.jpg",), "a.txt", {"a.txt": None}),
    ],
)
def test_a_caption_belongs_to_every_file_of_its_stem_in_its_folder(make_files, list_items, others, path, captions):
    root = make_files(dict.fromkeys((*captions, *others), "x"))
    rows = list_items(root / path, **({"kind": "files"} if "*" in path else {}))
    assert {item: row["caption_uri"] for item, row in rows.items()} == {
        item: caption and f"{root}/{caption}" for item, caption in captions.items()
    }


@pytest.mark.parametrize(
    "name",
    ["a b/c d.jpg", "ü/ñ.jpg", "100%.jpg", "a#b.jpg", "x?.jpg", "a\nb.jpg", "日本.jpg", "a#row=3", "~", "{0..2}.jpg"],
)
def test_strange_names_are_listed_as_they_are(make_files, list_items, name):
    root = make_files({name: b"x"})
    rows = list_items(root)
    assert list(rows) == [name]
    assert rows[name]["uri"] == f"{root}/{name}"
    assert rows[name]["error_type"] is None


def test_a_name_that_is_no_utf8_is_a_readable_reject_and_spoils_no_neighbour(make_files, list_items):
    root = make_files({"ok.jpg": b"x", r"caf\xe9.jpg": b"spelled the same"})
    Path(os.fsdecode(os.fsencode(root) + b"/caf\xe9.jpg")).write_bytes(b"x")
    Path(os.fsdecode(os.fsencode(root) + b"/d\xff")).mkdir()
    Path(os.fsdecode(os.fsencode(root) + b"/d\xff/in.jpg")).write_bytes(b"x")
    Path(os.fsdecode(os.fsencode(root) + rb"/\xe9" + b"\xff")).write_bytes(b"reads as")
    Path(os.fsdecode(os.fsencode(root) + b"/\xe9\xff")).write_bytes(b"this one")
    rows = list_items(root)
    errors = [(re.sub("-[0-9a-f]{8}$", "-HASH", item), row["error_type"]) for item, row in rows.items()]
    assert sorted(errors) == [
        (r"\xe9\xff#name-not-utf8-HASH", "NameNotUtf8"),
        (r"\xe9\xff#name-not-utf8-HASH", "NameNotUtf8"),
        (r"caf\xe9.jpg", None),
        (r"caf\xe9.jpg#name-not-utf8-HASH", "NameNotUtf8"),
        (r"d\xff/in.jpg#name-not-utf8-HASH", "NameNotUtf8"),
        ("ok.jpg", None),
    ]


def test_links_inside_the_root_are_items_and_links_out_of_it_are_rejects(make_files, list_items, tmp_path):
    root = make_files({"real/a.jpg": b"AAA"})
    (tmp_path / "secret.jpg").write_bytes(b"S")
    (tmp_path / "root-but-longer").mkdir()
    (tmp_path / "root-but-longer" / "x.jpg").write_bytes(b"S")
    (root / "in.jpg").symlink_to("real/a.jpg")
    (root / "out.jpg").symlink_to(tmp_path / "secret.jpg")
    (root / "out").symlink_to(tmp_path)
    (root / "note.txt").symlink_to("../secret.jpg")
    (root / "sly.jpg").symlink_to("../root-but-longer/x.jpg")
    (root / "via.jpg").symlink_to("out.jpg")
    (root / "broken.jpg").symlink_to("nowhere")
    (root / "loop").symlink_to("loop")
    (root / "self").symlink_to(".")
    (root / "real" / "up").symlink_to("..")
    rows = list_items(root)
    assert {item: row["error_type"] for item, row in rows.items()} == {
        "real/a.jpg": None,
        "in.jpg": None,
        "out.jpg": "LinkOutsideRoot",
        "out": "LinkOutsideRoot",
        "sly.jpg": "LinkOutsideRoot",
        "note.txt": "LinkOutsideRoot",
        "via.jpg": "LinkOutsideRoot",
        "broken.jpg": "BrokenLink",
        "loop": "BrokenLink",
    }
    assert rows["in.jpg"]["size_bytes"] == 3


def test_a_root_that_is_itself_a_link_is_followed(make_files, list_items, tmp_path):
    root = make_files({"a.jpg": b"A"})
    (root / "b.jpg").symlink_to(root / "a.jpg")
    (tmp_path / "link").symlink_to(root)
    rows = list_items(tmp_path / "link")
    assert {item: row["error_type"] for item, row in rows.items()} == {"a.jpg": None, "b.jpg": None}


def test_pipes_and_sockets_are_rejects_that_nobody_opens(make_files, list_items):
    root = make_files({"a.jpg": b"A", "p.jpg": b"P"})
    os.mkfifo(root / "pipe.jpg")
    os.mkfifo(root / "p.txt")  # a caption that would hang its reader
    here = Path.cwd()
    with socket.socket(socket.AF_UNIX) as unix:
        os.chdir(root)  # socket paths are short
        unix.bind("s.jpg")
        os.chdir(here)
        rows = list_items(root)
    assert {item: row["error_type"] for item, row in rows.items()} == {
        "a.jpg": None,
        "p.jpg": None,
        "p.txt": "NotAFile",
        "pipe.jpg": "NotAFile",
        "s.jpg": "NotAFile",
    }
    assert "named pipe" in rows["pipe.jpg"]["error"]
    assert rows["p.jpg"]["caption_uri"] is None


def test_a_file_deleted_while_it_is_listed_is_left_out_but_a_vanished_root_is_an_error(make_files, monkeypatch):
    root = make_files({"a.jpg": b"A", "b.jpg": b"B", "sub/c.jpg": b"C"})
    lstat = os.lstat

    def deleting(path, **settings):
        if str(path).endswith("a.jpg"):
            (root / "b.jpg").unlink()
        return lstat(path, **settings)

    monkeypatch.setattr(local_listing.os, "lstat", deleting)
    entries = local_listing.walk_folder(str(root), lambda folder: False)
    assert [entry.name for entry in entries] == ["a.jpg", "sub/c.jpg"]
    monkeypatch.undo()
    entries = local_listing.walk_folder(str(root), lambda folder: False)
    assert next(entries).name == "a.jpg"
    root.rename(root.with_name("unmounted"))
    with pytest.raises(SourceError, match="No such file"):
        list(entries)


def test_an_empty_folder_yields_nothing_and_a_missing_one_is_an_error(make_files, list_items, tmp_path):
    assert list_items(make_files({})) == {}
    with pytest.raises(SourceError, match=r"missing: there is no such file or folder; check the path"):
        list_items(tmp_path / "missing")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SourceError, match="neither a regular file nor a folder"):
        list_items(tmp_path / "pipe")


def test_a_pattern_enters_no_linked_folder_and_no_folder_that_it_can_not_match(make_files, list_items, tmp_path):
    root = make_files({"a.jpg": b"A", "sub/b.jpg": b"B", "sub/deep/c.jpg": b"C", ".hidden/d.jpg": b"D"})
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "s.jpg").write_bytes(b"S")
    (root / "loop").symlink_to("../root")
    (root / "out").symlink_to(tmp_path / "secret")
    for pattern, found in (
        ("**/*.jpg", {"a.jpg", "sub/b.jpg", "sub/deep/c.jpg"}),
        ("**", {"a.jpg", "sub/b.jpg", "sub/deep/c.jpg", "out"}),  # which is a reject
        ("*/*.jpg", {"sub/b.jpg"}),
        ("s*/**/c.jpg", {"sub/deep/c.jpg"}),
        (".hidden/*.jp[g]", {"d.jpg"}),
    ):
        assert set(list_items(root / pattern, kind="files")) == found, pattern


def test_a_folder_that_a_pattern_can_match_and_nobody_can_read_ends_the_listing(make_files, list_items, monkeypatch):
    """Its items would look deleted, and be retired."""
    root = make_files({"a.jpg": b"A", "closed/b.jpg": b"B", "sub/c.jpg": b"C"})
    scandir = os.scandir

    def refuse(path):
        if "closed" in str(path):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(SourceError, match=r"closed/: Permission denied; a listing must be complete"):
        list_items(root / "**/*.jpg", kind="files")
    assert set(list_items(root / "s*/*.jpg", kind="files")) == {"sub/c.jpg"}


def test_links_that_a_pattern_matches_are_held_to_its_root(make_files, list_items, tmp_path):
    root = make_files({"a.jpg": b"A", "sub/b.jpg": b"B"})
    (tmp_path / "secret.jpg").write_bytes(b"S")
    (root / "out.jpg").symlink_to(tmp_path / "secret.jpg")
    (root / "broken.jpg").symlink_to("nowhere")
    (root / "folder.jpg").mkdir()
    rows = list_items(root / "*.jpg", kind="files")
    assert {item: row["error_type"] for item, row in rows.items()} == {
        "a.jpg": None,
        "out.jpg": "LinkOutsideRoot",
        "broken.jpg": "BrokenLink",
    }


@pytest.mark.parametrize("pattern", ["[z-a]*.jpg", "*.{png,jp[z-a]}", "**/[z-a]/*.jpg"])
def test_a_pattern_with_a_range_that_runs_backwards_is_refused(make_files, list_items, pattern):
    with pytest.raises(SourceError, match=r"z-a.*correct its brackets"):
        list_items(make_files({"a.jpg": b"A", "b.png": b"B"}) / pattern, kind="files")


def test_file_urls_and_relative_paths_become_absolute(make_files, list_items, monkeypatch):
    root = make_files({"a b.jpg": b"A"}, "a folder")
    assert list_items("file://" + str(root).replace(" ", "%20"))["a b.jpg"]["uri"] == f"{root}/a b.jpg"
    assert list(list_items("file://" + str(root).replace(" ", "%20") + "/a%20b.jpg")) == ["a b.jpg"]
    monkeypatch.chdir(root.parent)
    short = "file://" + root.name.replace(" ", "%20")  # one slash too few: as a path of the working directory
    assert list_items(short)["a b.jpg"]["uri"] == f"{root}/a b.jpg"
    assert list_items("a folder/")["a b.jpg"]["uri"] == f"{root}/a b.jpg"
    monkeypatch.setenv("HOME", str(root.parent))
    assert list_items("~/a folder")["a b.jpg"]["uri"] == f"{root}/a b.jpg"


@pytest.mark.parametrize("path", ["http://host/a", "https://host/a", "ftp://c/a", "hdfs://h/a"])
def test_other_schemes_are_refused_with_the_cure(list_items, path):
    with pytest.raises(SourceError, match="a source is a local path, file://, s3://, gs:// or az://"):
        list_items(path)


@pytest.mark.medium
def test_a_folder_deeper_than_the_recursion_limit_is_listed(make_files, list_items):
    root = make_files({})
    here = Path.cwd()
    try:
        os.chdir(root)
        for _ in range(1200):
            Path("d").mkdir()
            os.chdir("d")
        Path("a.jpg").write_bytes(b"A")
        os.chdir(here)
        assert list(list_items(root)) == ["d/" * 1200 + "a.jpg"]
    finally:
        os.chdir(here)
        subprocess.run(["rm", "-rf", root / "d"], check=True)  # pytest's own cleaning is recursive and would fail


def test_thousands_of_files_are_listed_fast_and_in_order(tmp_path):
    root = tmp_path / "many"
    for folder in range(20):
        (root / f"{folder:02d}").mkdir(parents=True)
        for number in range(100):
            (root / f"{folder:02d}" / f"{number:04d}.jpg").touch()
            (root / f"{folder:02d}" / f"{number:04d}.txt").touch()
    begun_s = time.process_time()
    tables = list(list_sources([SourceConfig(path=str(root))], rows_per_chunk=600))
    taken_s = time.process_time() - begun_s
    assert [table.num_rows for table in tables] == [600, 600, 600, 200]
    ids = [item for table in tables for item in table["item_id"].to_pylist()]
    assert ids == [f"{folder:02d}/{number:04d}.jpg" for folder in range(20) for number in range(100)]
    assert taken_s < 1, "seconds of CPU"


def test_the_stem_is_that_of_the_standard_library_whatever_dots_and_slashes_there_are():
    names = ["".join(letters) for length in range(7) for letters in product("a./b", repeat=length)]
    assert [stem_of(name) for name in names] == [os.path.splitext(name)[0] for name in names]  # noqa: PTH122
