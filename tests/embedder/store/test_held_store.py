"""A rollback holds until it is released, and a run that may not publish reports so."""

import json
import re
import shutil
from contextlib import suppress
from itertools import count

import pytest
import samples
from refresh_runs import contents, nightly_file, refreshed, rows_of
from rollback_runs import back, let_go, nights
from store_states import Killed, dying, no_index

import embedder
from embedder.errors import ConfigError
from embedder.ingest.dry_run import forecast
from embedder.ingest.embed import refresh
from embedder.ingest.work import IngestOptions
from embedder.plugins.maintain.purge.purge import purge
from embedder.plugins.maintain.vacuum import vacuum
from embedder.store.files import StoreFiles
from embedder.store.layout import CURRENT_FILE, Current, read_current
from embedder.store.lock import write_lock
from embedder.store.maintenance.compact import PartTarget, compact
from embedder.store.maintenance.rollback import release, rollback
from embedder.store.publish.history import publications
from embedder.store_index.keep_index import index_choice

pytestmark = pytest.mark.medium

REFRESH = IngestOptions(kind="refresh")


@pytest.fixture
def source(tmp_path):
    return samples.folder(tmp_path / "in", num_images=6)


def test_a_held_store_is_left_alone_by_refresh_and_embed_and_both_say_so(make_run, source, tmp_path, run_embedder):
    config = make_run(source)
    first, _ = nights(config, source, 1)
    (run_id, left) = (each.run_id for each in publications(StoreFiles(config.store)))
    back(config)
    before = contents(config.store)
    path = nightly_file(config, f'metrics_file = "{tmp_path / "embedder.prom"}"')
    for command in (("refresh", path), ("embed", "--config", path), ("rejects", "--retry", "--config", path)):
        code, report, stderr = run_embedder(*command, "--json")
        assert code == 0, stderr
        if "outcome" not in report:  # no reject to try again
            continue
        assert (report["held"], report["published"], report["run_id"]) == (True, False, None)
        hold = read_current(StoreFiles(config.store)).hold
        assert f"holds it at run {run_id} since {hold.since:%Y-%m-%d %H:%M}" in report["outcome"]
        assert f"embedder rollback --release --store {config.store}" in report["outcome"]
        assert "\n" not in report["outcome"]
    assert contents(config.store) == before
    assert rows_of(config) == first
    assert (hold.from_run, hold.to_run, hold.released_at) == (left, run_id, None)
    lines = [json.loads(line) for line in (tmp_path / "store" / "runs.jsonl").read_text().splitlines()]
    assert lines[-1]["held"] is True
    assert lines[-1]["exit_code"] == 0
    assert "rollback --release" in lines[-1]["message"]
    assert lines[0]["held"] is False
    metrics = (tmp_path / "embedder.prom").read_text()
    assert "embedder_held{" in metrics
    assert re.search(r'\{guard="hold",[^}]*\} 0\.0', metrics)


def test_a_held_refresh_lists_no_source(make_run, source):
    config = make_run(source)
    nights(config, source, 1)
    back(config)
    shutil.rmtree(source)
    assert refresh(config, REFRESH).held


def test_a_dry_run_of_a_held_store_says_so_and_what_would_come(make_run, source, tmp_path, run_embedder):
    config = make_run(source)
    nights(config, source, 1)
    back(config)
    (source / "pictures" / "0200.png").write_bytes(samples.image_bytes(200))
    before = contents(config.store)
    found = forecast(config, REFRESH)
    assert "rollback --release" in found.held
    assert (found.num_taken_over, found.num_to_embed) == (2, 1)
    assert contents(config.store) == before
    let_go(config)
    assert forecast(config, REFRESH).held is None
    report, _ = refreshed(config)
    assert (report.num_taken_over, report.num_new) == (2, 1)


def test_history_and_json_show_the_hold_until_it_is_released(make_run, source, run_embedder):
    config = make_run(source)
    nights(config, source, 1)
    store = ("--store", config.store)
    code, done, _ = run_embedder("rollback", *store, "--json")
    assert (code, done["hold"]["to_run"]) == (0, done["restores"])
    assert run_embedder("history", *store, "--json")[1]["hold"]["since"] == done["hold"]["since"]
    code, released, _ = run_embedder("rollback", "--release", *store, "--json")
    assert (code, released["released"], released["hold"]["from_run"]) == (0, True, done["hold"]["from_run"])
    assert run_embedder("history", *store, "--json")[1]["hold"] is None
    code, released, _ = run_embedder("rollback", "--release", *store, "--json")
    assert (code, released["released"]) == (0, False), "a second release is no mistake"
    code, _, stderr = run_embedder("rollback", done["restores"], "--release", *store)
    assert code == 2
    assert len(stderr.strip().splitlines()) == 1


def test_what_changes_no_row_keeps_the_hold(make_run, source, run_embedder):
    config = make_run(source, rows_per_part=2, batch_size=2)
    nights(config, source, 1)
    back(config)
    files = StoreFiles(config.store)
    hold = read_current(files).hold
    with write_lock(files):
        assert compact(files, PartTarget())[0] is not None
    with write_lock(files):
        assert purge(files, ["pictures/0001.png"], index_choice(files, reuse=False)).published is not None
    assert run_embedder("index", "build", "--store", config.store)[0] == 0
    with write_lock(files):
        vacuum(files)
    assert read_current(files).hold == hold
    assert refresh(config, REFRESH).held


def test_a_rollback_of_a_rollback_remembers_what_the_first_one_left(make_run, source):
    config = make_run(source)
    nights(config, source, 2)
    first, second, third = (each.run_id for each in publications(StoreFiles(config.store)))
    back(config, second)
    again = back(config, first)
    assert (again.restores, read_current(StoreFiles(config.store)).hold.from_run) == (first, third)
    back(config, third)
    hold = read_current(StoreFiles(config.store)).hold
    assert (hold.from_run, hold.to_run) == (third, third)
    let_go(config)
    assert refreshed(config)[0].outcome == "nothing to do"


def test_force_passes_the_hold_once_and_is_told(make_run, source, tmp_path, run_embedder):
    config = make_run(source)
    _, second = nights(config, source, 1)
    back(config)
    report, rows = refreshed(config, forced=("hold",))
    assert report.published
    assert rows == second
    assert [guard["forced"] for guard in report.guards if guard["name"] == "hold"] == [True]
    assert read_current(StoreFiles(config.store)).hold is None, "what was rolled back is not served any more"
    with pytest.raises(ConfigError, match="the guards are hold, retire"):
        refreshed(config, forced=("hodl",))


def test_a_store_of_before_has_no_hold_and_older_readers_take_the_new_file(make_run, source):
    config = make_run(source)
    nights(config, source, 1)
    back(config)
    files = StoreFiles(config.store)
    content = json.loads(files.read(CURRENT_FILE))
    assert Current.model_validate({key: value for key, value in content.items() if key != "hold"}).is_held is False
    assert content["format_version"] == 2
    older = json.loads(files.read(CURRENT_FILE))
    older["hold"]["until"] = "whatever a newer writer adds"
    files.write(CURRENT_FILE, json.dumps(older).encode())
    let_go(config)
    assert json.loads(files.read(CURRENT_FILE))["hold"]["until"] == "whatever a newer writer adds"


def test_setting_and_releasing_are_whole_or_not_at_all_wherever_they_die(make_run, source, tmp_path, monkeypatch):
    config = make_run(source)
    nights(config, source, 1)
    for number in count():
        copy = StoreFiles(shutil.copytree(config.store, tmp_path / f"copy {number}"))
        with dying(monkeypatch, number) as made, suppress(Killed), write_lock(copy):
            rollback(copy, None, no_index)
            release(copy)
        current = read_current(copy)
        assert (current.restores is not None) == (current.hold is not None), "the rows and the hold come together"
        if len(made) < number:
            break
    assert current.hold.released_at is not None


def test_a_follower_does_not_open_anew_what_was_only_released(make_run, source):
    config = make_run(source)
    nights(config, source, 1)
    back(config)
    with embedder.follow_store(config.store, every_s=1000) as following:
        let_go(config)
        assert following.look() is False
