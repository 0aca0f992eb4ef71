"""Disks that fill, stores that can't be written, files that rot, sources that go away, clocks that go back."""

import json
import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import samples
from embedding_runs import assert_same_vectors, embedded
from refresh_runs import rows_of
from store_states import set_clock

import embedder
from embedder.errors import RunFailedError, StoreError
from embedder.executors import local
from embedder.ingest import publish_or_refuse
from embedder.ingest.embed import embed, refresh
from embedder.ingest.work import IngestOptions
from embedder.store.backends import DiskBackend
from embedder.store.files import StoreFiles
from embedder.store.store_errors import StoreUnwritableError
from embedder.store.tables.tables import RecordTable


def refreshed(config):
    return refresh(config, IngestOptions())


def can_mount():
    return os.geteuid() == 0 and shutil.which("unshare") and not subprocess.call(["unshare", "-m", "true"])


needs_mounts = pytest.mark.skipif(not can_mount(), reason="needs the right to mount a tmpfs")

IN_A_SMALL_DISK = """
import json, subprocess, sys
from pathlib import Path
sys.path[:0] = json.loads(sys.argv[2])
import test_failures as tests
from embedder.config import load_config
from embedder.errors import EmbedderError, RunFailedError

config = load_config(overrides=json.loads(sys.argv[1]))
store = Path(config.store)
messages = []

def mount(options):
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", store], check=True)

def attempt():
    try:
        tests.refreshed(config)
    except (EmbedderError, RunFailedError) as error:
        messages.append(f"{type(error).__name__}: {error}")
        return False
    return True
"""


def in_a_small_disk(config, script):
    """Run the script where the store is a tmpfs of its own, which goes with its end; what it prints last, as JSON."""
    Path(config.store).mkdir()
    settings = json.dumps(config.model_dump(mode="json", exclude_unset=True))
    command = ["unshare", "-m", sys.executable, "-c", IN_A_SMALL_DISK + script, settings, json.dumps(sys.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_published_run_has_not_failed_where_its_report_can_not_be_kept(make_run, tmp_path, monkeypatch, said):
    def write(*_):
        raise StoreUnwritableError("store: no space left on device; free some space, and try again")

    monkeypatch.setattr(publish_or_refuse, "_write_timeline", write)
    report, rows = embedded(make_run(samples.folder(tmp_path / "in", num_images=4)))
    assert report.published and rows
    assert [each for each in said if "the run is published, and its report is not kept: store: no space" in each]


@needs_mounts
@pytest.mark.slow
def test_a_disk_that_is_full_at_any_moment_of_a_first_run_loses_nothing(make_run, tmp_path):
    """The disk grows by two pages after each failure, so that it fills at one step after the other."""
    source = samples.folder(tmp_path / "in", num_images=24)
    config = make_run(source, rows_per_part=4)
    found = in_a_small_disk(
        config,
        """
size = 16
mount(f"size={size}k")
while not attempt():
    assert not (store / "CURRENT.json").exists(), "nothing is half published"
    size += 8
    mount(f"remount,size={size}k")
names = ("image_embedding", "text_embedding", "content_version")
rows = {key[0]: {name: row[name] for name in names} for key, row in tests.rows_of(config).items()}
print(json.dumps({"messages": messages, "rows": rows, "runs": len([path for path in (store / "runs").iterdir()])}))
""",
    )
    assert len(found["messages"]) >= 4
    for message in found["messages"]:
        assert message.startswith(("StoreError: store ", "StoreUnwritableError: store ")), message
        assert "free some space" in message
    assert found["runs"] == 1, "the same run continued each time"
    _, undisturbed = embedded(make_run(source, store=str(tmp_path / "undisturbed")))
    rows = {(item_id, 0): row for item_id, row in found["rows"].items()}
    assert_same_vectors(rows, undisturbed, same=["content_version"])


@needs_mounts
@pytest.mark.slow
def test_a_disk_that_is_full_in_a_refresh_leaves_the_old_state_served(make_run, tmp_path):
    source = samples.folder(tmp_path / "in", num_images=24)
    found = in_a_small_disk(
        make_run(source, rows_per_part=4),
        """
import os, samples
mount("size=64m")
assert attempt()
before = tests.rows_of(config)
source = Path(config.source[0].path)
for number in range(8):
    (source / "pictures" / f"{number:04d}.png").write_bytes(samples.image_bytes(100 + number))
used = 1024 * int(subprocess.run(["du", "-sk", store], capture_output=True, text=True, check=True).stdout.split()[0])
failures = 0
for spare in range(8192, 400_000, 16384):
    mount(f"remount,size={used + spare}")
    if attempt():
        break
    failures += 1
    assert tests.rows_of(config) in (before,), "the old state is served"
after = tests.rows_of(config)
changed = [key[0] for key, row in after.items() if row["image_embedding"] != before[key]["image_embedding"]]
print(json.dumps({"messages": messages, "failures": failures, "changed": sorted(changed)}))
""",
    )
    assert found["failures"] >= 2
    assert all("free some space" in message for message in found["messages"]), found["messages"]
    assert found["changed"] == [f"pictures/{number:04d}.png" for number in range(8)]


@pytest.mark.medium
@needs_mounts
def test_a_store_made_read_only_is_refused_and_still_read(make_run, tmp_path):
    source = samples.folder(tmp_path / "in", num_images=6)
    found = in_a_small_disk(
        make_run(source),
        """
mount("size=64m")
assert attempt()
before = tests.rows_of(config)
(Path(config.source[0].path) / "new.png").write_bytes(tests.samples.image_bytes(77))
mount("remount,ro")
assert not attempt()
assert tests.rows_of(config) == before
mount("remount,rw")
assert attempt()
print(json.dumps({"messages": messages, "num_more": len(tests.rows_of(config)) - len(before)}))
""",
    )
    (message,) = found["messages"]
    assert message.startswith("StoreError: store ") and "can't be written" in message
    assert found["num_more"] == 1


@pytest.mark.slow
def test_a_file_size_limit_is_an_error_and_the_next_run_goes_on(make_run, tmp_path):
    """RLIMIT_FSIZE, as quotas and some containers have it."""
    source = samples.folder(tmp_path / "in", num_images=8)
    config = make_run(source)
    code = """
import json, resource, signal, sys
sys.path[:0] = json.loads(sys.argv[2])
import test_failures as tests
from embedder.config import load_config
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))
tests.refreshed(load_config(overrides=json.loads(sys.argv[1])))
"""
    settings = json.dumps(config.model_dump(mode="json", exclude_unset=True))
    command = [sys.executable, "-c", code, settings, json.dumps(sys.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode != 0
    assert "File too large" in done.stderr or "file too large" in done.stderr, done.stderr[-1000:]
    assert not (tmp_path / "store" / "CURRENT.json").exists()
    assert refreshed(config).published
    assert len(rows_of(config)) == 8


def damage(path, how):
    data = path.read_bytes()
    changed = {"cut off": data[: len(data) // 2], "noise": os.urandom(len(data)), "empty": b""}
    path.unlink() if how == "gone" else path.write_bytes(changed[how])


@pytest.mark.medium
@pytest.mark.parametrize("how", ["noise", "gone"])
def test_a_damaged_part_file_of_an_unfinished_run_is_named_with_the_cure_which_works(make_run, tmp_path, how):
    source = samples.folder(tmp_path / "in", num_images=6)
    (source / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    config = make_run(source, rows_per_part=2, batch_size=2, min_rejects=1)
    with pytest.raises(RunFailedError, match="rejects"):
        refreshed(config)
    damage(next((tmp_path / "store" / "items").glob("part-*")), how)
    (source / "broken.png").unlink()
    with pytest.raises(StoreError, match="a part file that a run had finished is missing or damaged") as caught:
        refreshed(config)
    named = Path(str(caught.value).partition("delete ")[2].partition(",")[0])
    assert named.is_file() and named.parent.name == "journal"
    named.unlink()
    assert refreshed(config).published
    assert len(rows_of(config)) == 6


@pytest.mark.medium
@pytest.mark.parametrize("how", ["cut off", "gone"])
def test_a_damaged_published_part_file_is_named_and_nothing_is_changed(make_run, tmp_path, how):
    source = samples.folder(tmp_path / "in", num_images=6)
    config = make_run(source)
    refreshed(config)
    files = StoreFiles(config.store)
    current = (tmp_path / "store" / "CURRENT.json").read_bytes()
    (path,) = RecordTable(files, "embeddings").paths()
    damage(tmp_path / "store" / "embeddings" / path, how)
    (source / "pictures" / "0001.png").write_bytes(samples.image_bytes(77))
    with pytest.raises(StoreError, match="a part file of version .* can't be read") as caught:
        refreshed(config)
    assert path in str(caught.value) and "restore the file" in str(caught.value)
    assert (tmp_path / "store" / "CURRENT.json").read_bytes() == current


@pytest.mark.medium
def test_a_source_that_vanishes_in_the_middle_and_comes_back_ends_in_the_right_store(make_run, tmp_path, monkeypatch):
    source = samples.folder(tmp_path / "in", num_images=60)
    config = make_run(source, rows_per_part=4, batch_size=4, min_rejects=1)
    write_parts = local.write_parts

    def unmount_after_the_second(models, task, rows):
        if task == 1:
            source.rename(tmp_path / "unmounted")
        return write_parts(models, task, rows)

    monkeypatch.setattr(local, "write_parts", unmount_after_the_second)
    with pytest.raises(RunFailedError, match="rejected, more than max_reject_fraction"):
        refreshed(config)
    monkeypatch.undo()
    with pytest.raises(embedder.errors.SourceError):
        refreshed(config)
    (tmp_path / "unmounted").rename(source)
    report = refreshed(config)
    assert report.published and report.num_rejected == 0
    _, undisturbed = embedded(make_run(source, store=str(tmp_path / "undisturbed")))
    assert_same_vectors(rows_of(config), undisturbed, same=["content_version"])


@pytest.mark.medium
def test_a_clock_set_back_by_years_publishes_all_the_same(make_run, tmp_path, monkeypatch):
    source = samples.folder(tmp_path / "in", num_images=4)
    config = make_run(source)
    first = refreshed(config)
    set_clock(monkeypatch, lambda: datetime.now(UTC) - timedelta(days=5000))
    for number in range(2):
        (source / f"new{number}.png").write_bytes(samples.image_bytes(50 + number))
        report = refreshed(config)
        assert report.published and report.run_id > first.run_id
    monkeypatch.undo()
    assert refreshed(config).num_unchanged == 6
    assert len(rows_of(config)) == 6


def test_a_first_run_killed_by_a_lack_of_space_for_its_report_is_still_published(make_run, tmp_path, monkeypatch):
    """What stands after the swap can't take the publication back."""
    config = make_run(samples.folder(tmp_path / "in", num_images=4))
    put = DiskBackend.put

    def no_report(self, path, data, condition):
        if path.endswith("report.json"):
            raise StoreError("store: no space left on device; free some space")
        return put(self, path, data, condition)

    monkeypatch.setattr(DiskBackend, "put", no_report)
    with pytest.raises(StoreError):
        embed(config)
    monkeypatch.undo()
    assert len(rows_of(config)) == 4
    assert refreshed(config).num_unchanged == 4
