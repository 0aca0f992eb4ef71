"""Changes that size and modification time don't show: change times, `changed_by`, and a share checked each night."""

import os
import shutil
import tarfile
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from model_runs import model_rows, other_towers
from PIL import Image
from refresh_runs import items_of, refreshed, rows_of
from rollback_runs import back, let_go

import embedder
from embedder.errors import ConfigError
from embedder.ingest.diff import CHECKED, CONTENT_CHANGED
from embedder.ingest.dry_run import forecast
from embedder.ingest.embed import embed
from embedder.ingest.known_items import ContentChecks
from embedder.ingest.work import IngestOptions
from embedder.sources.listing_schema import time_text, without_change_time


def bitmap(path, seed):
    pixels = np.random.default_rng(seed).integers(0, 255, (16, 16, 3), np.uint8)
    Image.fromarray(pixels).save(path, "BMP")


def exchange(path, write, *arguments):
    """Write other content of the same size, and give the file the time that it had."""
    before = path.stat()
    write(path, *arguments)
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "in").mkdir()
    for number in range(8):
        bitmap(tmp_path / "in" / f"{number}.bmp", number)
    (tmp_path / "in" / "0.txt").write_text("a red cat")
    return tmp_path / "in"


def swap_names(root):
    """Two files of one size and time take each other's names."""
    for number in (1, 2):
        os.utime(root / f"{number}.bmp", ns=(10**18, 10**18))
    first, second = root / "1.bmp", root / "2.bmp"
    first.rename(root / "x"), second.rename(first), (root / "x").rename(second)


def copy_over(root):
    bitmap(root.parent / "new.bmp", 77)
    shutil.copystat(root / "3.bmp", root.parent / "new.bmp")
    shutil.copy2(root.parent / "new.bmp", root / "3.bmp")


def move_over(root):
    bitmap(root.parent / "new.bmp", 78)
    shutil.copystat(root / "3.bmp", root.parent / "new.bmp")
    (root.parent / "new.bmp").rename(root / "3.bmp")


def map_memory(root):
    data = np.memmap(root / "3.bmp", np.uint8, "r+")
    before = (root / "3.bmp").stat()
    data[-300:] = 255 - data[-300:]
    data.flush()
    os.utime(root / "3.bmp", ns=(before.st_atime_ns, before.st_mtime_ns))


EXCHANGES = {
    "cp -p": (copy_over, {"3.bmp"}),
    "mv": (move_over, {"3.bmp"}),
    "names swapped": (swap_names, {"1.bmp", "2.bmp"}),
    "a memory map": (map_memory, {"3.bmp"}),
    "the caption": (lambda root: exchange(root / "0.txt", lambda path: path.write_text("a red dog")), {"0.bmp"}),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", EXCHANGES)
def test_what_is_exchanged_under_its_time_and_size_is_embedded_anew(name, make_run, folder):
    make, changed = EXCHANGES[name]
    config = make_run(folder)
    if name == "names swapped":
        for number in (1, 2):
            os.utime(folder / f"{number}.bmp", ns=(10**18, 10**18))
    _, before = refreshed(config)
    make(folder)
    report, after = refreshed(config)
    assert {key[0] for key, row in after.items() if row != before[key]} == changed
    assert (report.num_vectors, report.reasons) == (len(changed), {CONTENT_CHANGED: len(changed)})
    assert refreshed(config)[0].outcome == "nothing to do"


@pytest.mark.medium
def test_what_changes_only_change_times_costs_reading_and_no_vector(make_run, folder, tmp_path):
    config = make_run(folder)
    _, before = refreshed(config)
    (folder / "0.bmp").chmod(0o640)
    os.link(folder / "1.bmp", tmp_path / "link")  # as a backup of hard links does
    (folder / "2.bmp").rename(folder / "x.bmp"), (folder / "x.bmp").rename(folder / "2.bmp")
    shutil.copy2(folder / "3.bmp", tmp_path / "3"), shutil.copy2(tmp_path / "3", folder / "3.bmp")  # restored
    report, after = refreshed(config)
    assert (report.num_equal, report.num_vectors, after) == (4, 0, before)
    assert refreshed(config)[0].outcome == "nothing to do"
    (folder / "0.bmp").chmod(0o600)
    apart = make_run(folder, sources={"changed_by": "size+mtime"})
    assert refreshed(apart)[0].outcome == "nothing to do", "change times can be left out, at no cost"
    bitmap(folder / "4.bmp", 99)
    assert refreshed(apart)[0].num_vectors == 1


@pytest.mark.medium
def test_an_exchanged_tar_is_seen_and_only_what_differs_in_it_is_embedded(make_run, folder, tmp_path):
    def pack(path):
        with tarfile.open(path, "w") as tar:
            for number in range(4):
                tar.add(folder / f"{number}.bmp", f"{number}.bmp")

    pack(tmp_path / "a.tar")
    config = make_run([{"path": str(tmp_path / "a.tar"), "kind": "webdataset"}])
    refreshed(config)
    exchange(folder / "2.bmp", bitmap, 56)
    exchange(tmp_path / "a.tar", pack)
    report, _ = refreshed(config)
    assert (report.num_equal, report.num_vectors) == (3, 1)


@pytest.mark.medium
def test_a_file_that_a_table_names_and_the_target_of_a_link_are_seen(make_run, folder, tmp_path):
    table = tmp_path / "table.parquet"
    pq.write_table(pa.table({"id": ["a", "b"], "file": [str(folder / "1.bmp"), str(folder / "2.bmp")]}), table)
    config = make_run([{"path": str(table), "kind": "table", "columns": {"id": "id", "image": "file"}}])
    refreshed(config)
    exchange(folder / "2.bmp", bitmap, 55)
    report, _ = refreshed(config)
    assert (report.num_vectors, report.reasons) == (1, {CONTENT_CHANGED: 1})
    (folder / "link.bmp").symlink_to(folder / "3.bmp")
    linked = make_run(folder, store=str(tmp_path / "linked"))
    refreshed(linked)
    exchange(folder / "3.bmp", bitmap, 57)
    assert refreshed(linked)[0].num_vectors == 2, "the file, and the link to it"


@pytest.mark.medium
def test_a_store_of_an_earlier_version_is_left_alone_and_learns_of_exchanges(make_run, folder, monkeypatch):
    config = make_run(folder)
    with monkeypatch.context() as patch:
        patch.setattr("embedder.sources.local_listing.file_version", lambda status: time_text(status.st_mtime_ns))
        _, before = refreshed(config)
    assert items_of(config)["0.bmp"]["modified"].endswith("Z"), "as it was recorded"
    assert refreshed(config)[0].outcome == "nothing to do"
    exchange(folder / "3.bmp", bitmap, 33)
    exchange(folder / "0.txt", lambda path: path.write_text("a red dog"))
    report, after = refreshed(config)
    assert {key[0] for key, row in after.items() if row != before[key]} == {"0.bmp", "3.bmp"}
    assert report.num_vectors == 2
    assert refreshed(config)[0].outcome == "nothing to do"


@pytest.mark.medium
def test_all_models_check_the_same_items_and_embed_what_differs(make_run, folder, tmp_path, tiny_model, monkeypatch):
    freeze_states(monkeypatch)
    models = [{"uri": str(tiny_model)}, {"uri": other_towers(tmp_path), "name": "other", "kind": "towers"}]
    config = make_run(folder, model=models, sources={"verify_share": 0.5})
    refreshed(config)
    before = model_rows(config, "other")
    exchange(folder / "2.bmp", bitmap, 20)
    reports = [refreshed(config)[0] for _ in range(2)]
    assert [report.reasons for report in reports] == [report.models["other"].reasons for report in reports]
    after = model_rows(config, "other")
    assert {key[0] for key, row in after.items() if row["content_version"] != before[key]["content_version"]} == {
        "2.bmp"
    }
    assert sum(report.num_differing for report in reports) == 1


@pytest.mark.medium
def test_a_rollback_brings_back_records_by_which_an_exchange_is_seen(make_run, folder):
    config = make_run(folder)
    _, first = refreshed(config)
    exchange(folder / "4.bmp", bitmap, 44)
    _, second = refreshed(config)
    back(config)
    let_go(config)
    report, again = refreshed(config)
    assert (report.num_taken_over, report.num_vectors) == (1, 1), "taken over, by size, time and change time"
    np.testing.assert_array_equal(again["4.bmp", 0]["image_embedding"], second["4.bmp", 0]["image_embedding"])
    back(config)
    exchange(folder / "4.bmp", bitmap, 45)
    let_go(config)
    report, last = refreshed(config)
    assert report.num_taken_over == 0
    versions = {rows["4.bmp", 0]["content_version"] for rows in (first, second, last)}
    assert len(versions) == 3


@pytest.mark.medium
def test_changed_by_content_reads_all_and_says_what_differed(make_run, folder, monkeypatch):
    freeze_states(monkeypatch)
    config = make_run(folder, sources={"changed_by": "content"})
    _, before = refreshed(config)
    exchange(folder / "5.bmp", bitmap, 50)
    report, after = refreshed(config)
    assert (report.num_checked, report.num_differing, report.differing) == (8, 1, ("5.bmp",))
    assert (report.num_equal, report.num_vectors, report.reasons) == (0, 1, {CHECKED: 8})
    assert {key[0] for key, row in after.items() if row != before[key]} == {"5.bmp"}
    expected = embedder.open_store(config.store).encode_image([folder / "5.bmp"])[0]
    np.testing.assert_allclose(after["5.bmp", 0]["image_embedding"], expected, atol=1e-5)
    assert refreshed(config)[0].num_checked == 8, "every run reads all"


def freeze_states(monkeypatch):
    """Let listings miss every exchange, as of a disk without change times."""
    for module in ("local_listing", "globbing", "table_items"):
        monkeypatch.setattr(
            f"embedder.sources.{module}.file_version", lambda status: f"{status.st_mtime_ns // 10**15}", raising=True
        )


@pytest.mark.medium
def test_a_share_checks_each_item_once_in_a_cycle_the_oldest_records_first(make_run, folder, monkeypatch):
    freeze_states(monkeypatch)
    config = make_run(folder, sources={"verify_share": 0.25})
    _, before = refreshed(config)
    states = [items_of(config)]
    exchange(folder / "6.bmp", bitmap, 60)
    reports = []
    for _ in range(4):
        reports.append(refreshed(config)[0])
        states.append(items_of(config))
    checked = [{name for name in new if new[name]["run_id"] != old[name]["run_id"]} for old, new in pairwise(states)]
    assert [len(each) for each in checked] == [2, 2, 2, 2]
    assert set.union(*checked) == set(states[0]), "each in four nights"
    assert [report.num_checked for report in reports] == [2] * 4
    assert [report.differing for report in reports if report.num_differing] == [("6.bmp",)]
    after = rows_of(config)
    assert {key[0] for key, row in after.items() if row != before[key]} == {"6.bmp"}
    assert items_of(config)["6.bmp"]["content_version"] != states[0]["6.bmp"]["content_version"]


@pytest.mark.medium
def test_checks_are_forecast_and_left_to_refreshes_and_come_after_new_items(make_run, folder, monkeypatch):
    freeze_states(monkeypatch)
    config = make_run(folder, sources={"verify_share": 0.5})
    refreshed(config)
    assert [(each.reason, each.num_items) for each in forecast(config, IngestOptions(kind="refresh")).reasons] == [
        (CHECKED, 4)
    ]
    assert embed(config).outcome == "nothing to do"
    bitmap(folder / "new.bmp", 70)
    report, _ = refreshed(config, limit=2)
    assert (report.num_new, report.num_checked, report.num_left) == (1, 1, 3)


def test_a_check_of_what_can_not_be_read_any_more_keeps_the_vector_and_counts(make_run, folder, monkeypatch):
    freeze_states(monkeypatch)
    config = make_run(folder, sources={"verify_share": 1}, min_rejects=10)
    _, before = refreshed(config)
    exchange(folder / "7.bmp", lambda path: path.write_bytes(b"\x00" * path.stat().st_size))
    report, after = refreshed(config)
    assert (report.num_checked, report.differing, report.num_stale) == (8, ("7.bmp",), 1)
    assert after == before


@pytest.mark.parametrize("share", [0.001, 0.1, 0.3, 0.34, 0.5, 0.99, 1])
def test_a_share_of_one_nth_sees_all_in_n_nights(share):
    names = [f"{number:03d}" for number in range(100)]
    when = dict.fromkeys(names, 0)
    nights = -(-1 // share)
    for night in range(1, int(nights) + 1):
        items = {"item_id": names, "state": ["embedded"] * 100, "updated_at": [when[name] for name in names]}
        chosen = ContentChecks(share).choose(pa.table(items)).to_pylist()
        assert sum(chosen) == -(-100 * share // 1)
        when |= {name: night for name, is_it in zip(names, chosen, strict=True) if is_it}
    assert all(when.values())


def test_etags_are_of_buckets_alone(make_run, folder):
    with pytest.raises(ConfigError, match=r'sources.changed_by = "etag": source .* no bucket.*"content"'):
        embed(make_run(folder, sources={"changed_by": "etag"}))
    with pytest.raises(ConfigError, match="changed_by"):
        make_run(folder, sources={"changed_by": "mtime"})
    with pytest.raises(ConfigError, match="verify_share"):
        make_run(folder, sources={"verify_share": 1.5})


def test_records_keep_change_times_beside_the_times_that_conditions_read(make_run, folder):
    config = make_run(folder)
    refreshed(config)
    modified = items_of(config)["1.bmp"]["modified"]
    bare = without_change_time(modified)
    assert (modified.startswith(bare), bare.endswith("Z"), modified != bare) == (True, True, True)
    store = embedder.open_store(config.store)
    assert len(store.search("a cat", k=20, where="file_date > '2020-01-01'")) == 8
    assert len(store.search("a cat", k=20, where="file_date > '2120-01-01'")) == 0
