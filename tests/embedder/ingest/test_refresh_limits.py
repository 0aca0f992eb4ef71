"""A refresh that is cut short publishes what it has, or keeps it; a listing that lost too much is refused."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import samples
from refresh_runs import contents, items_of, nightly_file, refreshed, rows_of

from embedder.config import load_config
from embedder.errors import RunFailedError, SourceError
from embedder.executors.signals import stop_at
from embedder.ingest import embed as embed_module
from embedder.ingest import execute
from embedder.ingest.embed import refresh
from embedder.ingest.work import IngestOptions
from embedder.observability.run_observer import RUNS_FILE
from embedder.sources.fetch import Fetcher
from embedder.store.files import StoreFiles
from embedder.store.lock import write_lock


def two_sources(tmp_path, make_run, **changes):
    """Two named sources, of 40 and of 4 pictures."""
    for name, num_images in (("large", 40), ("small", 4)):
        samples.folder(tmp_path / name, num_images=num_images, captions=False)
    return make_run([{"path": str(tmp_path / name), "name": name} for name in ("large", "small")], **changes)


@pytest.mark.medium
def test_a_limit_publishes_what_is_done_and_the_next_refresh_goes_on(make_run, tmp_path):
    config = make_run(samples.folder(tmp_path / "in", num_images=10))
    for expected, left in ((4, 6), (8, 2), (10, 0)):
        report, rows = refreshed(config, limit=4)
        assert report.published
        assert (len(rows), report.num_left) == (expected, left)
    assert len({row["run_id"] for row in rows.values()}) == 3


@pytest.mark.medium
def test_time_that_is_up_publishes_what_is_done_and_the_next_refresh_goes_on(make_run, tmp_path, monkeypatch):
    source = samples.folder(tmp_path / "in", num_images=4)
    config = make_run(source, rows_per_part=4, batch_size=2)
    refreshed(config)
    for number in range(50):
        (source / f"new{number}.png").write_bytes(samples.image_bytes(100 + number))
    report, rows = refreshed(config, max_hours=0.0)
    assert (report.published, report.num_left, len(rows)) == (False, 50, 4)
    assert "50 items left for the next refresh" in report.outcome

    fetch = Fetcher.fetch
    clock = {}

    @contextmanager
    def clock_of_the_test(request_stop, moment_s):
        clock.update(request_stop=request_stop, time_up=threading.Event())
        yield clock["time_up"]

    def fetch_until_time_is_up(self, uri, **options):
        if uri.endswith("new30.png"):
            clock["time_up"].set()
            clock["request_stop"]()
        return fetch(self, uri, **options)

    with monkeypatch.context() as patch:
        patch.setattr(execute, "stop_at", clock_of_the_test)
        patch.setattr(Fetcher, "fetch", fetch_until_time_is_up)
        report, rows = refreshed(config, max_hours=1)
    assert (report.published, len(rows)) == (True, 54 - report.num_left)
    assert 0 < report.num_left < 50
    report, rows = refreshed(config, max_hours=1)
    assert (report.published, report.num_left, len(rows)) == (True, 0, 54)


def test_the_clock_asks_the_run_to_stop_and_says_so(said):
    asked = threading.Event()

    with stop_at(asked.set, time.monotonic() + 0.05) as time_up:
        assert asked.wait(30)
    assert time_up.is_set()
    assert "time is up" in said[0]
    asked.clear()
    for never in (None, time.monotonic() + 1000, float("inf")):
        with stop_at(asked.set, never) as time_up:
            pass
        assert not (time_up.is_set() or asked.is_set())


@pytest.mark.medium
def test_a_source_that_is_gone_or_empty_is_refused_and_retired_where_it_is_forced(make_run, tmp_path):
    config = two_sources(tmp_path, make_run)
    refreshed(config)
    before = contents(config.store)
    (tmp_path / "small").rename(tmp_path / "away")
    with pytest.raises(SourceError):
        refresh(config, IngestOptions(kind="refresh"))
    (tmp_path / "small").mkdir()  # where a disk is mounted otherwise
    refused = r"guard retire: .*small: 4 of 4 .*max_retire_fraction = 0.05.*mounted.*--force retire"
    with pytest.raises(RunFailedError, match=refused):
        refresh(config, IngestOptions(kind="refresh"))
    assert contents(config.store) == before
    record = json.loads((Path(config.store) / RUNS_FILE).read_text().splitlines()[-1])
    (verdict,) = record["guards"]
    assert (record["exit_code"], verdict["name"], verdict["figure"], verdict["limit"]) == (1, "retire", 1.0, 0.05)

    report, rows = refreshed(config, forced=("retire",))
    assert report.num_retired == 4
    assert {key[0].partition(":")[0] for key in rows} == {"large"}
    (verdict,) = [guard for guard in report.guards if guard["name"] == "retire"]
    assert (verdict["passed"], verdict["forced"], verdict["figure"]) == (False, True, 1.0)
    saved = json.loads((StoreFiles(config.store).folder / "runs" / report.run_id / "report.json").read_text())
    assert saved["guards"] == list(report.guards)


@pytest.mark.medium
def test_a_store_may_become_empty_where_it_is_forced_to_and_fill_again(make_run, tmp_path):
    source = samples.folder(tmp_path / "in", num_images=3, captions=False)
    config = make_run(source)
    refreshed(config)
    shutil.rmtree(source / "pictures")
    _, rows = refreshed(config, forced=("retire",))
    assert (rows, items_of(config)) == ({}, {})
    (source / "back.png").write_bytes(samples.image_bytes(1))
    _, rows = refreshed(config)
    assert set(rows) == {("back.png", 0)}


@pytest.mark.medium
def test_what_another_run_published_while_this_one_listed_is_not_taken_for_gone(make_run, tmp_path, monkeypatch):
    source = samples.folder(tmp_path / "in", num_images=4, captions=False)
    config = make_run(source, max_retire_fraction=1)
    refreshed(config)

    @contextmanager
    def late_lock(files):
        monkeypatch.undo()  # between this run's listing and its lock, a whole other run has its turn
        (source / "new.png").write_bytes(samples.image_bytes(50))
        refreshed(config)
        with write_lock(files) as lease:
            yield lease

    monkeypatch.setattr(embed_module, "write_lock", late_lock)
    report, rows = refreshed(config)
    assert (report.outcome, len(rows)) == ("nothing to do", 5)


@pytest.mark.medium
def test_two_refreshes_at_once_are_one_refresh_and_one_clear_line(make_run, tmp_path, run_embedder):
    source = samples.folder(tmp_path / "in", num_images=2)
    config = make_run(source)
    path = nightly_file(config)
    assert load_config(path).source[0].path == str(source)
    with write_lock(StoreFiles(config.store)):
        code, _, stderr = run_embedder("refresh", path)
    assert code == 2
    assert f"another run is writing to it (process {os.getpid()} on " in stderr and "{" not in stderr
    assert len(stderr.strip().splitlines()) == 1
    commands = [subprocess.Popen([sys.executable, "-m", "embedder", "refresh", str(path)]) for _ in range(2)]
    assert sorted(command.wait(120) for command in commands)[0] == 0
    assert len(rows_of(config)) == 2
