"""A folder as people have it is embedded, published and left alone from then on, and nothing in it goes unsaid."""

import unicodedata

import people_folder
import pytest
import samples
from embedding_runs import embedded
from people_folder import CAPTIONS, NAMES, NUM_CLIPS, NUM_ITEMS, NUM_JUNK, OTHER_FILES, UNREADABLE
from refresh_runs import items_of, refreshed

import embedder
from embedder.errors import SourceError
from embedder.ingest.embed import embed

OTHER_LINE = "6 other files left out: 2 .pdf, 1 .gpx, 1 .m4a, 1 .md, 1 no suffix"
UNREADABLE_LINE = "6 files of kinds that this version can't read left out: 4 JP2, 1 DNG, 1 SVG; convert them"


@pytest.mark.medium
def test_a_phones_export_publishes_and_the_next_runs_do_nothing(make_run, tmp_path, run_embedder, tiny_model):
    source, store = people_folder.people_folder(tmp_path / "export"), tmp_path / "store"
    command = ("embed", source, "--model", tiny_model, "--store", store, "--engine", "local", "--json")
    code, report, said = run_embedder(*command)
    assert code == 0, said
    assert (report["published"], report["num_items"], report["num_rejected"]) == (True, NUM_ITEMS, 1)
    assert (report["other_files"], report["unreadable"]) == (OTHER_FILES, UNREADABLE)
    assert (report["num_junk"], report["num_sidecars"]) == (NUM_JUNK, 3 + 3)
    assert report["num_orphan_captions"] == 1
    assert "belongs to no image or video left out: metadata.json" in " ".join(said.split())
    assert OTHER_LINE in said and UNREADABLE_LINE in said
    rows = embedder.open_store(store).to_arrow().to_pylist()
    assert len(rows) == NUM_ITEMS - 1
    modalities = {row["item_id"]: row["modality"] for row in rows}
    assert modalities["DCIM/PANO_0007.jpg"] == "image"
    assert [modalities[f"DCIM/{name}"] for name in ("IMG_0100.MOV", "clip 1.mp4")] == ["video"] * NUM_CLIPS
    assert {unicodedata.normalize("NFD", name) for name in NAMES} < set(modalities)
    captions = {row["item_id"].removeprefix("DCIM/"): row["caption"] for row in rows if row["caption"]}
    assert captions == CAPTIONS
    (published,) = run_embedder("history", "--store", store, "--json")[1]["publications"]
    assert [published[f"num_{what}"] for what in ("items", "vectors", "rejected")] == [NUM_ITEMS, NUM_ITEMS - 1, 1]
    again = run_embedder(*command)
    assert (again[0], again[1]["outcome"], again[1]["num_unchanged"]) == (0, "nothing to do", NUM_ITEMS)
    assert (again[1]["other_files"], again[1]["unreadable"]) == (OTHER_FILES, UNREADABLE)
    report, _ = refreshed(make_run(source, store=str(store)))
    assert (report.outcome, report.num_retired) == ("nothing to do", 0)


@pytest.fixture
def small(tmp_path):
    return people_folder.people_folder(tmp_path / "export", panorama=False)


@pytest.mark.medium
def test_what_was_read_and_left_out_is_listed_with_its_reason_and_tried_again_on_demand(make_run, small, run_embedder):
    config = make_run(small)
    embedded(config)
    code, found, _ = run_embedder("rejects", "--store", config.store, "--json")
    assert code == 0
    reasons = {row["item_id"]: (row["error_type"], row["error"].partition(":")[0]) for row in found["rejects"]}
    assert reasons.pop("cut off.jpg")[0] == "OSError"
    assert reasons == {
        "DCIM/IMG_0100.JP2": ("UnreadableKind", "JP2"),
        "DCIM/IMG_0101.JP2": ("UnreadableKind", "JP2"),
        "DCIM/IMG_0102.jp2": ("UnreadableKind", "JP2"),
        "DCIM/named wrongly.jpg": ("UnreadableKind", "JP2"),
        "DCIM/IMG_0200.DNG": ("UnreadableKind", "DNG"),
        "logo.svg": ("UnreadableKind", "SVG"),
        "README": ("OtherFile", "neither an image, a video nor a caption"),
    }
    report, _ = refreshed(config, retry_rejects=True)
    assert (report.reasons, report.num_rejected) == ({"rejected before": 8}, 1)
    assert (report.other_files, report.unreadable) == (OTHER_FILES, UNREADABLE)


@pytest.mark.medium
def test_a_jpeg_2000_with_a_caption_keeps_its_caption_and_becomes_a_picture_once_converted(make_run, small):
    caption = small / "DCIM" / "IMG_0101.txt"
    caption.write_text("seven white horses")
    config = make_run(small)
    report, rows = embedded(config)
    assert rows["DCIM/IMG_0101.JP2", 0]["text_embedding"] and not rows["DCIM/IMG_0101.JP2", 0]["image_embedding"]
    assert (items_of(config)["DCIM/IMG_0101.JP2"]["state"], report.unreadable) == ("left_out", UNREADABLE)
    (small / "DCIM" / "IMG_0101.JP2").write_bytes(samples.image_bytes(5, "JPEG"))
    report, rows = embedded(config)
    assert (report.num_changed, report.unreadable["JP2"]) == (1, 3)
    assert rows["DCIM/IMG_0101.JP2", 0]["modality"] == "pair"


@pytest.mark.medium
def test_a_picture_that_becomes_no_picture_keeps_its_vector_and_is_a_reject(make_run, small):
    config = make_run(small)
    _, before = embedded(config)
    (small / "a screenshot").write_text("now it is a text")
    report, after = embedded(config)
    item = items_of(config)["a screenshot"]
    assert (item["state"], item["error_type"], item["stale"], report.num_rejected) == ("rejected", "OtherFile", True, 1)
    assert after["a screenshot", 0]["image_embedding"] == before["a screenshot", 0]["image_embedding"]


@pytest.mark.medium
def test_a_contact_sheet_that_a_search_saved_among_the_pictures_is_no_item(make_run, tmp_path, run_embedder):
    source = samples.folder(tmp_path / "in", num_images=3)
    config = make_run(source)
    embedded(config)
    sheet = source / "pictures" / "hits.png"
    assert run_embedder("search", "a red car", "--store", config.store, "--sheet", sheet)[0] == 0
    report, rows = embedded(config)
    assert (report.other_files, report.num_rejected, len(rows)) == ({".png": 1}, 0, 3)


def test_a_folder_of_nothing_that_can_be_embedded_says_what_is_in_it(make_run, tmp_path, said):
    (tmp_path / "in").mkdir()
    for name in ("a.pdf", "b.pdf", "c.md", ".DS_Store", "keep/no.jpg"):
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_bytes(b"x")
    with pytest.raises(SourceError, match=r"1 file excluded .*; 3 other files left out: 2 \.pdf, 1 \.md"):
        embed(make_run([{"path": str(tmp_path / "in"), "exclude": ["keep"]}]))
    (tmp_path / "in" / "keep" / "no.jpg").unlink()
    (tmp_path / "in" / "a.jp2").write_bytes(people_folder.JP2)
    with pytest.raises(embedder.errors.RunFailedError, match="0 of 1 file could be embedded"):
        embed(make_run(tmp_path / "in"))
    assert any("1 file of kinds that this version can't read left out: 1 JP2" in line for line in said)


def test_include_and_exclude_are_options_of_the_command_too(small, tmp_path, tiny_model, run_embedder):
    options = ("--include", "DCIM/", "--include", "*.pdf", "--exclude", "IMG_00*", "--exclude", "*.jp2", "--json")
    where = ("--model", tiny_model, "--store", tmp_path / "store", "--engine", "local")
    code, report, said = run_embedder("embed", small, *where, *options)
    assert code == 0, said
    ids = set(embedder.open_store(tmp_path / "store").to_arrow(["item_id"])["item_id"].to_pylist())
    assert ids == {"DCIM/IMG_0100.MOV", "DCIM/clip 1.mp4", "DCIM/PANO_0007.jpg"}
    assert (report["num_rejected"], report["other_files"]) == (2, {}), "the two that *.pdf names are no pictures"
    assert run_embedder("embed", "--include", "x", *where)[0] == 2
