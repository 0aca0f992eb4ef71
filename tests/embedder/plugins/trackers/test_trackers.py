"""Trackers: MLflow and W&B read a run back; one that fails, hangs or is away costs a warning, never the run."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import samples
import train_samples
from embedding_runs import embedded
from PIL import Image

from embedder import installation
from embedder.config import RunConfig
from embedder.config_toml.sections import TrackerConfig
from embedder.errors import ConfigError
from embedder.ingest.embed import embed
from embedder.installation import InstallationError
from embedder.observability import run_tracking, trackers
from embedder.observability.run_tracking import RunTracking, contact_sheet, parameters_of
from embedder.observability.trackers import Tracker, track_run
from embedder.plugins.trackers import clients
from embedder.plugins.train.train_run import train
from embedder.store.files import StoreFiles


@pytest.fixture(autouse=True)
def extras_are_looked_for_again(monkeypatch):
    """No client reports a test to its makers, and what a test hides is found by the next one."""
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    yield
    installation.missing.cache_clear()


class Notes:
    """Client that notes its calls; one of them may fail, or wait."""

    def __init__(self, fails_at=None, waits_for=None):
        self.calls, self._fails_at, self._waits_for = [], fails_at, waits_for

    def begin(self, name, parameters, tags):
        self._note("begin", name)
        return "id-1"

    def log(self, values, step):
        self._note("log", step)

    def add_files(self, files):
        self._note("files", sorted(files))

    def end(self, *, succeeded):
        self._note("end", succeeded)

    def _note(self, call, value):
        if self._waits_for is not None:
            self._waits_for.wait(30)
        if len(self.calls) == self._fails_at:
            raise ConnectionError("the server is gone\nfor good")
        self.calls.append((call, value))


def warnings_of(caplog):
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def test_calls_reach_the_client_in_order_and_the_end_is_waited_for():
    client = Notes()
    tracker, ids = Tracker(client, "notes"), []
    tracker.log({"early": 1.0}, step=0)  # before there is a run
    tracker.begin("run", {}, {}, ids.append)
    for step in range(5):
        tracker.log({"items": step}, step=step)
    tracker.end(succeeded=True)
    tracker.end(succeeded=False)
    assert client.calls == [("begin", "run"), *(("log", step) for step in range(5)), ("end", True)]
    assert ids == ["id-1"]


def test_a_client_that_cannot_be_made_costs_one_warning(caplog, monkeypatch):
    monkeypatch.setattr(trackers, "load_plugin", lambda *_: lambda config: Path(config.options["path"]))
    with track_run(TrackerConfig(kind="wandb", options={}), "embed") as tracker:
        tracker.begin("run", {}, {})
    (warning,) = warnings_of(caplog)
    assert "tracker wandb: given up for this run (KeyError: 'path')" in warning


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_a_client_that_fails_costs_one_warning_and_is_called_no_more(caplog, fails_at):
    client = Notes(fails_at=fails_at)
    tracker = Tracker(client, "notes")
    tracker.begin("run", {}, {})
    for step in range(20):
        tracker.log({"items": step}, step=step)
    tracker.end(succeeded=True)
    assert len(client.calls) == fails_at
    (warning,) = warnings_of(caplog)
    assert "ConnectionError: the server is gone for good" in warning and "the run continues" in warning


def test_a_client_that_ends_its_process_costs_one_warning_and_not_the_run(caplog, monkeypatch):
    def leave(config):
        raise SystemExit("no key")

    monkeypatch.setattr(trackers, "require", lambda extra, where: None)
    monkeypatch.setattr(trackers, "load_plugin", lambda *_: leave)
    with track_run(TrackerConfig(kind="wandb"), "embed") as tracker:
        tracker.begin("run", {}, {})
    (warning,) = warnings_of(caplog)
    assert "tracker wandb: given up for this run (SystemExit: no key)" in warning
    caplog.clear()
    tracker = Tracker(Notes(), "notes")
    tracker.begin("run", {}, {}, leave)
    tracker.end(succeeded=True)
    (warning,) = warnings_of(caplog)
    assert "tracker notes: given up for this run (SystemExit: no key)" in warning


def test_a_client_that_hangs_is_left_after_its_time(caplog, monkeypatch):
    monkeypatch.setattr(trackers, "END_S", 0.05)
    answered = threading.Event()
    tracker = Tracker(Notes(waits_for=answered), "notes")
    tracker.begin("run", {}, {})
    tracker.end(succeeded=True)
    assert len(warnings_of(caplog)) == 1 and "no answer for" in warnings_of(caplog)[0]
    answered.set()
    tracker._thread.join(30)
    assert not tracker._thread.is_alive()


def test_calls_that_a_slow_client_is_behind_are_bounded(caplog, monkeypatch):
    monkeypatch.setattr(trackers, "MAX_WAITING", 3)
    answered = threading.Event()
    tracker = Tracker(Notes(waits_for=answered), "notes")
    tracker.begin("run", {}, {})
    for step in range(10):
        tracker.log({}, step=step)
    assert "calls behind" in "".join(warnings_of(caplog)) and len(warnings_of(caplog)) == 1
    answered.set()
    tracker.end(succeeded=True)
    tracker._thread.join(30)
    assert not tracker._thread.is_alive()


def test_parameters_are_what_was_set_without_secrets(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "abcdefgh12345")
    config = RunConfig(store="s3://u:p@host/x", runs_file="/tmp/abcdefgh12345", source=[{"path": "a"}])
    found = parameters_of(config)
    assert found == {"store": "s3://***@host/x", "runs_file": "/tmp/***", "source.0.path": "a"}
    secret = RunConfig(on_failure={"webhook": "https://h/T0PS3CRET", "command": ["page", "--token", "T0PS3CRET"]})
    assert parameters_of(secret) == {
        "on_failure.webhook": "https://h/***",
        "on_failure.command.0": "page",
        "on_failure.command.1": "--token",
        "on_failure.command.2": "***",
    }, "as `embedder config` masks them"


@pytest.mark.parametrize(
    ("values", "found"),
    [({"kind": "mlflow"}, "needs uri"), ({"kind": "mlflow", "uri": "sqlite:///a", "offline": True}, "no offline")],
)
def test_a_section_that_makes_no_sense_is_refused(values, found):
    with pytest.raises(ValueError, match=found):
        TrackerConfig(**values)


@pytest.mark.medium
def test_mlflow_gets_names_that_it_takes(monkeypatch):
    validation = pytest.importorskip("mlflow.utils.validation", reason="the extra `mlflow` is not installed")
    client, logged = clients.MlflowClient(TrackerConfig(kind="mlflow", uri="sqlite:///a")), []
    client._client = SimpleNamespace(log_batch=lambda run_id, metrics: logged.extend(each.key for each in metrics))
    names = ["metric/own.R@1", "metric/own.top 5 (%)", "metric/own.größe", "run/seconds of stage 0", "prices.A100:80GB"]
    client.log(dict.fromkeys(names, 1.0), 3)
    assert logged == ["metric/own.R_1", "metric/own.top 5 ___", *names[2:]]
    assert [*clients._short({"prices.L4 (spot)": "x" * 501})] == ["prices.L4 _spot_"]
    for name in logged:
        validation._validate_metric_name(name)


def test_a_missing_package_is_told_before_the_run(monkeypatch):
    monkeypatch.setitem(installation.EXTRAS, "wandb", ("no_package_of_this_name",))
    installation.missing.cache_clear()
    expected = r"embed with \[tracker\]: needs no_package_of_this_name.*pip install 'embedder\[wandb\]'"
    with pytest.raises(InstallationError, match=expected), track_run(TrackerConfig(kind="wandb"), "embed"):
        pass


def noted_run(make_run, source, monkeypatch, client, **changes):
    """A run whose tracker is a client of this file."""
    monkeypatch.setattr(trackers, "require", lambda extra, where: None)
    monkeypatch.setattr(trackers, "load_plugin", lambda *_: lambda config: client)
    monkeypatch.setattr(run_tracking, "LOG_EVERY_S", 0.0)
    tracker = {"kind": "mlflow", "uri": "sqlite:///nowhere.db"}
    return make_run(source, tracker=tracker, rows_per_part=2, batch_size=2, decode={"items_per_task": 2}, **changes)


@pytest.mark.medium
def test_a_run_tells_its_tracker_at_each_part_and_goes_on_without_it(make_run, tmp_path, monkeypatch, caplog):
    source = samples.folder(tmp_path / "in", num_images=8)
    client = Notes(fails_at=3)
    report, rows = embedded(noted_run(make_run, source, monkeypatch, client))
    assert report.published and len(rows) == 8
    assert client.calls[:3] == [("begin", f"embed {report.run_id}"), ("log", 2), ("log", 4)]
    assert len([each for each in warnings_of(caplog) if each.startswith("tracker ")]) == 1
    assert json.loads(StoreFiles(tmp_path / "store").read(f"runs/{report.run_id}/tracker.json"))["id"] == "id-1"


def test_a_run_that_is_refused_leaves_no_trace_at_the_tracker(make_run, tmp_path, monkeypatch):
    source = samples.folder(tmp_path / "in", num_images=2)
    client = Notes()
    metric = [{"name": "price", "kind": "sum", "column": "price"}]
    with pytest.raises(ConfigError):
        embed(noted_run(make_run, source, monkeypatch, client, metric=metric))
    assert client.calls == [] and not list((tmp_path / "store").glob("runs/*/tracker.json"))


@pytest.mark.medium
def test_a_training_tells_its_tracker_of_each_logged_step(tiny_model, tmp_path, monkeypatch):
    client = Notes()
    monkeypatch.setattr(trackers, "require", lambda extra, where: None)
    monkeypatch.setattr(trackers, "load_plugin", lambda *_: lambda config: client)
    pairs = train_samples.table(tmp_path / "pairs.parquet", 24)
    tracker = {"kind": "wandb", "offline": True}
    train(train_samples.training(pairs, tmp_path / "out", model=str(tiny_model), tracker=tracker))
    assert client.calls[0] == ("begin", "train out") and client.calls[-1] == ("end", True)
    steps = [step for call, step in client.calls if call == "log"]
    assert steps == sorted([*range(1, 13), 6, 12]), "each step, and the measurements"
    assert json.loads((tmp_path / "out" / "tracker.json").read_text()) == {"id": "id-1"}


def tracked_by_mlflow(make_run, source, uri, **changes):
    """A run of several parts that is reported to MLflow, and MLflow's own record of it, read by MLflow's client."""
    from mlflow.tracking import MlflowClient

    tracker = {"kind": "mlflow", "uri": uri, "experiment": "tests"}
    metric = [{"name": "rows", "kind": "count"}]
    settings = {"rows_per_part": 2, "batch_size": 2, "decode": {"items_per_task": 2}} | changes
    report, _ = embedded(make_run(source, tracker=tracker, metric=metric, **settings))
    client = MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    return report, client, run


def artifacts(client, run, folder=None):
    found = client.list_artifacts(run.info.run_id, folder)
    return {path for each in found for path in (artifacts(client, run, each.path) if each.is_dir else {each.path})}


@pytest.mark.slow
def test_mlflow_reads_a_run_back_from_sqlite(make_run, tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="the extra `mlflow` is not installed")
    monkeypatch.setattr(run_tracking, "LOG_EVERY_S", 0.0)
    monkeypatch.chdir(tmp_path)  # MLflow puts artifacts of an sqlite store below the working directory
    source = samples.folder(tmp_path / "in", num_images=8)
    report, client, run = tracked_by_mlflow(make_run, source, f"sqlite:///{tmp_path}/mlflow.db")
    assert run.info.status == "FINISHED" and run.data.tags["embedder.run_id"] == report.run_id
    assert run.data.params["rows_per_part"] == "2" and run.data.params["metric.0.name"] == "rows"
    assert [each.step for each in client.get_metric_history(run.info.run_id, "items")] == [2, 4, 6, 8, 8]
    assert run.data.metrics["metric/rows.num"] == 8 and run.data.metrics["run/num_items"] == 8
    files = {"report.json", "metrics.json", "plan.json", "contact_sheet.png", "model/config.json"}
    assert artifacts(client, run) == files
    kept = json.loads(StoreFiles(tmp_path / "store").read(f"runs/{report.run_id}/tracker.json"))
    assert kept["id"] == run.info.run_id
    plan = json.loads(Path(client.download_artifacts(run.info.run_id, "plan.json", str(tmp_path))).read_text())
    assert len(plan["stages"]) >= 1
    with Image.open(client.download_artifacts(run.info.run_id, "contact_sheet.png", str(tmp_path))) as sheet:
        assert sheet.width > 5 * 160 and len(sheet.convert("RGB").getcolors(1 << 20)) > 8, "images, not only paper"


@contextmanager
def mlflow_server(folder):
    """MLflow's own server on a free port of this machine; gives its address and its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--backend-store-uri", f"sqlite:///{folder}/server.db", "--artifacts-destination", str(folder / "kept")]
    command = [sys.executable, "-m", "mlflow", "server", *options, "--port", str(port), "--workers", "1"]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        uri, until = f"http://127.0.0.1:{port}", time.monotonic() + 400
        while not answers(f"{uri}/health"):
            assert process.poll() is None and time.monotonic() < until, (folder / "server.log").read_text()
            time.sleep(0.2)
        yield uri, process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def answers(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(600)  # the server imports for half a minute on an idle machine
def test_an_mlflow_server_that_is_killed_in_mid_run_costs_one_warning(make_run, tmp_path, monkeypatch, caplog):
    pytest.importorskip("mlflow", reason="the extra `mlflow` is not installed")
    monkeypatch.setattr(run_tracking, "LOG_EVERY_S", 0.0)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    source = samples.folder(tmp_path / "in", num_images=16)
    with mlflow_server(tmp_path) as (uri, process):
        report, client, run = tracked_by_mlflow(make_run, source, uri, store=str(tmp_path / "whole"))
        assert run.info.status == "FINISHED" and "report.json" in artifacts(client, run)
        on_entry, reported = RunTracking.on_entry, threading.Event()
        log = clients.MlflowClient.log

        def logged(self, values, step):
            log(self, values, step)
            reported.set()

        def killed_after_the_first_point(self, entry):
            on_entry(self, entry)
            if process.poll() is None:
                assert reported.wait(60), "MLflow has a point of this run"
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(30)

        monkeypatch.setattr(clients.MlflowClient, "log", logged)
        monkeypatch.setattr(RunTracking, "on_entry", killed_after_the_first_point)
        caplog.clear()
        tracker = {"kind": "mlflow", "uri": uri, "experiment": "tests"}
        settings = {"rows_per_part": 2, "batch_size": 2, "decode": {"items_per_task": 2}}
        report, rows = embedded(make_run(source, tracker=tracker, **settings))
    assert report.published and len(rows) == 16
    (warning,) = [each for each in warnings_of(caplog) if each.startswith("tracker mlflow")]
    assert "given up for this run" in warning and uri in warning


@pytest.mark.medium
def test_an_mlflow_server_that_is_away_costs_one_warning(make_run, tmp_path, monkeypatch, caplog):
    pytest.importorskip("mlflow", reason="the extra `mlflow` is not installed")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    source = samples.folder(tmp_path / "in", num_images=2)
    tracker = {"kind": "mlflow", "uri": "http://127.0.0.1:9"}
    report, _ = embedded(make_run(source, tracker=tracker))
    assert report.published
    (warning,) = [each for each in warnings_of(caplog) if each.startswith("tracker mlflow")]
    assert "http://127.0.0.1:9" in warning


def test_no_picture_leaves_the_store_where_the_section_says_so(make_run, tmp_path, monkeypatch):
    source, client = samples.folder(tmp_path / "in", num_images=4), Notes()
    config = noted_run(make_run, source, monkeypatch, client)
    embedded(config.model_copy(update={"tracker": config.tracker.model_copy(update={"pictures": False})}))
    files = [name for call, names in client.calls if call == "files" for name in names]
    assert sorted(files) == ["metrics.json", "model/config.json", "plan.json", "report.json"][1:]


def test_a_contact_sheet_that_cannot_be_drawn_is_left_out(tmp_path):
    assert contact_sheet(StoreFiles(tmp_path), ["gone.parquet"]) == {}


@pytest.mark.slow
def test_wandb_writes_a_run_without_a_net(make_run, tmp_path):
    pytest.importorskip("wandb", reason="the extra `wandb` is not installed")
    source = samples.folder(tmp_path / "in", num_images=4)
    tracker = {"kind": "wandb", "offline": True, "folder": str(tmp_path / "tracked")}
    report, _ = embedded(make_run(source, tracker=tracker))
    kept = json.loads(StoreFiles(tmp_path / "store").read(f"runs/{report.run_id}/tracker.json"))
    (folder,) = (tmp_path / "tracked" / "wandb").glob("offline-run-*")
    assert folder.name.endswith(kept["id"]) and (folder / "files" / "report.json").is_file()
    assert next(folder.glob("run-*.wandb")).stat().st_size > 0
