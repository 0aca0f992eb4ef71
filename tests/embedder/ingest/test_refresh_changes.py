"""A refresh does the least that is right: what is equal is left alone, what changed is embedded, once."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import samples
from refresh_runs import contents, items_of, nightly_file, refreshed, rows_of, touch

import embedder
from embedder.ingest.embed import refresh
from embedder.ingest.work import IngestOptions

pytestmark = pytest.mark.medium

HEAVY = {"torch", "timm", "transformers", "ray", "faiss", "PIL", "av"}
HEAVY |= {"embedder.executors.local", "embedder.steps.stage"}
SHOW_MODULES = """
import json, sys
from embedder import cli

try:
    cli.app(sys.argv[1:], standalone_mode=False)
finally:
    print(json.dumps(sorted(sys.modules)))
"""


def refresh_alone(path, *options):
    """The command in a process of its own; gives its JSON and the modules it had loaded at the end."""
    command = [sys.executable, "-c", SHOW_MODULES, "refresh", str(path), "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    report, modules = done.stdout.strip().splitlines()[-2:]
    return json.loads(report), set(json.loads(modules))


def test_a_night_without_a_change_loads_no_model_and_touches_no_file(make_run, tmp_path):
    config = make_run(samples.folder(tmp_path / "in"))
    refreshed(config)
    before = contents(config.store)
    report, modules = refresh_alone(nightly_file(config))
    assert contents(config.store) == before
    assert modules & HEAVY == set()
    assert (report["num_unchanged"], report["run_id"], report["outcome"]) == (6, None, "nothing to do")
    assert (report["kind"], report["reasons"]) == ("refresh", {})


def test_a_touched_file_of_equal_content_costs_no_model_time_and_keeps_its_vector(make_run, tmp_path):
    source = samples.folder(tmp_path / "in", num_clips=1)
    config = make_run(source)
    _, before = refreshed(config)
    for path in source.rglob("*.*"):
        touch(path)
    report, modules = refresh_alone(nightly_file(config))
    assert (report["num_equal"], report["num_vectors"], report["reasons"]) == (7, 0, {"content changed": 7})
    assert report["num_taken_over"] == 0, "no file is a copy of itself"
    assert "torch" not in modules
    assert not [step for step in report["steps"] if step["step"].startswith("stage")]
    assert rows_of(config) == before
    items = items_of(config)
    assert {row["state"] for row in items.values()} == {"embedded"}
    assert items["clips/0.mp4"]["num_vectors"] == sum(key[0] == "clips/0.mp4" for key in before)
    assert refreshed(config)[0].outcome == "nothing to do", "the new times are remembered"


def test_touched_and_changed_files_side_by_side_come_out_right(make_run, tmp_path):
    source = samples.folder(tmp_path / "in", num_images=40)
    config = make_run(source, batch_size=4, rows_per_part=8)
    _, before = refreshed(config)
    for number in range(0, 40, 2):
        touch(source / "pictures" / f"{number:04d}.png")
    for number in range(0, 40, 5):
        (source / "pictures" / f"{number:04d}.png").write_bytes(samples.image_bytes(900 + number))
    report, after = refreshed(config)
    changed = {(f"pictures/{number:04d}.png", 0) for number in range(0, 40, 5)}
    assert {key for key, row in after.items() if row != before[key]} == changed
    assert (report.num_equal, report.num_vectors) == (16, 8)
    store = embedder.open_store(config.store)
    expected = store.encode_image([samples.image_bytes(900)])[0]
    assert np.allclose(after["pictures/0000.png", 0]["image_embedding"], expected, atol=1e-5)


def test_a_changed_caption_is_a_change_and_a_touched_one_is_not(make_run, tmp_path):
    source = samples.folder(tmp_path / "in")
    config = make_run(source)
    _, before = refreshed(config)
    touch(source / "pictures" / "0000.txt")
    (source / "pictures" / "0002.txt").write_text("another caption altogether")
    (source / "pictures" / "0003.txt").write_text("a caption where there was none")
    (source / "pictures" / "0004.txt").unlink()
    report, after = refreshed(config)
    assert (report.num_equal, report.num_changed) == (1, 4)
    assert after["pictures/0000.png", 0] == before["pictures/0000.png", 0]
    assert after["pictures/0002.png", 0]["caption"] == "another caption altogether"
    assert after["pictures/0003.png", 0]["modality"] == "pair"
    assert (after["pictures/0004.png", 0]["modality"], after["pictures/0004.png", 0]["caption"]) == ("image", None)


def test_a_file_that_changed_and_can_not_be_read_keeps_its_old_vector_until_it_is_mended(make_run, tmp_path):
    source = samples.folder(tmp_path / "in", captions=False)
    path, key = source / "pictures" / "0003.png", ("pictures/0003.png", 0)
    config = make_run(source, max_reject_fraction=1)
    _, before = refreshed(config)
    good = path.read_bytes()
    path.write_bytes(good[: len(good) // 2])
    report, after = refreshed(config)
    item = items_of(config)[key[0]]
    assert after == before
    assert (item["state"], item["stale"], item["num_vectors"], report.num_stale) == ("rejected", True, 1, 1)
    assert item["content_version"] == before[key]["content_version"], "what its vectors are of"
    assert refreshed(config)[0].outcome == "nothing to do", "a permanent reject waits for its file to change"

    path.write_bytes(good)
    report, after = refreshed(config)
    assert (report.num_equal, report.num_vectors, after) == (1, 0, before)
    item = items_of(config)[key[0]]
    assert (item["state"], item["stale"], item["error"]) == ("embedded", False, None)

    path.write_bytes(good[:50])
    refreshed(config)
    path.write_bytes(samples.image_bytes(71))
    _, after = refreshed(config)
    assert after[key]["image_embedding"] != before[key]["image_embedding"]
    assert not items_of(config)[key[0]]["stale"]


def test_a_half_broken_pair_does_not_lose_its_picture(make_run, tmp_path):
    source = samples.folder(tmp_path / "in", num_images=2)
    config = make_run(source, max_reject_fraction=1)
    _, before = refreshed(config)
    path = source / "pictures" / "0000.png"
    path.write_bytes(path.read_bytes()[:60])
    _, after = refreshed(config)
    assert after == before
    assert items_of(config)["pictures/0000.png"]["stale"]


def test_a_file_that_was_broken_from_the_start_leaves_the_rejects_when_it_is_mended(make_run, tmp_path):
    source = samples.folder(tmp_path / "in", num_images=2)
    (source / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    config = make_run(source, max_reject_fraction=1)
    refreshed(config)
    assert [row["item_id"] for row in embedder.open_store(config.store).rejects().to_pylist()] == ["broken.png"]
    (source / "broken.png").write_bytes(samples.image_bytes(5))
    _, after = refreshed(config)
    assert embedder.open_store(config.store).rejects().num_rows == 0
    assert after["broken.png", 0]["image_embedding"]


def test_what_failed_in_passing_is_tried_again_by_itself_and_not_for_ever(make_run, tmp_path, failing):
    source = samples.folder(tmp_path / "in", num_images=4)
    config = make_run(source, max_reject_fraction=1, max_attempts=3)
    failing.add("0001.png")
    for attempts, outcome in ((1, {"new": 4}), (2, {"rejected before": 1}), (3, {"rejected before": 1}), (3, {})):
        report, _ = refreshed(config)
        item = items_of(config)["pictures/0001.png"]
        assert (report.reasons, item["attempts"], item["transient"]) == (outcome, attempts, True)
    report, _ = refreshed(config, retry_rejects=True)
    assert (report.reasons, items_of(config)["pictures/0001.png"]["attempts"]) == ({"rejected before": 1}, 4)
    failing.clear()
    touch(source / "pictures" / "0001.png")
    _, after = refreshed(config)
    assert after["pictures/0001.png", 0]["image_embedding"]
    assert items_of(config)["pictures/0001.png"]["attempts"] == 1


def test_what_failed_in_passing_in_a_refused_run_is_tried_again_when_it_goes_on(make_run, tmp_path, failing):
    source = samples.folder(tmp_path / "in", num_images=4)
    config = make_run(source)
    failing.update(f"{number:04d}.png" for number in range(4))
    with pytest.raises(embedder.errors.RunFailedError, match=r"guard rejects: 4 of 4"):
        refresh(config, IngestOptions(kind="refresh"))
    failing.clear()
    report, after = refreshed(config)
    assert (report.reasons, report.num_items, report.num_rejected) == ({"rejected before": 4}, 4, 0)
    assert len(after) == 4


def test_what_is_gone_leaves_the_store_and_its_index(make_run, tmp_path):
    source = samples.folder(tmp_path / "in", num_images=30)
    config = make_run(source)
    _, before = refreshed(config)
    (source / "pictures" / "0007.png").unlink()
    report, after = refreshed(config)
    assert (report.num_retired, report.reasons, report.engine_reason) == (1, {}, "nothing to embed")
    assert after == {key: row for key, row in before.items() if key[0] != "pictures/0007.png"}
    assert "pictures/0007.png" not in items_of(config)
    store = embedder.open_store(config.store)
    assert len(store.search("a red car", k=30)) == 29
    vector = np.array(before["pictures/0007.png", 0]["image_embedding"], np.float32)
    assert "pictures/0007.png" not in {hit.item_id for hit in store.search(vector, k=5)}


@pytest.mark.slow
def test_a_refresh_on_ray_does_the_same(make_run, tmp_path, ray_cluster):
    source = samples.folder(tmp_path / "in", num_images=12, captions=False)
    shutil.copytree(source / "pictures", source / "again")
    config = make_run(source, engine="ray", num_stages=1, max_reject_fraction=1, no_progress_timeout_s=200)
    first, before = refreshed(config)
    assert (first.engine, first.num_items, first.num_taken_over, first.num_left) == ("ray", 24, 12, 0)
    for number in range(12):
        image, copy = (before[f"{folder}/{number:04d}.png", 0] for folder in ("pictures", "again"))
        assert image["image_embedding"] == copy["image_embedding"]
    for number in range(6):
        touch(source / "pictures" / f"{number:04d}.png")
    (source / "pictures" / "0006.png").write_bytes(samples.image_bytes(60))
    (source / "pictures" / "0007.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    (source / "pictures" / "0008.png").unlink()
    report, after = refreshed(config, forced=("retire",))
    assert (report.num_equal, report.num_stale, report.num_retired, report.num_vectors) == (6, 1, 1, 1)
    changed = {key for key, row in before.items() if after.get(key) != row}
    assert changed == {("pictures/0006.png", 0), ("pictures/0008.png", 0)}
