"""What describes the pictures of a folder is found in bounded memory, and whatever the Unicode form of its name."""

import json
import random
import tracemalloc
from unicodedata import normalize

import pytest

from embedder.config_toml.run_sections import SourceConfig
from embedder.sources import descriptions
from embedder.sources.captions import CaptionRules
from embedder.sources.descriptions import MATCHES, attach_descriptions
from embedder.sources.globbing import GlobMatches
from embedder.sources.listing import list_sources
from embedder.sources.local_listing import Entry, _stem_first
from embedder.sources.selection import LeftOut, Selection
from embedder.sources.takeout import EDITED

ENDS = ("", "", "(1)", "(2)", *EDITED, "-edited(1)", "(1)-edited", "-e", "-mod", " b", "b", "!", "-b", ".b")
SUFFIXES = (".jpg", ".JPG", ".png", ".HEIC", ".mp4", ".xmp", ".txt", "", ".jpg.xmp", ".png.xmp")
SUPPLEMENTS = ("", ".supplemental-metadata", ".supp", ".s", ".")


def attached(names, places, root="/photos"):
    """The files that describe each name, by place."""
    entries = iter(Entry(name, 5, "2020-01-01T00:00:00.000000000Z") for name in names)
    captions = CaptionRules(places=tuple(places))
    selection = Selection(SourceConfig(path=root), root, (), LeftOut(), captions)
    found = attach_descriptions(GlobMatches(root, entries, is_folder=True), selection)
    return {entry.name: {place: each.name for place, each in entry.described_by} for entry in found}


def make_names(chance):
    """Names that begin alike, cut and copied as Takeout does, in both Unicode forms."""
    bases = [
        "a",
        "ab",
        "a.b",
        "a-b",
        "a b",
        "IMG_1",
        "IMG_12",
        "é",
        "e",
        "x" * 36,
        "x" * 40,
        "x" * 46,
        "-edited",
        "",
        ".",
    ]
    names = set()
    for _ in range(chance.randrange(1, 15)):
        stem = chance.choice(bases) + chance.choice(("", "", "", chance.choice(ENDS)))
        suffix = chance.choice(SUFFIXES)
        copy = chance.choice(("", "", "(1)", "(2)"))
        for _ in range(chance.randrange(1, 4)):  # a picture and its copies
            names.add(stem[:47] + chance.choice(("", chance.choice(ENDS)))[: 47 - len(stem)] + copy + suffix)
        if chance.random() < 0.7:
            title = (stem + chance.choice((suffix, suffix, ".jpg")) + chance.choice(SUPPLEMENTS))[:46]
            names.add(title + copy + chance.choice((".json", ".json", ".xmp")))
    names = {normalize(chance.choice(("NFC", "NFC", "NFD")), name) for name in names}
    return sorted((name for name in names if name not in ("", ".", "..")), key=_stem_first)


@pytest.mark.medium
def test_a_folder_in_blocks_is_matched_as_the_whole(monkeypatch):
    chance, num_described = random.Random(3), 0
    for _ in range(1500):
        names = make_names(chance)
        monkeypatch.setattr(descriptions, "BLOCK_ENTRIES", len(names))
        whole = attached(names, MATCHES)
        monkeypatch.setattr(descriptions, "BLOCK_ENTRIES", 1)
        assert attached(names, MATCHES) == whole, names
        num_described += sum(map(len, whole.values()))
    assert num_described > 3000


@pytest.mark.medium
@pytest.mark.parametrize("stem", ["IMG_{:08}", "a-photo-{:06}", "2020.01.01 {:06}"])
def test_a_large_folder_takes_little_memory(stem):
    names = sorted(
        (stem.format(n) + end for n in range(6_000) for end in (".jpg", ".jpg.supplemental-metadata.json")),
        key=_stem_first,
    )
    selection = Selection(SourceConfig(path="/x"), "/x", (), LeftOut(), CaptionRules(places=("takeout", "xmp")))
    entries = (Entry(name, 5, f"2020-01-01T00:00:{n:011.8f}Z") for n, name in enumerate(names))
    tracemalloc.start()
    try:
        found = attach_descriptions(GlobMatches("/x", entries, is_folder=True), selection)
        assert sum(len(entry.described_by) for entry in found) == 6_000
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 20, "5 MB with the names of the whole folder"


@pytest.mark.parametrize(("form", "other"), [("NFC", "NFD"), ("NFD", "NFC")])
def test_names_that_differ_by_their_unicode_form_are_one(form, other):
    edited, original = (normalize(form, f"Café{end}.jpg") for end in ("-modifié", ""))
    json_file, xmp = (normalize(other, f"Café.jpg{end}") for end in (".json", ".xmp"))
    names = sorted([edited, original, json_file, xmp], key=_stem_first)
    assert attached(names, MATCHES) == {
        edited: {"takeout": json_file},
        original: {"takeout": json_file, "xmp": xmp},
    }
    both = sorted([original, normalize(other, original), json_file], key=_stem_first)
    found = attached(both, MATCHES)
    assert found[normalize(other, original)] == {"takeout": json_file}, "its own form comes first"


def test_the_form_of_a_name_decides_where_both_are_there():
    files = [normalize(form, "Café.jpg.json") for form in ("NFC", "NFD")]
    pictures = [normalize(form, "Café.jpg") for form in ("NFC", "NFD")]
    found = attached(sorted([*files, *pictures], key=_stem_first), MATCHES)
    assert found == {picture: {"takeout": file} for picture, file in zip(pictures, files, strict=True)}


def test_the_table_of_an_imagefolder_counts_for_names_before_and_after_it(make_files, monkeypatch):
    monkeypatch.setattr(descriptions, "BLOCK_ENTRIES", 1)
    names = ("a.jpg", "z.jpg", "in/b.jpg")
    table = "".join(json.dumps({"file_name": name, "text": f"of {name}"}) + "\n" for name in names)
    root = make_files({**dict.fromkeys(names, b"\xff\xd8"), "metadata.jsonl": table})
    listed = list_sources([SourceConfig(path=str(root))], captions=CaptionRules(places=("imagefolder",)))
    found = {row["item_id"]: row["described_by"] for each in listed for row in each.to_pylist()}
    assert found == {name: json.dumps({"imagefolder": f"of {name}"}) for name in names}


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_names_in_the_table_of_an_imagefolder_may_be_written_otherwise(make_files, form):
    names = {"é.jpg": "é.jpg", "in é/a.jpg": "./in é/a.jpg", "b.jpg": "./b.jpg", "in/c.jpg": "in//c.jpg"}
    written = [(normalize({"NFC": "NFD", "NFD": "NFC"}[form], text), name) for name, text in names.items()]
    table = "".join(json.dumps({"file_name": text, "text": f"of {name}"}) + "\n" for text, name in written)
    own = {name: normalize(form, name) for name in names}
    root = make_files({**dict.fromkeys(own.values(), b"\xff\xd8"), "metadata.jsonl": table})
    listed = list_sources([SourceConfig(path=str(root))], captions=CaptionRules(places=("imagefolder",)))
    found = {row["item_id"]: row["described_by"] for each in listed for row in each.to_pylist()}
    assert found == {own[name]: json.dumps({"imagefolder": f"of {name}"}) for name in names}


@pytest.mark.parametrize("table", ["metadata.csv", "metadata.jsonl"])
def test_an_imagefolder_may_be_written_on_windows(make_files, table):
    names = {"in\\a.jpg": "in/a.jpg", ".\\in\\b\\c.jpg": "in/b/c.jpg", "own\\name.jpg": "own\\name.jpg"}
    names |= {"in/both.jpg": "in/both.jpg", "in\\both.jpg": "in\\both.jpg"}
    rows = [{"file_name": written, "text": f"of {name}"} for written, name in names.items()]
    lines = list(map(json.dumps, rows))
    if table.endswith("csv"):
        lines = ["file_name,text", *(",".join(row.values()) for row in rows)]
    root = make_files({**dict.fromkeys(names.values(), b"\xff\xd8"), table: "".join(f"{line}\r\n" for line in lines)})
    listed = list_sources([SourceConfig(path=str(root))], captions=CaptionRules(places=("imagefolder",)))
    found = {row["item_id"]: row["described_by"] for each in listed for row in each.to_pylist()}
    assert found == {name: json.dumps({"imagefolder": f"of {name}"}) for name in names.values()}
