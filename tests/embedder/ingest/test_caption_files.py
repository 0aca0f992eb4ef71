"""Caption files of a folder: those that belong to no picture, the keys of a `.json`, and columns of its other keys."""

import json

import pytest
import samples
from refresh_runs import items_of, refreshed

import embedder
from embedder.config_toml.run_sections import SourceConfig
from embedder.errors import SourceError
from embedder.sources.captions import CaptionRules
from embedder.sources.listing import list_sources
from embedder.sources.selection import LeftOut

LEFT_OUT = (
    "2 .txt or .json files that belong to no image or video left out: gone.json, notes.txt; "
    "set `[captions] alone = true` to embed such texts"
)


@pytest.fixture
def source(tmp_path):
    """Four pictures, two of them with captions; a note, and what a deleted picture has left behind."""
    folder = samples.folder(tmp_path / "in", num_images=4)
    (folder / "notes.txt").write_text("dear diary")
    (folder / "gone.json").write_text('{"caption": "a red car"}')
    return folder


def with_captions(config, **captions):
    return config.model_copy(update={"captions": config.captions.model_copy(update=captions)})


@pytest.mark.medium
def test_captions_of_no_picture_are_counted_and_named_and_embedded_where_asked(make_run, source, said):
    config = make_run(source)
    report, rows = refreshed(config)
    assert {key for key, _ in rows} == {f"pictures/000{number}.png" for number in range(4)}
    assert report.num_orphan_captions == 2
    assert LEFT_OUT in said
    report, rows = refreshed(with_captions(config, alone=True))
    assert {"notes.txt", "gone.json"} <= {key for key, _ in rows}
    assert report.num_orphan_captions == 0


@pytest.mark.medium
def test_a_store_that_has_such_items_keeps_them_and_says_so_once(make_run, source, said):
    config = make_run(source, max_retire_fraction=1)
    (source / "meta.json").write_text('{"rating": 3}')  # read, and left out: its record stays, too
    _, before = refreshed(with_captions(config, alone=True))
    for number in (10, 11):
        del said[:]
        (source / f"new{number}.png").write_bytes(samples.image_bytes(number))
        (source / f"later{number}.txt").write_text("a caption that nobody had")
        report, rows = refreshed(config)
        assert before.keys() < rows.keys()
        assert items_of(config)["meta.json"]["state"] == "left_out"
        assert f"later{number}.txt" not in items_of(config)
        lines = [line for line in said if "kept, as the store has them: gone.json, notes.txt" in line]
        assert len(lines) == (number == 10), said
        assert report.num_kept_captions == 2
    report, rows = refreshed(with_captions(config, alone=False))
    assert "notes.txt" not in {key for key, _ in rows}
    assert report.num_retired == 3


def test_a_folder_of_texts_says_how_they_are_embedded(make_run, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("a red car")
    with pytest.raises(SourceError, match=r"nothing is in it to embed; 1 .* left out: a.txt; set .*alone = true"):
        refreshed(make_run(tmp_path / "texts"))


def test_texts_that_the_source_names_are_items(tmp_path):
    for name in ("a.txt", "b.png"):
        (tmp_path / name).write_bytes(b"x")

    def ids(path, **settings):
        given = [SourceConfig(path=str(path), **settings)]
        tables = list_sources(given, captions=CaptionRules(alone=False), left_out=LeftOut())
        return [item for table in tables for item in table["item_id"].to_pylist()]

    assert ids(tmp_path) == ["b.png"]
    assert ids(tmp_path, include=["*.txt"]) == ids(tmp_path / "a.txt") == ["a.txt"]
    assert ids(tmp_path / "*.txt", kind="files") == ["a.txt"]


@pytest.mark.parametrize("key", ["caption", "text", "description", "alt_text", "alt", "prompt"])
def test_the_caption_of_a_json_may_stand_under_several_keys(make_run, source, key):
    (source / "pictures/0001.json").write_text(json.dumps({"title": "0001.png", key: "a red car"}))
    _, rows = refreshed(make_run(source))
    assert rows["pictures/0001.png", 0]["caption"] == "a red car"


def test_a_json_without_a_caption_is_a_line_that_names_the_keys(make_run, source, said):
    (source / "pictures/0001.json").write_text('{"title": "0001.png", "rating": 5}')
    for name, broken in (("0003", '{"caption": "cut off'), ("0005", '{"caption": 5}')):
        (source / f"pictures/{name}.txt").unlink(missing_ok=True)
        (source / f"pictures/{name}.json").write_text(broken)
    report, rows = refreshed(make_run(source))
    assert rows["pictures/0001.png", 0]["caption"] is None
    assert report.num_json_without_caption == 1, "rejects say for themselves what is wrong with them"
    (line,) = [line for line in said if "without a caption" in line]
    assert line == (
        "1 .json without a caption: read are its keys caption, text, description, alt_text, alt, prompt; "
        "`[captions] columns` makes columns of others"
    )


@pytest.mark.medium
def test_other_keys_of_a_json_become_columns(make_run, source):
    values = {"0000": {"rating": 5, "photographer": "Ann"}, "0001": {"rating": 3, "caption": "a cat"}}
    for name, tree in values.items():  # the first has a .txt, too, which is its caption
        (source / f"pictures/{name}.json").write_text(json.dumps(tree))
    config = with_captions(make_run(source), columns=("rating", "photographer"))
    _, rows = refreshed(config)
    found = {key: (row["rating"], row["photographer"], row["caption"]) for (key, _), row in rows.items()}
    assert found["pictures/0000.png"] == (5, "Ann", samples.SENTENCES[0])
    assert found["pictures/0001.png"] == (3, None, "a cat")
    assert found["pictures/0003.png"] == (None, None, None)
    hits = embedder.open_store(config.store).search("a car", where="rating > 4")
    assert [hit.carryover for hit in hits] == [{"rating": 5, "photographer": "Ann"}]
    (source / "pictures/0000.json").write_text('{"rating": 1}')  # no caption, but its columns have changed
    _, rows = refreshed(config)
    assert (rows["pictures/0000.png", 0]["rating"], rows["pictures/0000.png", 0]["photographer"]) == (1, None)


def test_a_column_with_the_name_of_one_of_the_table_is_refused(make_run, source):
    config = with_captions(make_run(source), columns=("uri",))
    with pytest.raises(SourceError, match="captions.columns 'uri' is already a column"):
        refreshed(config)


@pytest.mark.medium
def test_descriptions_of_takeout_come_to_a_store_that_exists_where_asked(make_run, source, said):
    for number, text in ((1, "a red &amp; blue car"), (3, "")):
        tree = {"title": f"000{number}.png", "description": text, "photoTakenTime": {"timestamp": "1"}}
        (source / f"pictures/000{number}.png.supplemental-metadata.json").write_text(json.dumps(tree))
    config = make_run(source)
    refreshed(config)
    report, before = refreshed(config)
    assert not report.reasons
    report, after = refreshed(with_captions(config, **{"from": ("sidecar", "takeout")}))
    assert (sum(report.reasons.values()), report.num_equal) == (2, 1), "an empty one computes nothing"
    assert not [line for line in said if "without a caption" in line]
    assert after["pictures/0001.png", 0]["caption"] == "a red & blue car"
    assert after["pictures/0003.png", 0]["caption"] is None
    assert before.keys() == after.keys()
    for key in before.keys() - {("pictures/0001.png", 0)}:
        assert after[key]["image_embedding"] == before[key]["image_embedding"]
