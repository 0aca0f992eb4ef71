"""Ctrl-C and SIGTERM in every phase of a run: what is finished is kept, the wait is said, and a second one ends it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import samples
from command_runs import run_here
from embedding_runs import assert_same, embedded
from stop_runs import Listening, num_kept, once, press, wait_until

from embedder.errors import RunFailedError
from embedder.executors.interrupts import SAME_S, SignalInterrupt, delay_signals, handling, interruptible
from embedder.executors.job import decode_spec
from embedder.ingest import publish_or_refuse
from embedder.ingest.embed import embed
from embedder.models.model_folder import open_model
from embedder.observability.log import messages_to
from embedder.sources.fetch import Fetcher
from embedder.sources.listing import list_sources
from embedder.steps.decode import ItemReader
from embedder.steps.stage import TowerStage
from embedder.store.files import StoreFiles
from embedder.store.layout import read_current
from embedder.store_index import keep_index

BOTH = (signal.SIGINT, signal.SIGTERM)


def arguments(config, *more):
    """The command line of `embed` with this configuration."""
    base = ["embed", config.source[0].path, "--model", config.model, "--store", config.store, "--engine", config.engine]
    return [*base, *more]


@pytest.mark.medium
@pytest.mark.parametrize(("number", "times"), [(signal.SIGINT, 2), (signal.SIGTERM, 1)])
def test_a_stopped_run_keeps_rows_that_fill_no_part_and_says_so_before_it_waits(
    make_run, tmp_path, monkeypatch, number, times
):
    """Two signals at once are one: a terminal and a wrapper may both pass the same key press on."""
    source = samples.folder(tmp_path / "in", num_images=60)
    _, undisturbed = embedded(make_run(source, store=str(tmp_path / "undisturbed")))
    config = make_run(source, batch_size=4, rows_per_part=10_000)
    listening = Listening(config.store)
    with messages_to(listening), monkeypatch.context() as patch:
        once(patch, Fetcher, "fetch", lambda: press(number, times), lambda self, uri, **_: uri.endswith("0040.png"))
        with pytest.raises(RunFailedError, match=r"stopped on request after (\d+) items, kept") as stopped:
            embed(config)
    (line,) = (place for place, said in enumerate(listening.said) if said.startswith(f"{number.name}: stopping"))
    assert "as far as stop_timeout_s = 10 allows; once more stops at once" in listening.said[line]
    assert not listening.asked[line], "it is said before anything is waited for"
    kept = num_kept(config)
    assert 0 < kept < 60
    assert f"after {kept} items" in str(stopped.value)
    assert read_current(StoreFiles(config.store)) is None
    report, rows = embedded(config)
    assert report.num_unchanged == kept
    assert_same(rows, undisturbed)


@pytest.mark.medium
def test_what_is_being_decoded_is_not_waited_for(make_run, tmp_path, monkeypatch):
    config = make_run(samples.folder(tmp_path / "in", num_images=60), batch_size=4)
    let_go, waited = threading.Event(), []
    fetch = Fetcher.fetch

    def endless(self, uri, **options):
        if uri.endswith("0040.png"):
            press()
            waited.append(let_go.wait(60))
        return fetch(self, uri, **options)

    monkeypatch.setattr(Fetcher, "fetch", endless)
    with pytest.raises(RunFailedError, match="stopped on request after"):
        embed(config)
    assert not waited, "the fetch still hangs"
    let_go.set()
    assert num_kept(config) > 0


def test_tables_that_wait_for_the_stages_are_left_out(make_run, tmp_path, monkeypatch):
    """After the signal, what is inside a stage goes through, and nothing else begins."""
    config = make_run(samples.folder(tmp_path / "in", num_images=60), batch_size=4)
    call, begun_after = TowerStage.__call__, []
    pressed = threading.Event()

    def counted(self, table):
        if self.spec.index == 0:
            if pressed.is_set():
                begun_after.append(table.num_rows)
            elif num_begun() == 5:
                press()
                wait_until(lambda: list(Path(config.store).glob("runs/*/STOP-*")))
                pressed.set()
        return call(self, table)

    begun = []

    def num_begun():
        begun.append(1)
        return len(begun)

    monkeypatch.setattr(TowerStage, "__call__", counted)
    with pytest.raises(RunFailedError, match="stopped on request after"):
        embed(config)
    assert begun_after == []
    assert 4 * 4 <= num_kept(config) <= 4 * (5 + 2)


def test_no_time_to_finish_keeps_what_was_finished_before(make_run, tmp_path, monkeypatch):
    config = make_run(samples.folder(tmp_path / "in", num_images=60), batch_size=4, stop_timeout_s=0)
    once(monkeypatch, Fetcher, "fetch", press, lambda self, uri, **_: uri.endswith("0040.png"))
    listening = Listening(config.store)
    with messages_to(listening), pytest.raises(RunFailedError, match="stopped on request after"):
        embed(config)
    assert "stop_timeout_s = 0 allows" in " ".join(listening.said)
    assert any("stop_timeout_s = 0 is over" in said for said in listening.said)
    assert 0 < num_kept(config) < 60


def test_a_long_video_is_not_decoded_to_its_end(make_run, tmp_path):
    """The item lacks segments then, and is done again."""
    (tmp_path / "in").mkdir()
    samples.clip(tmp_path / "in" / "long.mp4", seconds=20)
    config = make_run(tmp_path / "in", segment_s=1.0, batch_size=1)
    (listing,) = list_sources(config.source)
    reader = ItemReader(decode_spec(config.rows, open_model(config.model)))
    asked = []

    def should_stop():
        asked.append(1)
        return len(asked) > 5

    rows = sum(table.num_rows for table in reader.decode(listing, should_stop))
    assert 1 < rows < 10


@pytest.mark.parametrize("number", BOTH)
def test_a_signal_while_weights_are_loaded_ends_the_command_there(make_run, tmp_path, monkeypatch, number):
    config = make_run(samples.folder(tmp_path / "in"))
    once(monkeypatch, TowerStage, "_load", lambda: press(number))
    ended = run_here(*arguments(config))
    assert_one_line(ended, number, "what is finished is kept, and the same command continues")
    line = json.loads((Path(config.store) / "runs.jsonl").read_text().splitlines()[-1])
    assert (line["exit_code"], line["published"]) == (128 + number, False)
    monkeypatch.undo()
    assert run_here(*arguments(config)).code == 0


def assert_one_line(ended, number, *words):
    lines = ended.stderr.strip().splitlines()
    assert ended.code == 128 + number
    assert lines[-1].startswith(f"embedder: stopped by {signal.Signals(number).name}")
    assert all(word in lines[-1] for word in words)
    assert "Traceback" not in ended.stderr and "Aborted" not in ended.stderr


def test_a_signal_while_sources_are_listed_leaves_no_store(make_run, tmp_path, monkeypatch):
    from embedder.ingest import inputs

    config = make_run(samples.folder(tmp_path / "in"))
    once(monkeypatch, inputs, "list_sources", press)
    ended = run_here(*arguments(config))
    assert_one_line(ended, signal.SIGINT, "before anything was embedded")
    assert "kept" not in ended.stderr
    assert not Path(config.store).exists()


def test_a_signal_in_any_other_command_is_one_line_too_that_promises_nothing(make_run, tmp_path, monkeypatch):
    from embedder.store.publish import history
    from shards import model_summary as summary

    config = make_run(samples.folder(tmp_path / "in", num_images=2, num_clips=0))
    embed(config)
    once(monkeypatch, summary, "describe_model", press)
    once(monkeypatch, history, "publications", press)
    for command in (["model", "info", config.model], ["history", "--store", config.store]):
        ended = run_here(*command)
        assert_one_line(ended, signal.SIGINT)
        assert ended.stderr.strip().splitlines() == ["embedder: stopped by SIGINT"]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("owner", "step"),
    [(publish_or_refuse, "count_model"), (publish_or_refuse, "publish"), (keep_index, "ensure_index")],
)
def test_a_signal_while_publishing_loses_nothing(make_run, tmp_path, monkeypatch, owner, step):
    source = samples.folder(tmp_path / "in", num_images=12)
    _, undisturbed = embedded(make_run(source, store=str(tmp_path / "undisturbed")))
    config = make_run(source)
    once(monkeypatch, owner, step, press)
    assert_one_line(run_here(*arguments(config)), signal.SIGINT)
    monkeypatch.undo()
    assert num_kept(config) == 12
    _, rows = embedded(config)
    assert_same(rows, undisturbed)


def test_the_signals_are_whose_they_were_after_the_command(make_run, tmp_path):
    before = [signal.getsignal(each) for each in BOTH]
    assert run_here("model", "info", make_run(tmp_path).model).code == 0
    assert [signal.getsignal(each) for each in BOTH] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_signal_in_what_must_not_be_broken_off_is_heard_after_it(capfd):
    done = []
    with pytest.raises(SignalInterrupt) as interrupted, interruptible():
        with delay_signals("the engine has started"):
            press(times=2)
            done.append("it has")
        done.append("never")
    assert done == ["it has"]
    assert interrupted.value.exit_code == 130
    assert capfd.readouterr().err == "SIGINT: stopping, once the engine has started; once more ends at once\n"


def test_a_signal_that_nobody_hears_does_what_it_did(make_run, tmp_path, monkeypatch):
    """In a notebook: Ctrl-C while weights are loaded is a KeyboardInterrupt."""
    config = make_run(samples.folder(tmp_path / "in"))
    once(monkeypatch, TowerStage, "_load", press)
    with pytest.raises(KeyboardInterrupt):
        embed(config)


HANGING = """
import sys, time
from embedder import cli
from embedder.steps.stage import TowerStage
def hang(self, table):
    print("inside", flush=True)
    while True:
        time.sleep(1)
TowerStage.__call__ = hang
sys.argv[0] = "embedder"
cli.main()
"""


@pytest.mark.medium
def test_a_second_signal_ends_the_command_and_all_that_it_started(make_run, tmp_path):
    config = make_run(samples.folder(tmp_path / "in", num_images=20), stop_timeout_s=1000)
    command = [sys.executable, "-c", HANGING, *arguments(config, "--set", "stop_timeout_s=1000")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "inside\n"
    children = psutil.Process(process.pid).children(recursive=True)
    assert children, "a decoder"
    process.send_signal(signal.SIGINT)
    said = []
    while not any(line.startswith("SIGINT: stopping") for line in said):
        said.append(process.stderr.readline())
    time.sleep(2 * SAME_S)
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert rest == "embedder: SIGINT again: ended at once\n"
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive


@pytest.mark.slow
@pytest.mark.usefixtures("starts_ray")
@pytest.mark.parametrize("line", ["engine ray", "2 seconds"])
def test_two_signals_leave_no_process_of_ray(make_run, tmp_path, line):
    """As Ray starts, and once it runs."""
    config = make_run(samples.folder(tmp_path / "in", num_images=400), engine="ray")
    # Into a file: a process that were left would hold a pipe open.
    log = tmp_path / "log"
    with log.open("w") as stderr:
        command = [sys.executable, "-m", "embedder", *arguments(config)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)
    wait_until(lambda: "engine ray" in log.read_text() and psutil.Process(process.pid).children())
    if line != "engine ray":
        wait_until(lambda: len(psutil.Process(process.pid).children(recursive=True)) > 4)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: "SIGINT: stopping" in log.read_text() or process.poll() is not None)
    time.sleep(2 * SAME_S)
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    code = process.wait(60)
    # Seen once, under load: the second signal ended the process itself. A shell says 130 of that, too.
    assert code in (1, 130, -signal.SIGINT)
    assert "Traceback" not in log.read_text()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive


def test_a_run_below_nohup_does_not_hear_of_its_terminals_end():
    heard = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handling(lambda number, _: heard.append(number)):
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert heard == [signal.SIGTERM]
