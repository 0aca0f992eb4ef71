"""`[captions] from` in runs: the order of places, what a switch changes, keywords, Takeout's times, hostile files."""

import datetime
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import samples
from embedding_runs import embedded
from refresh_runs import items_of, refreshed, rows_of

import embedder
from embedder.cli.render_report import report_parts
from embedder.config import load_config
from embedder.config_toml.run_sections import SourceConfig
from embedder.errors import ConfigError, SourceError
from embedder.ingest.dry_run import forecast
from embedder.ingest.work import IngestOptions
from embedder.media.limits import DecodeLimits
from embedder.media.sandbox import SandboxedDecoder
from embedder.medium_columns import BY_NAME
from embedder.plugins.maintain.fill_metadata import Filled, fill_metadata
from embedder.plugins.maintain.store_check.check import check_store
from embedder.sources.captions import CaptionRules
from embedder.sources.listing import list_sources
from embedder.steps.item_captions import CaptionReader
from embedder.steps.item_decoder import DecodeSpec
from embedder.store.files import StoreFiles
from embedder.store.maintenance.compact import same_index

FILES = Path(__file__).parents[1] / "media" / "caption_files"
SIDECAR = '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><rdf:Description %s/></rdf:RDF>'
TITLED = SIDECAR % 'xmlns:photoshop="http://ns.adobe.com/photoshop/1.0/" photoshop:Headline="beside it"'
ALL = ["sidecar", "takeout", "imagefolder", "xmp", "iptc", "exif"]


@pytest.fixture
def photos(tmp_path):
    """A folder with pictures that have captions in many places."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in ("all.jpg", "caption.jpg", "comment.jpg", "keywords.jpg", "languages.jpg", "sony.jpg", "plain.jpg"):
        shutil.copy(FILES / name, folder)
    return folder


def captions_of(rows):
    return {item_id: row["caption"] for (item_id, segment), row in rows.items() if segment == 0}


def takeout(**said):
    return json.dumps({"title": "x", "description": "", "photoTakenTime": {"timestamp": "1600000000"}} | said)


def test_the_first_place_that_has_a_caption_gives_it(photos):
    (photos / "all.txt").write_text("of the text")
    (photos / "all.jpg.json").write_text(takeout(description="of Takeout"))
    (photos / "all.xmp").write_text(TITLED)
    (photos / "metadata.jsonl").write_text(json.dumps({"file_name": "all.jpg", "text": "of the table"}))
    wanted = {
        "sidecar": "of the text",
        "takeout": "of Takeout",
        "imagefolder": "of the table",
        "xmp": "beside it",
        "iptc": "of IPTC",
        "exif": "of Exif",
    }
    with SandboxedDecoder() as sandbox:

        def read(places):
            rules = CaptionRules(places=tuple(places))
            spec = DecodeSpec(None, DecodeLimits(), None, 1, 1.0, 1, 1, caption_places=rules.places)
            (listed,) = list_sources([SourceConfig(path=str(photos), include=["all.*"])], captions=rules)
            (item,) = listed.to_pylist()
            return CaptionReader(spec, sandbox).read(item, photos / "all.jpg").caption

        for place, caption in wanted.items():
            assert read([place, *(each for each in ALL if each != place)]) == caption
            assert read([place]) == caption
        (photos / "all.txt").write_text(" \n")  # empty: the next one
        assert read(ALL) == "of Takeout"


@pytest.mark.medium
def test_captions_in_pictures_come_where_asked_and_cameras_names_are_none(make_run, photos):
    _, rows = embedded(make_run(photos, captions={"from": ["sidecar", "xmp", "iptc", "exif"], "languages": ["en"]}))
    assert captions_of(rows) == {
        "all.jpg": "of XMP",
        "caption.jpg": "Žižkov in snow",
        "comment.jpg": "the first day of school",
        "keywords.jpg": None,
        "languages.jpg": "a British bridge",
        "sony.jpg": None,
        "plain.jpg": None,
    }
    assert {rows[name, 0]["modality"] for name in ("all.jpg", "comment.jpg")} == {"pair"}
    assert rows["comment.jpg", 0]["text_embedding"] is not None


@pytest.mark.medium
def test_clips_say_theirs_and_the_report_counts_captions_by_place(make_run, photos):
    (photos / "plain.txt").write_text("of the text")
    samples.clip(photos / "a.mp4", comment="shot on a phone", title="two dogs", description="two dogs on a beach")
    samples.clip(photos / "b.mov", title="IMG_1234", comment="a long walk")
    samples.clip(photos / "c.mkv", title="a kite &amp; a child")
    samples.clip(photos / "d.mp4", title="DSC_0001.MOV")
    samples.clip(photos / "e.mp4", title="not this one")
    (photos / "e.txt").write_text("of the text beside it")
    report, rows = refreshed(make_run(photos, captions={"from": ["sidecar", "xmp", "clip"]}))
    found = captions_of(rows)
    assert [found[name] for name in ("a.mp4", "b.mov", "c.mkv", "d.mp4", "e.mp4")] == [
        "two dogs on a beach",
        "a long walk",
        "a kite & a child",
        None,
        "of the text beside it",
    ]
    in_pictures = sum(caption is not None for caption in found.values()) - 5
    assert report.caption_places == {"sidecar": 2, "clip": 3, "xmp": in_pictures}
    (line,) = (each for each in map(str, report_parts(report)) if each.startswith("captions: "))
    assert set(line.removeprefix("captions: ").split(", ")) == {"2 sidecar", "3 clip", f"{in_pictures} xmp"}


@pytest.mark.medium
def test_switching_places_embeds_what_changes_and_nothing_else(make_run, photos):
    (photos / "all.jpg.json").write_text(takeout(description="of Takeout"))
    (photos / "plain.xmp").write_text(TITLED)
    plain = make_run(photos)
    _, before = refreshed(plain)
    assert set(captions_of(before).values()) == {None}
    assert not [item for item in items_of(plain).values() if "|captions" in item["modified"]], "as of earlier releases"
    report, after = refreshed(make_run(photos, captions={"from": ["sidecar", "iptc"]}))
    changed = {key for key in before if before[key]["content_version"] != after[key]["content_version"]}
    assert changed == {("all.jpg", 0), ("caption.jpg", 0)}
    assert (sum(report.reasons.values()), report.num_equal) == (7, 5)
    for key in before.keys() - changed:
        assert after[key]["embedded_at"] == before[key]["embedded_at"]
    report, again = refreshed(make_run(photos, captions={"from": ["sidecar", "iptc"]}))
    assert (report.reasons, again) == ({}, after)
    _, back = refreshed(plain)
    for key in before:
        for name in ("content_version", "text_embedding", "caption"):
            assert back[key][name] == before[key][name]
        assert back[key]["image_embedding"] == pytest.approx(before[key]["image_embedding"], abs=1e-6)
        assert key in changed or back[key]["image_embedding"] == before[key]["image_embedding"]
    report, _ = refreshed(plain)
    assert not report.reasons


@pytest.mark.medium
def test_keywords_are_a_column_of_lists(make_run, photos, tmp_path):
    (photos / "plain.jpg.xmp").write_bytes((FILES / "sidecar.xmp").read_bytes())
    (photos / "keywords.xmp").write_bytes((FILES / "sidecar.xmp").read_bytes())
    config = make_run(photos, captions={"from": ["xmp"]})
    line = "described by files next to them (`[captions] from`): 2 xmp"
    assert forecast(config, IngestOptions(kind="embed")).left_out == (line,)
    _, rows = embedded(config)
    found = {key[0]: row["keywords"] for key, row in rows.items() if row["keywords"]}
    assert found == {
        "all.jpg": ["one", "three", "two"],
        "keywords.jpg": ["sailing", "Cowes Week", "tree", "house"],
        "plain.jpg": ["tree", "house"],
    }
    store = embedder.open_store(config.store)
    by_words = store.search("cowes week", hybrid=True, k=20)
    assert [hit.item_id for hit in by_words if hit.words_rank is not None] == ["keywords.jpg"]
    assert not check_store(StoreFiles(config.store)).findings
    hits = store.search("a tree", where="list_contains(keywords, 'house')")
    assert {hit.item_id: hit.medium["keywords"] for hit in hits} == {
        name: found[name] for name in ("keywords.jpg", "plain.jpg")
    }
    hits.save(tmp_path / "hits.csv")
    assert "Cowes Week" in (tmp_path / "hits.csv").read_text()
    hits.save(tmp_path / "hits.parquet")
    assert ["tree", "house"] in pq.read_table(tmp_path / "hits.parquet")["keywords"].to_pylist()
    _, rows = refreshed(make_run(photos, store=str(tmp_path / "other"), metadata={"drop": ["keywords"]}))
    assert all("keywords" not in row for row in rows.values())


@pytest.mark.medium
def test_rows_without_keywords_get_them_from_headers(make_run, photos):
    config = make_run(photos, metadata={"keep": []})
    embedded(config)
    _, filled = fill_metadata(StoreFiles(config.store), tuple(BY_NAME), same_index)
    assert filled.num_read == 7
    by_words = embedder.open_store(config.store).search("cowes week", hybrid=True, k=20)
    assert [hit.item_id for hit in by_words if hit.words_rank is not None] == ["keywords.jpg"]
    found = {key[0]: row["keywords"] for key, row in rows_of(config).items() if row["keywords"]}
    assert found == {"all.jpg": ["one", "three", "two"], "keywords.jpg": ["sailing", "Cowes Week"]}


@pytest.mark.medium
def test_rows_of_a_release_before_keywords_are_read_again_once(make_run, photos):
    embedded(make_run(photos, metadata={"drop": ["keywords"]}))
    (photos / "later.jpg").write_bytes((FILES / "keywords.jpg").read_bytes() + b"\0")
    config = make_run(photos)
    _, before = refreshed(config)
    files, columns = StoreFiles(config.store), tuple(BY_NAME)
    assert fill_metadata(files, columns, same_index, dry_run=True)[1].num_files == 7, "not the one of the second run"
    _, filled = fill_metadata(files, columns, same_index)
    assert (filled.num_files, filled.num_read) == (7, 7)
    after = rows_of(config)
    assert {key[0]: row["keywords"] for key, row in after.items() if row["keywords"]} == {
        "all.jpg": ["one", "three", "two"],
        "keywords.jpg": ["sailing", "Cowes Week"],
        "later.jpg": ["sailing", "Cowes Week"],
    }
    assert after["plain.jpg", 0]["keywords"] == []
    for key, row in before.items():
        assert {name: value for name, value in row.items() if name != "keywords"} == {
            name: value for name, value in after[key].items() if name != "keywords"
        }
    assert fill_metadata(files, columns, same_index) == (None, Filled(0, 0))
    (hit,) = embedder.open_store(config.store).search("a", where="item_id = 'plain.jpg'")
    assert "keywords" not in hit.medium


PLACE = {"latitude": 38.7, "longitude": -9.1, "altitude": 12.5}


@pytest.mark.medium
def test_takeouts_times_and_places_fill_what_the_file_does_not_say(make_run, tmp_path):
    folder = tmp_path / "album"
    folder.mkdir()
    for name, source in (("plain.jpg", "caption_files/plain.jpg"), ("own.jpg", "foreign_files/tagged.jpg")):
        shutil.copy(FILES.parent / source, folder / name)
        (folder / f"{name}.supplemental-metadata.json").write_text(takeout(geoData=PLACE, description="a day out"))
    shutil.copy(FILES / "plain.jpg", folder / "none.jpg")
    (folder / "none.jpg.json").write_text(takeout(geoData={"latitude": 0.0, "longitude": 0.0, "altitude": 0.0}))
    chosen = {"from": ["takeout"]}
    _, rows = embedded(make_run(folder, captions=chosen))
    names = ("taken_at", "taken_offset_min", "latitude", "longitude", "altitude_m")
    found = {key[0]: tuple(row[name] for name in names) for key, row in rows.items()}
    taken = datetime.datetime(2020, 9, 13, 12, 26, 40)
    own = datetime.datetime(2023, 7, 4, 12, 34, 56, 780_000)
    assert found == {
        "plain.jpg": (taken, 0, 38.7, -9.1, 12.5),
        "own.jpg": (own, 120, 48.137154, 11.576124, 519.5),
        "none.jpg": (taken, 0, None, None, None),
    }
    assert captions_of(rows) == {"plain.jpg": "a day out", "own.jpg": "a day out", "none.jpg": None}
    config = make_run(folder, store=str(tmp_path / "private"), captions=chosen, metadata={"drop": ["gps", "time"]})
    _, rows = embedded(config)
    assert not {*names} & rows["plain.jpg", 0].keys()
    (folder / "none.txt").write_text("a caption of its own")  # which leaves the time to Takeout
    config = make_run(folder, store=str(tmp_path / "both"), captions={"from": ["sidecar", "takeout"]})
    _, rows = embedded(config)
    assert (rows["none.jpg", 0]["caption"], rows["none.jpg", 0]["taken_at"]) == ("a caption of its own", taken)


HOSTILE = {
    "plain.jpg.json": b'{"description": 7, "photoTakenTime": {"timestamp": "9e99"}, "geoData": {"latitude": "north"}}',
    "all.jpg.json": b'{"photoTakenTime": {"timestamp": 99999999999999999999}, "geoData": {"latitude": 1e400}}',
    "sony.jpg.json": b'{"photoTakenTime": 3, "geoData": [1, 2], "description": {"a": 1}}',
    "comment.jpg.json": b"[" * 100_000,
    "keywords.jpg.xmp": b"<a>" * 600_000,
    "caption.jpg.xmp": b'<!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]><x>&e;</x>',
    "languages.jpg.xmp": b"\0" * (3 << 20),
}


@pytest.mark.medium
def test_hostile_files_beside_pictures_cost_their_caption_and_never_the_picture(make_run, photos):
    for name, content in HOSTILE.items():
        (photos / name).write_bytes(content)
    config = make_run(photos, captions={"from": ["takeout", "xmp", "iptc"]}, max_reject_fraction=1)
    _, rows = embedded(config)
    assert {key[0] for key in rows} == {path.name for path in photos.glob("*.jpg")}
    assert all(row["image_embedding"] is not None for row in rows.values())
    found = captions_of(rows)
    assert (found["all.jpg"], found["caption.jpg"]) == ("of XMP", "Žižkov in snow"), "the next place is tried"
    assert rows["plain.jpg", 0]["taken_at"] is None
    problems = {name: item["error_type"] for name, item in items_of(config).items() if item["error_type"]}
    broken = ("comment.jpg", "keywords.jpg", "caption.jpg", "languages.jpg")
    assert problems == dict.fromkeys(broken, "CaptionBroken")
    message = items_of(config)["caption.jpg"]["error"]
    assert "caption.jpg.xmp: no valid XMP" in message
    assert "document type" in message


@pytest.mark.medium
def test_pictures_in_tars_and_tables_have_theirs_and_a_given_caption_comes_first(make_run, tmp_path):
    picture = (FILES / "all.jpg").read_bytes()
    samples.write_tar(tmp_path / "a.tar", {"0.jpg": picture, "1.jpg": picture, "1.txt": b"of the tar"})
    images = [(FILES / name).read_bytes() for name in ("description.jpg", "title.jpg")]
    pq.write_table(pa.table({"id": ["a", "b"], "image": images, "text": ["", "given"]}), tmp_path / "t.parquet")
    columns = {"id": "id", "image": "image", "caption": "text"}
    sources = [
        {"path": str(tmp_path / "a.tar"), "name": "tar"},
        {"path": str(tmp_path / "t.parquet"), "name": "table", "columns": columns},
    ]
    _, rows = embedded(make_run(sources, captions={"from": ["xmp"]}))
    assert captions_of(rows) == {
        "tar:a/0": "of XMP",
        "tar:a/1": "of the tar",
        "table:a": "Ein Mädchen am Fluss",
        "table:b": "given",
    }


@pytest.mark.medium
def test_an_imagefolder_gives_captions_by_path(make_run, tmp_path):
    for name in ("train/a.jpg", "train/cats/b.jpg", "test/a.jpg", "test/c.jpg"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(FILES / "plain.jpg", tmp_path / "data" / name)
    (tmp_path / "data/train/metadata.csv").write_text('file_name,text\na.jpg,"one, two"\ncats/b.jpg,a cat\n')
    (tmp_path / "data/test/metadata.jsonl").write_text('{"file_name": "a.jpg", "caption": "of test"}\n')
    config = make_run(tmp_path / "data", captions={"from": ["imagefolder"]})
    _, rows = refreshed(config)
    assert captions_of(rows) == {
        "train/a.jpg": "one, two",
        "train/cats/b.jpg": "a cat",
        "test/a.jpg": "of test",
        "test/c.jpg": None,
    }
    (tmp_path / "data/train/metadata.csv").write_text('file_name,text\na.jpg,"one, two"\ncats/b.jpg,another cat\n')
    report, rows = refreshed(config)
    assert (report.reasons, captions_of(rows)["train/cats/b.jpg"]) == ({"content changed": 1}, "another cat")
    (tmp_path / "data/train/metadata.csv").write_bytes(b"\xff\xfe\0broken")
    with pytest.raises(SourceError, match=r"metadata\.csv"):
        refreshed(config)


def test_files_that_are_excluded_or_lead_out_of_the_folder_describe_none(tmp_path):
    (tmp_path / "in").mkdir()
    shutil.copy(FILES / "plain.jpg", tmp_path / "in/a.jpg")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.jpg", "text": "of elsewhere"}\n')
    (tmp_path / "in/metadata.jsonl").symlink_to(tmp_path / "metadata.jsonl")
    (tmp_path / "a.xmp").write_text(TITLED)
    (tmp_path / "in/a.xmp").symlink_to(tmp_path / "a.xmp")
    (tmp_path / "in/a.jpg.json").write_text(takeout(description="of Takeout"))
    rules = CaptionRules(places=tuple(ALL))

    def described(**settings):
        (listed,) = list_sources([SourceConfig(path=str(tmp_path / "in"), **settings)], captions=rules)
        return {row["item_id"]: row["described_by"] for row in listed.to_pylist()}["a.jpg"]

    assert json.loads(described()) == {"takeout": str(tmp_path / "in/a.jpg.json")}
    assert described(exclude=["*.jpg.json"]) is None


@pytest.mark.medium
def test_a_metadata_table_of_another_kind_is_left_out(make_run, tmp_path, said):
    shutil.copy(FILES / "plain.jpg", tmp_path / "a.jpg")
    (tmp_path / "metadata.csv").write_text("width,height\n16,16\n")
    _, rows = refreshed(make_run(tmp_path, store=str(tmp_path.parent / "s"), captions={"from": ["imagefolder"]}))
    assert captions_of(rows) == {"a.jpg": None}
    assert "1 other file left out: 1 .csv" in said


@pytest.mark.parametrize(
    ("captions", "message"),
    [
        ({"from": ["xmp", "xmp"]}, "from names a place twice"),
        ({"from": ["XMP"]}, "from"),
        ({"takeout": True}, "takeout"),
    ],
)
def test_places_that_are_none_are_refused(captions, message):
    with pytest.raises(ConfigError, match=message):
        load_config(overrides={"captions": captions})
