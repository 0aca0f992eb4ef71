"""What is moved, renamed or copied keeps its vectors: it is read, and no model computes."""

import os
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import samples
from damaged_stores import lose_rows
from refresh_runs import interrupted, items_of, refreshed, rows_of
from rollback_runs import repaint

import embedder
from embedder.errors import RunFailedError
from embedder.ingest.copies import find_copies
from embedder.ingest.dry_run import forecast
from embedder.ingest.work import IngestOptions
from embedder.plugins.maintain.purge.purge import purge
from embedder.store.files import StoreFiles
from embedder.store.layout import read_current
from embedder.store.lock import write_lock
from embedder.store_index.keep_index import index_choice

VECTORS = ("image_embedding", "text_embedding", "content_version", "caption", "embedded_at", "start_s")


@pytest.fixture
def source(tmp_path):
    return samples.folder(tmp_path / "in", num_images=20, num_clips=1)


def assert_same(row, expected):
    for name in VECTORS:
        assert row[name] == expected[name]


@pytest.mark.medium
def test_what_is_moved_copied_and_renamed_keeps_its_vectors(make_run, source, computed):
    config = make_run(source, rows_per_part=4)
    _, before = refreshed(config)
    computed.clear()
    (source / "pictures").rename(source / "archive")
    (source / "clips" / "0.mp4").rename(source / "clips" / "first.mp4")
    for name in ("0001.png", "0002.png", "0002.txt"):
        shutil.copy(source / "archive" / name, source / name)  # with another time
    repaint(source / "archive" / "0005.png", seed=500)
    shutil.copy(source / "archive" / "0002.png", source / "other.png")
    (source / "other.txt").write_text("another caption than that of the original")
    planned = forecast(config, IngestOptions(kind="refresh"))
    assert (planned.num_moved, planned.num_copied) == (20, 2)
    assert planned.retire_guard.passed
    report, after = refreshed(config)
    assert set(computed) == {"archive/0005.png", "other.png"}
    assert after["other.png", 0]["caption"] == "another caption than that of the original"
    assert (report.num_new, report.num_taken_over, report.num_items) == (24, 22, 24)
    assert report.num_retired == 21
    for name in ("0000.png", "0001.png", "0019.png"):
        assert_same(after[f"archive/{name}", 0], before[f"pictures/{name}", 0])
        assert after[f"archive/{name}", 0]["uri"].endswith(f"in/archive/{name}")
    for name in ("0001.png", "0002.png"):
        assert_same(after[name, 0], before[f"pictures/{name}", 0])
    segments = [key[1] for key in before if key[0] == "clips/0.mp4"]
    assert segments
    for segment in segments:
        assert_same(after["clips/first.mp4", segment], before["clips/0.mp4", segment])
    assert items_of(config)["archive/0000.png"]["uri"].endswith("in/archive/0000.png")
    afresh = make_run(source, store=str(source.parent / "afresh"))
    _, expected = refreshed(afresh)
    assert after.keys() == expected.keys()
    for key, row in expected.items():
        assert (after[key]["uri"], after[key]["caption"]) == (row["uri"], row["caption"])
        assert after[key]["image_embedding"] == pytest.approx(row["image_embedding"], abs=1e-6)
    store = embedder.open_store(config.store)
    wanted = np.array(before["pictures/0007.png", 0]["image_embedding"], np.float32)
    assert store.search(wanted, k=1)[0].item_id == "archive/0007.png"
    assert refreshed(config)[0].outcome == "nothing to do"


@pytest.mark.medium
def test_files_that_exchange_their_names_exchange_their_vectors(make_run, source, computed):
    config = make_run(source)
    _, before = refreshed(config)
    computed.clear()
    first, second, aside = (source / "pictures" / name for name in ("0001.png", "0003.png", "aside"))
    first.rename(aside), second.rename(first), aside.rename(second)
    _, after = refreshed(config)
    assert not computed
    assert_same(after["pictures/0001.png", 0], before["pictures/0003.png", 0])
    assert_same(after["pictures/0003.png", 0], before["pictures/0001.png", 0])
    store = embedder.open_store(config.store)
    for name, other in (("0001.png", "0003.png"), ("0003.png", "0001.png")):
        wanted = np.array(before[f"pictures/{name}", 0]["image_embedding"], np.float32)
        (hit,) = store.search(wanted, k=1)
        assert (hit.item_id, hit.score) == (f"pictures/{other}", pytest.approx(1, abs=0.01))


@pytest.mark.medium
def test_a_limit_retires_no_original_whose_copy_waits(make_run, source, computed):
    config = make_run(source, rows_per_part=2)
    refreshed(config)
    computed.clear()
    (source / "pictures").rename(source / "archive")
    report, rows = refreshed(config, limit=3)
    assert (report.num_taken_over, report.num_retired, len({key[0] for key in rows})) == (3, 3, 21)
    report, rows = refreshed(config)
    assert (report.num_taken_over, report.num_retired) == (17, 17)
    assert not computed
    assert {key[0].partition("/")[0] for key in rows} == {"archive", "clips"}


@pytest.mark.medium
def test_what_only_looks_moved_is_judged_by_the_next_run(make_run, source):
    config = make_run(source)
    _, before = refreshed(config)
    (source / "pictures").rename(source / "archive")
    for number in range(4):
        path = source / "archive" / f"{number:04d}.png"
        size, time_ns = path.stat().st_size, path.stat().st_mtime_ns
        other = next(data for seed in range(200, 900) if len(data := samples.image_bytes(seed)) <= size)
        path.write_bytes(other + bytes(size - len(other)))
        os.utime(path, ns=(time_ns, time_ns))
    _, rows = refreshed(config)
    others = {key for key in before if key[0] in {f"pictures/{number:04d}.png" for number in range(4)}}
    assert others <= rows.keys(), "they are not lost before the guard has judged them"
    with pytest.raises(RunFailedError, match="4 of 25 published items not listed any more"):
        refreshed(config)


@pytest.mark.medium
def test_a_killed_run_that_had_taken_over_moved_items_goes_on(make_run, source, monkeypatch, computed):
    config = make_run(source)
    refreshed(config)
    computed.clear()
    (source / "pictures").rename(source / "archive")
    interrupted(monkeypatch, config, "embed.end_run")
    report, rows = refreshed(config)
    assert report.published
    assert not computed
    assert {key[0].partition("/")[0] for key in rows} == {"archive", "clips"}


@pytest.mark.medium
def test_a_copy_of_which_the_originals_rows_are_gone_is_embedded_by_the_next_run(make_run, source, computed):
    config = make_run(source)
    refreshed(config)
    computed.clear()
    shutil.copy(source / "pictures" / "0001.png", source / "copy.png")
    lose_rows(StoreFiles(config.store), ["pictures/0001.png"])
    _, rows = refreshed(config)
    assert ("copy.png", 0) not in rows
    refreshed(config)
    assert "copy.png" in computed


@pytest.mark.medium
def test_a_file_of_the_same_size_and_name_but_other_content_is_embedded(make_run, source, computed):
    config = make_run(source)
    _, before = refreshed(config)
    computed.clear()
    original = (source / "pictures" / "0001.png").read_bytes()
    (source / "new").mkdir()
    other = samples.image_bytes(77)
    assert other != original
    (source / "new" / "0001.png").write_bytes(original[:-12] + original[-12:-4] + other[-4:])  # a size is no content
    (source / "new" / "0077.png").write_bytes(other)
    _, after = refreshed(config)
    assert {"new/0001.png", "new/0077.png"} >= set(computed) >= {"new/0077.png"}
    assert after["new/0077.png", 0]["image_embedding"] != before["pictures/0001.png", 0]["image_embedding"]


@pytest.mark.medium
def test_the_retire_guard_counts_what_is_gone_and_not_what_was_moved(make_run, source):
    config = make_run(source)
    refreshed(config)
    (source / "pictures").rename(source / "archive")
    assert refreshed(config)[0].published
    for number in range(5):
        (source / "archive" / f"{number:04d}.png").unlink()
    (source / "archive").rename(source / "moved")
    with pytest.raises(RunFailedError, match="5 of 21 published items not listed any more"):
        refreshed(config)


@pytest.mark.medium
def test_purging_an_original_leaves_its_copy(make_run, source):
    config = make_run(source)
    refreshed(config)
    shutil.copy(source / "pictures" / "0001.png", source / "copy.png")
    _, after = refreshed(config)
    kept = after["copy.png", 0]
    files = StoreFiles(config.store)
    with write_lock(files):
        purge(files, ["pictures/0001.png"], index_choice(files, reuse=False))
    rows = rows_of(config)
    assert ("pictures/0001.png", 0) not in rows
    assert_same(rows["copy.png", 0], kept)


def test_time_counts_more_than_name_and_name_more_than_size(make_run, source):
    config = make_run(source)
    refreshed(config)
    files = StoreFiles(config.store)
    items = items_of(config)
    size = items["pictures/0001.png"]["size_bytes"]
    time, other_time = items["pictures/0001.png"]["modified"], "2001-01-01T00:00:00.000000000Z"

    def originals(name, size_bytes, modified):
        listed = {"item_id": name, "size_bytes": size_bytes, "modified": modified, "reason": "new"}
        found = find_copies(files, read_current(files), pa.Table.from_pylist([listed])).table
        return [
            found.filter(each)["copy_of"].to_pylist() for each in (found["is_likely"], pc.invert(found["is_likely"]))
        ]

    same_size = {name for name, item in items.items() if item["size_bytes"] == size}
    for name, modified in (("else/0001.png", other_time), ("other.png", time)):
        likely, others = originals(name, size, modified)
        assert likely == ["pictures/0001.png"]
        assert sorted([*likely, *others]) == sorted(same_size)
    assert originals("0003.png", size, time)[0][0] == "pictures/0001.png"
    likely, others = originals("other.png", size, other_time)
    assert (likely, set(others)) == ([], same_size)
    assert originals("0001.png", size + 1, time) == [[], []]
    assert originals("0001.png", None, time) == [[], []]
    assert originals("pictures/0001.png", size, time)[0] == [], "no item is its own copy"
