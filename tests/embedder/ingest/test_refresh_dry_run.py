"""A dry run says what would be done and why, and changes nothing."""

from pathlib import Path

import pytest
import samples
from refresh_runs import contents, refreshed, touch

from embedder.ingest.dry_run import forecast, from_reports
from embedder.ingest.embed import embed
from embedder.ingest.work import IngestOptions
from embedder.store.files import StoreFiles
from embedder.store.tables.tables import RecordTable

REFRESH = IngestOptions(kind="refresh")


def reasons(found):
    return {each.reason: each.num_items for each in found.reasons}


@pytest.mark.medium
def test_a_dry_run_names_each_reason_with_its_count_and_bytes_and_changes_nothing(make_run, tmp_path):
    source = samples.folder(tmp_path / "in", num_images=40, captions=False)
    (source / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    config = make_run(source, max_reject_fraction=1, rows_per_part=8)
    refreshed(config)
    before = contents(config.store)
    (source / "new.png").write_bytes(samples.image_bytes(99))
    touch(source / "pictures" / "0001.png")
    (source / "pictures" / "0002.png").write_bytes(samples.image_bytes(98))
    (source / "pictures" / "0003.png").unlink()

    found = forecast(config, IngestOptions(kind="refresh", retry_rejects=True, limit=3))
    assert contents(config.store) == before
    assert reasons(found) == {"content changed": 2, "new": 1, "rejected before": 1}
    sizes = {each.reason: each.size_bytes for each in found.reasons}
    assert sizes["new"] == (source / "new.png").stat().st_size
    assert (found.num_unchanged, found.num_retired, found.num_to_embed, found.num_left) == (37, 1, 3, 1)
    assert found.retire_guard.passed
    assert found.estimate.num_runs == 1
    assert found.estimate.wall_s > 0

    table = RecordTable(StoreFiles(config.store), "embeddings")
    holding = [
        path
        for path in table.paths()
        if {f"pictures/000{number}.png" for number in (1, 2, 3)}
        & set(table.read(["item_id"], [path])["item_id"].to_pylist())
    ]
    assert found.rewrite_bytes == sum((tmp_path / "store" / "embeddings" / path).stat().st_size for path in holding)
    report, _ = refreshed(config, retry_rejects=True)
    assert report.reasons == reasons(found)
    assert report.num_retired == found.num_retired


def test_a_dry_run_of_nothing_new_promises_no_work(make_run, tmp_path):
    config = make_run(samples.folder(tmp_path / "in"))
    refreshed(config)
    found = forecast(config, REFRESH)
    assert (found.reasons, found.num_to_embed, found.rewrite_bytes, found.estimate.wall_s) == ((), 0, 0, 0.0)


@pytest.mark.medium
def test_a_dry_run_before_the_first_run_makes_no_store(make_run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = make_run(samples.folder(tmp_path / "in"))
    found = forecast(config, REFRESH)
    assert reasons(found) == {"new": 6}
    assert found.estimate.wall_s is None
    assert contents(config.store) == {}
    embed(make_run(samples.folder(tmp_path / "other", num_images=12), store=str(tmp_path / "of others")))
    known = forecast(config, REFRESH).estimate  # as a run of another store took on this machine
    assert known.wall_s > known.startup_s + 6 / known.items_per_s, "and it publishes"


@pytest.mark.medium
def test_a_dry_run_says_what_the_guard_would_say_and_that_all_is_replaced(make_run, tmp_path):
    source = samples.folder(tmp_path / "in", num_images=4, captions=False)
    refreshed(make_run(source))
    for path in source.rglob("*.png"):
        path.unlink()
    found = forecast(make_run(source), REFRESH)
    assert (found.num_retired, found.retired_by_source, found.retire_guard.passed) == (4, {"": 4}, False)
    (source / "a.png").write_bytes(samples.image_bytes(1))
    (source / "pictures" / "0000.png").write_bytes(samples.image_bytes(0))
    found = forecast(make_run(source, segment_s=1.0), REFRESH)
    assert (reasons(found), found.replaces_all) == ({"preprocessing changed": 1, "new": 1}, True)


def test_an_estimate_is_the_median_of_the_last_runs_that_measured_anything():
    reports = [{"items_per_s": rate, "startup_s": 10.0} for rate in (0.0, 1.0, 100.0, 3.0, 2.0, 4.0, 1000.0)]
    found = from_reports(reports, 300)
    assert (found.items_per_s, found.num_runs, found.wall_s) == (3.0, 5, 110.0)
    assert from_reports([], 300).wall_s is None


@pytest.mark.medium
def test_a_report_that_is_damaged_is_no_part_of_an_estimate(make_run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = samples.folder(tmp_path / "in", num_images=3, captions=False)
    config = make_run(source)
    refreshed(config)
    (source / "new.png").write_bytes(samples.image_bytes(9))
    (report,) = Path(config.store).glob("runs/*/report.json")
    for content in ("[" * 200_000, "{", "[]"):
        report.write_text(content)
        assert forecast(config, REFRESH).estimate.wall_s is None
