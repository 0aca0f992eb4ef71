"""Commands between two sessions of a run that publishes as it goes, and guards on what it would publish."""

import time
from itertools import count

import pytest
import samples
from command_runs import run_here
from refresh_runs import items_of, rows_of
from store_states import Killed, no_index

import embedder
from embedder.errors import RunFailedError, StoreError
from embedder.ingest import embed as embed_module
from embedder.ingest.dry_run import forecast
from embedder.ingest.embed import embed, refresh
from embedder.ingest.work import IngestOptions
from embedder.store.files import StoreFiles
from embedder.store.journal.runs import all_runs, unfinished_runs
from embedder.store.layout import read_current
from embedder.store.maintenance.rollback import rollback
from embedder.store.publish.history import publications

pytestmark = pytest.mark.medium

REFRESH = IngestOptions(kind="refresh")


@pytest.fixture
def source(tmp_path):
    return samples.folder(tmp_path / "in", num_images=8)


@pytest.fixture
def config(make_run, source):
    return make_run(source, publish_every_s=0.05, rows_per_part=2, batch_size=2, min_rejects=1)


@pytest.fixture
def killed(monkeypatch):
    """Runs an ingest that dies once its first few items are published, or once something is true."""

    def run(command, config, num_items, until=None):
        execute = embed_module.execute
        until = until or (lambda: read_current(StoreFiles(config.store)) is not None and len(items_of(config)) == goal)
        goal = num_items + (len(items_of(config)) if read_current(StoreFiles(config.store)) else 0)

        def execute_some(inputs, run, chosen, *rest):
            execute(inputs, run, chosen.slice(0, num_items), *rest)
            deadline = time.monotonic() + 60
            while not until():
                assert time.monotonic() < deadline
                time.sleep(0.02)
            raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(embed_module, "execute", execute_some)
            with pytest.raises(Killed):
                command(config)

    return run


def test_between_two_sessions_every_command_sees_what_is_published(config, source, killed):
    killed(refresh, config, 5)
    files = StoreFiles(config.store)
    (run,) = unfinished_runs(files)
    assert len(embedder.open_store(config.store).search("red", k=9)) == 5
    found = forecast(config, REFRESH)
    assert (found.num_unchanged, found.num_to_embed, found.num_retired) == (5, 3, 0)
    with pytest.raises(StoreError, match="nothing was published before"):
        rollback(files, None, no_index)
    assert "refresh, interim" in run_here("history", "--store", config.store).stdout
    report = refresh(config)
    assert (report.run_id, report.published, report.num_items) == (run.run_id, True, 8)
    assert len(rows_of(config)) == len(items_of(config)) == 8
    assert unfinished_runs(files) == []


def test_items_leave_at_the_end_and_not_before(config, source, killed):
    embed(config.model_copy(update={"publish_every_s": None}))
    paths = sorted((source / "pictures").glob("*.png"))
    paths[1].unlink()
    paths[3].write_bytes(samples.image_bytes(99))
    (source / "pictures" / "new.png").write_bytes(samples.image_bytes(100))
    config = config.model_copy(update={"max_retire_fraction": 1.0})
    killed(refresh, config, 2, until=lambda: "pictures/new.png" in items_of(config))
    assert len(items_of(config)) == 9
    report = refresh(config)
    assert report.num_retired == 1
    assert len(items_of(config)) == len(rows_of(config)) == 8


def test_a_run_killed_when_all_is_published_comes_to_its_end(config, killed):
    killed(embed, config, 8)
    (run,) = all_runs(StoreFiles(config.store))
    report = embed(config)
    assert (report.run_id, report.published) == (run.run_id, True)
    assert read_current(StoreFiles(config.store)).run_id == run.run_id
    assert len(rows_of(config)) == 8
    assert embed(config).outcome == "nothing to do"


def test_a_rollback_between_two_sessions_takes_over_what_was_published(config, source, killed):
    embed(config)
    for number in range(4):
        (source / f"new{number}.png").write_bytes(samples.image_bytes(200 + number))
    killed(refresh, config, 2)
    files = StoreFiles(config.store)
    rollback(files, None, no_index)
    assert len(rows_of(config)) == 8
    report = refresh(config, forced=("hold",))
    assert (report.num_taken_over, report.published) == (2, True)
    assert len(rows_of(config)) == len(items_of(config)) == 12


def test_what_a_guard_refuses_waits_and_the_end_is_refused_too(config, source, killed, caplog):
    for number in range(2):
        (source / f"broken{number}.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken%d" % number)
    with caplog.at_level("WARNING"):
        killed(embed, config, 10, until=lambda: "guard rejects: 2 of 10" in caplog.text)
    assert "the run continues" in caplog.text
    assert read_current(StoreFiles(config.store)) is None
    with pytest.raises(RunFailedError, match=r"guard rejects: 2 of 10 .*; nothing is published"):
        embed(config)


def test_a_refused_end_leaves_what_was_published_before(config, source, killed):
    killed(embed, config, 8)
    for number in range(2):
        (source / f"broken{number}.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken%d" % number)
    with pytest.raises(RunFailedError, match=r"nothing is published beyond 8 items, published while it ran"):
        embed(config)
    assert len(rows_of(config)) == 8
    report = embed(config, forced=("rejects",))
    assert (report.published, report.num_rejected) == (True, 2)
    assert (len(rows_of(config)), len(items_of(config))) == (8, 10)


def test_vectors_of_another_model_wait_for_all_of_them(config, killed):
    embed(config)
    num_before = len(publications(StoreFiles(config.store)))
    looks = count()
    other = config.model_copy(update={"segment_s": 7.0})
    killed(refresh, other, 5, until=lambda: next(looks) > 25)
    assert len(publications(StoreFiles(config.store))) == num_before
    assert refresh(other).published
    assert len(rows_of(other)) == 8
