"""Rejects are listed, filtered, and tried again."""

import pyarrow as pa
import pytest
import samples
from refresh_runs import items_of, refreshed, touch

import embedder
from embedder.cli.refresh_command import list_rejects, retry_rejects
from embedder.cli.render_report import report_parts
from embedder.errors import ConfigError
from embedder.report.report_schema import Report


@pytest.fixture
def rejecting(make_run, tmp_path, failing):
    """A store with a broken file, a stale one, and one that failed in passing; and what heals that."""
    source = samples.folder(tmp_path / "in", num_images=6, captions=False)
    config = make_run(source, max_reject_fraction=1)
    refreshed(config)
    failing.add("late.png")
    (source / "late.png").write_bytes(samples.image_bytes(20))
    (source / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    (source / "pictures" / "0001.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    refreshed(config)
    return config, failing


FILTERS = (
    ({}, {"late.png", "broken.png", "pictures/0001.png"}),
    ({"transient": True}, {"late.png"}),
    ({"transient": False}, {"broken.png", "pictures/0001.png"}),
    ({"stale": True}, {"pictures/0001.png"}),
    ({"stale": False, "transient": False}, {"broken.png"}),
    ({"step": "read"}, {"late.png"}),
    ({"error_type": "ReadError"}, {"late.png"}),
    ({"error_type": "Nothing"}, set()),
)


def test_rejects_are_filtered(rejecting):
    config, _ = rejecting
    for wanted, expected in FILTERS:
        assert {row["item_id"] for row in list_rejects(config, None, wanted).data["rejects"]} == expected, wanted


@pytest.mark.medium
def test_a_retry_embeds_the_chosen_rejects_and_nothing_else(rejecting, tmp_path):
    config, failing = rejecting
    failing.clear()
    (tmp_path / "in" / "new.png").write_bytes(samples.image_bytes(50))
    (tmp_path / "in" / "pictures" / "0005.png").unlink()
    report = retry_rejects(config, {"transient": True}).data
    assert (report["reasons"], report["num_retired"]) == ({"rejected before": 1}, 0)
    items = items_of(config)
    assert items["late.png"]["state"] == "embedded"
    assert "new.png" not in items
    assert "pictures/0005.png" in items
    report = retry_rejects(config, {"stale": False}).data
    assert report["reasons"] == {"rejected before": 1}
    assert items_of(config)["broken.png"]["attempts"] == 2


@pytest.mark.medium
def test_a_retry_takes_a_mended_file_as_it_is_now(rejecting, tmp_path):
    config, _ = rejecting
    (tmp_path / "in" / "broken.png").write_bytes(samples.image_bytes(70))
    touch(tmp_path / "in" / "pictures" / "0000.png")
    report = retry_rejects(config, {"step": "decode"}).data
    assert report["reasons"] == {"content changed": 1, "rejected before": 1}
    assert items_of(config)["broken.png"]["state"] == "embedded"


def test_a_retry_without_sources_says_what_it_needs(rejecting):
    config, _ = rejecting
    with pytest.raises(ConfigError, match="--config"):
        retry_rejects(config.model_copy(update={"source": ()}), {})


def test_the_command_lists_and_filters(rejecting, run_embedder):
    config, _ = rejecting
    code, found, stderr = run_embedder("rejects", "--store", config.store, "--stale", "--json")
    assert code == 0, stderr
    assert [row["item_id"] for row in found["rejects"]] == ["pictures/0001.png"]
    code, found, stderr = run_embedder(
        "rejects", "--store", config.store, "--no-transient", "--step", "decode", "--json"
    )
    assert {row["item_id"] for row in found["rejects"]} == {"pictures/0001.png", "broken.png"}


@pytest.fixture
def captioned(make_run, tmp_path):
    """A store of four pictures and a broken one, each with a caption."""
    source = samples.folder(tmp_path / "in", num_images=4, num_clips=0)
    (source / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    (source / "broken.txt").write_text("a caption of nothing")
    return make_run(source, max_reject_fraction=1)


@pytest.mark.medium
def test_a_reject_with_a_caption_counts_as_no_picture(captioned, run_embedder):
    report, rows = refreshed(captioned)
    assert rows["broken.png", 0]["text_embedding"] is not None, "its caption keeps a vector"
    num_pictures = sum(row["image_embedding"] is not None for row in rows.values())
    assert (report.num_vectors, report.num_reject_vectors) == (num_pictures + 1, 1)
    assert "row, 1 of them of rejects;" in str(report_parts(retry_report(captioned))[-1])
    code, found, stderr = run_embedder("history", "--store", captioned.store, "--json")
    assert code == 0, stderr
    assert [each["num_pictures"] for each in found["publications"]] == [num_pictures] * 2
    assert [each["num_vectors"] for each in found["publications"]] == [num_pictures + 1] * 2


def retry_report(config):
    return Report.model_validate(retry_rejects(config, {}).data)


@pytest.mark.medium
def test_a_condition_asks_for_rows_with_a_picture(captioned):
    _, rows = refreshed(captioned)
    store = embedder.open_store(captioned.store)
    found = store.searcher.snapshot.metadata.filter.matching("NOT has_picture")
    assert [row["item_id"] for row in store.to_arrow(["item_id"]).filter(pa.array(found)).to_pylist()] == ["broken.png"]
    hits = store.search("a car", k=10, where="has_picture")
    assert {hit.item_id for hit in hits} == {key for key, _ in rows} - {"broken.png"}
    assert not store.search("a caption of nothing", k=10, where="NOT has_picture", hybrid=True)
