"""Files that are no items: recognised by name where that is enough, chosen by patterns, and counted."""

import os

import pytest
import samples

from embedder.config_toml.run_sections import SourceConfig
from embedder.errors import SourceError
from embedder.sources.file_names import shown_suffix, sort_of, suffix_of
from embedder.sources.listing import list_sources
from embedder.sources.selection import LeftOut, compile_patterns


def listed(path, own=(), **settings):
    """Ids of the items, and what was left out."""
    left_out = LeftOut()
    tables = list_sources([SourceConfig(path=str(path), **settings)], own=own, left_out=left_out)
    return [item for table in tables for item in table["item_id"].to_pylist()], left_out


@pytest.mark.parametrize(
    ("sort", "names"),
    [
        ("media", ["a.jpg", "A.JPG", "x/a.Heic", "a.dng", "a b.mp4", ".hidden.jpg", "a.pdf.jpg", "trash/a.jpg"]),
        ("unknown", ["a", ".hidden", "a.", "a.xyz", "jpg", "a.txt", "a.json", "a.jpg_", "…", "a.jpg~", "..", "a.1"]),
        ("other", ["notes.md", "x/Scan.PDF", "a.tar.gz", "a.jpg.zip", "song.mp3", "a.jpg.bak"]),
        ("sidecar", ["IMG_1.AAE", "a.xmp", "a.jpg.xmp", "a.srt"]),
        ("sidecar", ["a.jpg.json", "a.HEIC.json", "a.mov.supplemental-metadata.json", "a.jpg.supplemental-meta.json"]),
        ("sidecar", ["a.jpg.s.json", "a.jpg(1).json", "a.jpg.supplemental-metadata(2).json"]),
        ("unknown", ["a.s.json", "metadata.json", "a.b.json", "jpg.json", "a.supplemental-metadata.json"]),
        ("junk", [".DS_Store", "x/.ds_store", "Thumbs.db", "DESKTOP.INI", "._a.jpg", "x/._b", "Icon\r", ".picasa.ini"]),
        ("junk", ["@eaDir/a.jpg", "x/@eaDir/a.jpg/b.jpg", ".Trash-1000/a.jpg", ".Trashes/501/a.jpg", "__MACOSX/a.jpg"]),
        ("junk", [".git/config", "$RECYCLE.BIN/a.jpg", "System Volume Information/x", "lost+found/#1", "~$a.docx"]),
    ],
)  # fmt: skip
def test_a_name_decides_what_need_not_be_read(sort, names):
    assert {name: sort_of(name) for name in names} == dict.fromkeys(names, sort)


@pytest.mark.parametrize(
    ("name", "suffix", "shown"),
    [
        ("a.JPG", ".jpg", ".jpg"), ("x.y/a", "", "no suffix"), (".hidden", "", "no suffix"), ("a.tar.gz", ".gz", ".gz"),
        ("a.\x1b[31m", ".\x1b[31m", "no suffix"), ("a.ünï", ".ünï", "no suffix"),
        ("a." + "x" * 99, "." + "x" * 99, "no suffix"),
    ],
)  # fmt: skip
def test_suffixes_are_shown_only_where_they_are_plain(name, suffix, shown):
    assert (suffix_of(name), shown_suffix(name)) == (suffix, shown)


@pytest.mark.parametrize(
    ("pattern", "means", "not_means"),
    [
        ("*.jpg", ["a.jpg", "x/y/A.JPG"], ["a.jpeg", "a.jpg.txt"]),
        ("private", ["private", "private/a.jpg", "x/private/y/a.jpg"], ["privately/a.jpg", "not private"]),
        ("private/", ["private/a.jpg", "x/private/a.jpg"], ["private"]),
        ("/private", ["private/a.jpg"], ["x/private/a.jpg"]),
        ("2024/*.jpg", ["2024/a.jpg"], ["x/2024/a.jpg", "2024/x/a.jpg"]),
        ("2024/**", ["2024/a.jpg", "2024/x/a.jpg"], ["2024", "x/2024/a.jpg"]),
        ("**/raw/*", ["raw/a", "x/y/raw/a"], ["rawer/a"]),
        ("x/**/a.jpg", ["x/a.jpg", "x/y/z/a.jpg"], ["y/x/a.jpg"]),
        ("IMG_?.{jpg,png}", ["IMG_1.jpg", "d/img_2.PNG"], ["IMG_10.jpg", "IMG_1.gif"]),
        ("[ab].jpg", ["a.jpg", "b.jpg"], ["c.jpg"]),
        ("[!ab].jpg", ["c.jpg"], ["a.jpg"]),
        ("été*.jpg", ["été à.jpg"], ["ete.jpg"]),
        ("**", ["a", "x/y"], []),
        ("a+b(1).jpg", ["a+b(1).jpg"], ["aab1.jpg"]),
    ],
)
def test_patterns_are_read_as_in_a_gitignore(pattern, means, not_means):
    patterns = compile_patterns([pattern], "here")
    assert [name for name in means if not patterns.match(name)] == []
    assert [name for name in not_means if patterns.match(name)] == []


@pytest.mark.parametrize("pattern", ["", "/", "[z-a]"])
def test_a_pattern_that_means_nothing_is_refused(make_files, pattern):
    with pytest.raises(SourceError, match="exclude"):
        listed(make_files({"a.jpg": b"A"}), exclude=[pattern])


def test_a_pattern_that_takes_others_back_is_refused_as_it_would_take_nothing_back(make_files):
    root = make_files(dict.fromkeys(("a.jpg", "b.jpg", "!c.jpg"), b"A"))
    with pytest.raises(SourceError, match=r"exclude: '!a\.jpg': unlike in a \.gitignore.* or write '\?a\.jpg'"):
        listed(root, exclude=["*.jpg", "!a.jpg"])
    assert listed(root, exclude=["?c.jpg"])[0] == ["a.jpg", "b.jpg"]


def test_junk_sidecars_and_other_files_are_no_items_and_are_counted(make_files):
    names = (
        "a.jpg",
        "a.AAE",
        ".DS_Store",
        "._a.jpg",
        "x/Thumbs.db",
        "@eaDir/a.jpg",
        "@eaDir/b/c.jpg",
        "notes.md",
        "b.pdf",
        "c.pdf",
    )
    ids, left_out = listed(make_files(dict.fromkeys(names, b"x")))
    assert ids == ["a.jpg"]
    assert (left_out.counts["junk"], left_out.counts["sidecar"], dict(left_out.others)) == (4, 1, {".md": 1, ".pdf": 2})
    assert left_out.lines() == ["3 other files left out: 2 .pdf, 1 .md"]


def test_a_folder_that_is_left_out_is_not_even_opened(make_files, monkeypatch):
    root = make_files({"a.jpg": b"A", "lost+found/x": b"", "private/b.jpg": b"B"})
    scandir = os.scandir

    def refuse(path):
        if "lost" in str(path) or "private" in str(path):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    for pattern in ("private", "private/", "private/**"):
        assert listed(root, exclude=[pattern])[0] == ["a.jpg"]
    with pytest.raises(SourceError, match=r"root/private/: Permission denied; a listing must be complete"):
        listed(root)


def test_include_restricts_and_names_kinds_that_are_left_out_otherwise(make_files):
    names = ("a.jpg", "x/b.jpg", "x/c.md", "x/.DS_Store", "x/d", "e.pdf", "._f.pdf")
    root = make_files(dict.fromkeys(names, b"x"))
    assert listed(root, include=["x"])[0] == ["x/b.jpg", "x/d"]
    assert listed(root, include=["x", "*.md"])[0] == ["x/b.jpg", "x/c.md", "x/d"]
    assert listed(root, include=["*.pdf"])[0] == ["e.pdf"]
    assert listed(root, include=["**"])[0] == ["a.jpg", "x/b.jpg", "x/d"]
    assert listed(root, include=["*.jpg"], exclude=["x"])[0] == ["a.jpg"]


def test_a_caption_goes_where_its_image_goes(make_files, list_items):
    names = ("a.jpg", "a.txt", "b.jpg", "b.txt", "c.pdf", "c.txt", "alone.txt")
    root = make_files(dict.fromkeys(names, "x"))
    rows = list_items(root, include=["*.jpg"])
    assert {item: row["caption_uri"] for item, row in rows.items()} == {
        "a.jpg": f"{root}/a.txt", "b.jpg": f"{root}/b.txt",
    }  # fmt: skip
    assert set(list_items(root, exclude=["b.jpg"])) == {"a.jpg", "c.txt", "alone.txt"}, "b.txt goes with its image"
    rows = list_items(root, exclude=["a.txt"])
    assert rows["a.jpg"]["caption_uri"] is None and rows["b.jpg"]["caption_uri"] is not None


def test_a_file_that_is_named_is_an_item_whatever_its_name_says(make_files, list_items):
    picture = samples.image_bytes(0)
    root = make_files({"notes.md": picture, "Thumbs.db": picture})
    for name in ("notes.md", "Thumbs.db"):
        assert list_items(root / name, kind="files")[name]["is_media"] is True


def test_a_pattern_as_path_leaves_the_same_out(make_files):
    root = make_files({"x/a.jpg": b"A", "x/._a.jpg": b"M", "x/b.pdf": b"P", "@eaDir/c.jpg": b"C"})
    ids, left_out = listed(f"{root}/*/*", kind="files")
    assert (ids, left_out.counts["junk"], dict(left_out.others)) == (["x/a.jpg"], 1, {".pdf": 1})


STORE = {"s/store.json": "{}", "s/runs/1/run.json": "{}", "s/items/p.parquet": b"", "s/.lock": "", "s/sheet.png": b""}


def test_a_store_is_never_listed_whosever_it_is(make_files):
    ids, left_out = listed(make_files({"a.jpg": b"A", **STORE, "t/store.json": "{}", "t/runs": "no folder"}))
    assert (ids, left_out.counts["own"]) == (["a.jpg", "t/runs", "t/store.json"], 1)


def test_what_the_run_itself_writes_is_never_listed_also_through_a_link(make_files, tmp_path):
    root = make_files({"a.jpg": b"A", "log": "L", "s/.lock": "", "s2/b.jpg": b"B"})
    (tmp_path / "link").symlink_to(root)
    for path in (root, tmp_path / "link"):
        for own in (root, tmp_path / "link"):
            assert listed(path, own=[f"{own}/log", f"{own}/s", "s3://bucket/x"])[0] == ["a.jpg", "s2/b.jpg"]


def test_buckets_leave_out_the_same(bucket, list_items):
    bucket.objects |= {
        f"photos/{name}": b"x" for name in (*STORE, "a.jpg", ".DS_Store", "@eaDir/a.jpg", "b.pdf", "x/c.jpg")
    }
    bucket.objects["photos/mine/.lock"] = b""
    ids, left_out = listed("s3://team/photos", own=["s3://team/photos/mine"])
    assert (ids, left_out.counts["junk"], dict(left_out.others)) == (["a.jpg", "x/c.jpg"], 2, {".pdf": 1})
    assert listed("s3://team/photos", exclude=["x/", "mine"])[0] == ["a.jpg"]


def test_junk_beside_tars_and_tables_does_not_tell_the_kind_of_a_folder(make_tar, tmp_path, list_items, make_files):
    make_tar([("1.jpg", b"A")], "set/a.tar")
    make_files(dict.fromkeys(("Thumbs.db", "desktop.ini", "@eaDir/a.jpg", "._a.tar"), b"x") | STORE, "set")
    assert list(list_items(tmp_path / "set")) == ["a/1"]
    make_files({"t.csv": "id,text\n1,hello\n", "Thumbs.db": b"x"} | STORE, "tables")
    assert list(list_items(tmp_path / "tables", columns={"id": "id", "caption": "text"})) == ["1"]


def test_patterns_for_what_is_no_folder_of_files_are_refused(make_tar, list_items):
    with pytest.raises(SourceError, match="`include` and `exclude` choose files of a folder, and this is webdataset"):
        list_items(make_tar([("1.jpg", b"A")]), exclude=["*.png"])
