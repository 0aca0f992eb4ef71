"""Google Takeout's folders: each `.json` at its picture, none at a wrong one."""

import json
import random
from datetime import UTC, datetime

import pytest

from embedder.config_toml.run_sections import SourceConfig
from embedder.sources.captions import CaptionRules, read_takeout
from embedder.sources.listing import list_sources
from embedder.sources.takeout import EDITED, match_names, medium_values

NUM_FILES = 500
TAKEN = {}
"""Time of each `.json`, by its seconds."""
TAKEOUT = CaptionRules(alone=False, places=("sidecar", "takeout"))
SUPPLEMENT = ".supplemental-metadata"


def json_name(title, number=None, supplement=SUPPLEMENT):
    """Name a `.json` as Takeout does: cut at 46 characters, then the number of the copy."""
    return (title + supplement)[:46] + (f"({number})" if number else "") + ".json"


def media_name(title, end="", number=None):
    stem, _, suffix = title.rpartition(".")
    return (stem + end)[:47] + (f"({number})" if number else "") + f".{suffix}"


def described(title, copy):
    """Content of a `.json`: each another caption, time and place."""
    number = len(TAKEN)
    seconds = str(1_600_000_000 + 86_401 * number)
    TAKEN[seconds] = datetime.fromtimestamp(int(seconds), UTC).replace(tzinfo=None).isoformat()
    place = {"latitude": 1 + number / 16, "longitude": -number / 16, "altitude": 0.0}
    said = {"title": title, "description": f"{title} &amp; {copy}", "geoData": place}
    return json.dumps(said | {"photoTakenTime": {"timestamp": seconds, "formatted": "13.09.2020, 12:26:40 UTC"}})


def make_folder():
    """Make names as Takeout writes them, and for each picture the title of its `.json` with the copy's number."""
    chance = random.Random(7)
    files, expected = {}, {}
    number = 0
    while len(files) + len(expected) < NUM_FILES:
        number += 1
        length = chance.choice((0, 0, 0, 20, 29, 30, 31, 32, 33, 34, 35, 36, 40, 60))
        title = f"IMG_{number:05}_{'x' * length}.{chance.choice(('jpg', 'HEIC', 'PNG'))}"
        supplement = chance.choice((SUPPLEMENT, ""))
        for copy in (None, 1, 2)[: chance.choice((1, 1, 2, 3))]:
            name = json_name(title, copy, supplement)
            files[name] = described(title, copy)
            expected[media_name(title, number=copy)] = name
            if chance.random() < 0.3:
                expected[media_name(title, chance.choice(EDITED), copy)] = name
            if title.endswith("HEIC") and length < 36:
                expected[media_name(title.replace("HEIC", "MP4"), number=copy)] = name
    for title in ("own(1).jpg", "other(1).jpg"):  # the number is the title's own: before the suffix of both names
        files[json_name(title)] = described(title, None)
        expected[title] = json_name(title)
    return files, expected


def test_each_of_500_files_has_its_caption_and_none_a_wrong_one(tmp_path):
    files, expected = make_folder()
    assert len(files) + len(expected) >= NUM_FILES
    assert match_names([*files, *expected, "stranger.jpg", "notes.json"]) == expected
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    for name in expected:
        (tmp_path / name).write_bytes(b"\xff\xd8")
    (tmp_path / "stranger.jpg").write_bytes(b"\xff\xd8")
    listed = list_sources([SourceConfig(path=str(tmp_path))], captions=TAKEOUT)
    rows = {row["item_id"]: row["described_by"] for table in listed for row in table.to_pylist()}
    assert rows.pop("stranger.jpg") is None
    assert rows.keys() == expected.keys()
    for name, places in rows.items():
        tree = json.loads(files[expected[name]])
        caption, values = read_takeout(json.loads(places)["takeout"])
        assert caption == tree["description"].replace("&amp;", "&")
        assert values["taken_at"] == TAKEN[tree["photoTakenTime"]["timestamp"]]
        assert values["latitude"] == tree["geoData"]["latitude"]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("a.jpg", "a.jpg.json"), {"a.jpg": "a.jpg.json"}),
        (("a(1).jpg", "a.jpg", "a.jpg(1).json"), {"a(1).jpg": "a.jpg(1).json"}),
        (("a(1).jpg", "a(1).jpg.json", "a.jpg(1).json"), {"a(1).jpg": "a(1).jpg.json"}),
        (("a.jpg", f"a.jpg{SUPPLEMENT}(1).json"), {}),
        (("PXL_1.MP", "PXL_1.MP.jpg", "PXL_1.MP.jpg.supp.json"), {"PXL_1.MP.jpg": "PXL_1.MP.jpg.supp.json"}),
        (("a.MP4", "a.jpg.json", "a.png.json"), {}),  # the clip of which of the two?
        (("x" * 46 + "a.jpg", "x" * 46 + "b.jpg", "x" * 46 + ".json"), {}),  # cut, and it may be that of either
    ],
)
def test_names_that_leave_a_doubt_match_nothing(names, found):
    assert match_names(names) == found


def test_takeout_is_asked_for_and_a_caption_file_comes_first(make_files):
    root = make_files(
        {
            "a.jpg": b"\xff\xd8",
            "a.jpg.json": '{"description": "of Takeout"}',
            "a.txt": "mine",
            "b.jpg": b"\xff\xd8",
            "b.jpg.json": "{}",
        }
    )

    def rows(*places):
        listed = list_sources([SourceConfig(path=str(root))], captions=CaptionRules(places=places))
        return {row["item_id"]: row for table in listed for row in table.to_pylist()}

    before, after = rows("sidecar"), rows("sidecar", "takeout")
    assert {row["caption_uri"] for row in before.values()} == {f"{root}/a.txt", None}
    assert {row["described_by"] for row in before.values()} == {None}
    for name in ("a.jpg", "b.jpg"):
        assert after[name]["caption_uri"] == before[name]["caption_uri"]
        assert json.loads(after[name]["described_by"]) == {"takeout": f"{root}/{name}.json"}
        assert after[name]["modified"] != before[name]["modified"], "it is looked at again"
    assert rows("takeout", "sidecar")["a.jpg"]["modified"] != after["a.jpg"]["modified"]
    assert rows("takeout")["a.jpg"]["caption_uri"] is None
    (root / "b.jpg.json").write_text('{"description": "new"}')
    assert rows("sidecar", "takeout")["b.jpg"]["modified"] != after["b.jpg"]["modified"]


@pytest.mark.parametrize("root", ["t/", ""])
def test_a_bucket_is_matched_folder_by_folder(bucket, root):
    for folder in ("", "a/", "a.jpg.d/", "x/", "x/y/", "x!/"):
        for name in ("a.jpg", "a(1).jpg", "a.jpg.json", "a.jpg(1).json", "b.jpg"):
            bucket.objects[f"{root}{folder}{name}"] = folder.encode() + name.encode()
    listed = list_sources([SourceConfig(path=f"s3://team/{root}")], captions=TAKEOUT)
    rows = {
        row["item_id"]: json.loads(row["described_by"])["takeout"] if row["described_by"] else None
        for table in listed
        for row in table.to_pylist()
    }
    assert len(rows) == 18
    for folder in ("", "a/", "a.jpg.d/", "x/", "x/y/", "x!/"):
        assert rows[f"{folder}a.jpg"] == f"s3://team/{root}{folder}a.jpg.json"
        assert rows[f"{folder}a(1).jpg"] == f"s3://team/{root}{folder}a.jpg(1).json"
        assert rows[f"{folder}b.jpg"] is None


def test_a_description_without_a_time_is_taken():
    assert medium_values({"description": "a dog"}) == {}
