"""Metrics during a run: what a scrape finds, from whom, and that nothing of it fails a run."""

import socket
import threading
import urllib.request
from contextlib import nullcontext

import pytest
import samples
from prometheus_client.parser import text_string_to_metric_families

from embedder.compat.operator_stats import OperatorState, Replica, Sample
from embedder.config import load_config
from embedder.errors import ConfigError, RunFailedError, StoreError
from embedder.executors.bottleneck import OperatorHistory
from embedder.executors.progress import show_entry, show_operators
from embedder.ingest.embed import embed
from embedder.observability.live_metrics import (
    LIVE_METRICS,
    LiveMetrics,
    PublishedFigures,
    PublishedState,
    answering,
    read_published,
)
from embedder.observability.run_observer import observe_run
from embedder.store.journal.journal import JournalEntry
from embedder.store.part_file import PartFile

NOW_S = 1_790_000_000.0


def scrape(port, path="/metrics"):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        return answer.read().decode()


def found_in(text):
    """Values by name and step; each family is described and of its kind."""
    found = {}
    for family in text_string_to_metric_families(text):
        (metric,) = [each for each in LIVE_METRICS if each.name == family.name]
        assert family.documentation == metric.meaning
        assert family.type == ("counter" if metric.is_counter else "gauge")
        for sample in family.samples:
            assert set(sample.labels) == {"store", "kind", *(["step"] if metric.by_step else [])}
            found[(sample.name, *filter(None, [sample.labels.get("step")]))] = sample.value
    return found


def entry(*trace, num_items=8, num_rejects=1):
    part = {"path": "p", "size_bytes": 1000, "stats": "", "session": "s"}
    parts = (PartFile(table="embeddings", num_rows=7, **part), PartFile(table="items", num_rows=8, **part))
    return JournalEntry(name="s-0", parts=parts, num_items=num_items, num_rejects=num_rejects, trace=list(trace))


def call(step, **figures):
    return {"step": step, "node": "n", "pid": 1, "started_s": NOW_S, **figures}


@pytest.mark.medium
def test_a_scrape_in_the_course_of_a_run_finds_its_counts_and_nothing_answers_afterwards(make_run, tmp_path, said):
    samples.folder(tmp_path / "in" / "first")
    config = make_run(tmp_path / "in", metrics_address=":0", rows_per_part=2)
    texts, port = [], []

    class Scraper:
        def __call__(self, num_done):
            *_, line = [line for line in said if line.startswith("metrics of this run: http://127.0.0.1:")]
            port[:] = [int(line.rpartition(":")[2].partition("/")[0])]
            texts.append(scrape(port[0]))

    embed(config, lambda num_items: nullcontext(Scraper()))
    found = found_in(texts[-1])
    assert found["embedder_live_listed_items",] == found["embedder_live_items_total",] == 6
    assert found["embedder_live_rejects_total",] == 0 and found["embedder_live_vectors_total",] >= 6
    assert found["embedder_live_part_bytes_total",] > 1000
    assert found["embedder_live_step_rows_total", "decode"] == 6
    for step in ("decode", "stage 0", "write"):
        assert found["embedder_live_step_seconds_total", step] > 0, step
    assert found["embedder_live_step_peak_memory_bytes", "stage 0"] > 1 << 20
    assert (
        f'store="{config.store}",kind="embed"' in texts[-1].replace('kind="embed",store', "")
        or config.store in texts[-1]
    )
    assert not any(name.startswith("embedder_published") for name, *_ in found), "nothing is published yet"
    with pytest.raises(OSError, match="refused"):
        scrape(port[0])

    texts.clear()
    samples.folder(tmp_path / "in" / "second", num_images=2)
    embed(config, lambda num_items: nullcontext(Scraper()))
    found = found_in(texts[-1])
    assert found["embedder_live_items_total",] == 2, "counters begin at 0 with each command"
    assert 0 < found["embedder_published_age_seconds",] < 600 and found["embedder_index_recall",] == 1


def test_journal_entries_add_up_and_peaks_stay():
    metrics = LiveMetrics("s3://key:secret@bucket/x", "refresh", NOW_S)
    metrics.on_listed(20)
    metrics.on_entry(entry(call("decode", wall_s=1.5, num_rows=8), call("stage 0", peak_gpu_bytes=9, peak_rss_bytes=5)))
    metrics.on_entry(entry(call("decode", wall_s=0.5, num_rows=2), call("stage 0", peak_gpu_bytes=7, peak_rss_bytes=6)))
    found = {metric.name: samples for metric, samples in metrics.samples()}
    assert found["embedder_live_items"] == {"": 16} and found["embedder_live_rejects"] == {"": 2}
    assert found["embedder_live_vectors"] == {"": 14} and found["embedder_live_part_bytes"] == {"": 4000}
    assert found["embedder_live_step_seconds"]["decode"] == 2.0 and found["embedder_live_step_rows"]["decode"] == 10
    assert found["embedder_live_gpu_peak_memory_bytes"] == {"stage 0": 9}
    assert found["embedder_live_step_peak_memory_bytes"]["stage 0"] == 6
    with answering(":0", metrics) as port:
        assert "secret" not in scrape(port)


def test_operators_of_ray_are_shown_with_their_busy_share_and_the_bottleneck(make_run, tmp_path):
    history = OperatorHistory()
    replica = Replica("a", "n")
    for second in (0, 5, 10):
        stage = OperatorState("stage 0", 3, 1, (replica,), num_gpus=1, num_calls=second, work_s=0.8 * second)
        decode = OperatorState("decode", 0, 1, num_cpus=0.5, num_calls=second, work_s=0.2 * second, spilled_bytes=7)
        history.add(Sample(NOW_S + second, (decode, stage, OperatorState("write"))))
    with observe_run(make_run(tmp_path).observing, "embed") as observer, observer.progress(5) as display:
        show_operators(display, history.view())
        show_entry(display, entry())
        found = {metric.name: samples for metric, samples in observer.live.samples()}
    left = {metric.name for metric, _ in observer.live.samples()}
    assert {"embedder_live_items", "embedder_live_spilled_bytes"} <= left, "counts stay when the operators are gone"
    assert not {"embedder_live_busy_share", "embedder_live_queue_blocks", "embedder_live_bottleneck"} & left
    assert found["embedder_live_busy_share"] == pytest.approx({"decode": 0.2, "stage 0": 0.8, "write": 0.0})
    assert found["embedder_live_waiting_share"]["stage 0"] == 1
    assert found["embedder_live_queue_blocks"]["stage 0"] == 3 and found["embedder_live_replicas"] == {"stage 0": 1}
    assert found["embedder_live_bottleneck"] == {"decode": 0, "stage 0": 1, "write": 0}
    assert found["embedder_live_gpus"]["stage 0"] == 1 and found["embedder_live_spilled_bytes"]["decode"] == 7
    assert found["embedder_live_items"] == {"": 8} and found["embedder_live_listed_items"] == {"": 5}


def test_every_metric_of_the_list_can_come():
    metrics = LiveMetrics("s", "refresh", NOW_S)
    metrics._store = PublishedState("s", lambda store: PublishedFigures(NOW_S, 0.97))
    metrics.on_listed(1)
    metrics.on_entry(entry(call("stage 0", peak_gpu_bytes=1)))
    history = OperatorHistory()
    for second in (0, 1):
        history.add(Sample(NOW_S + second, (OperatorState("stage 0", replicas=(Replica("a", "n"),)),)))
    metrics.operators(history.view())
    assert [metric.name for metric, _ in metrics.samples()] == [metric.name for metric in LIVE_METRICS]


def test_the_store_is_asked_now_and_then_and_its_failure_is_a_gap(monkeypatch):
    asked, answers = (
        [],
        [PublishedFigures(NOW_S - 100, 0.9), StoreError("the lease is lost"), None, PublishedFigures(NOW_S, None)],
    )

    def read(store):
        asked.append(store)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    state = PublishedState("s", read)
    assert state.values(NOW_S)["embedder_published_age_seconds"] == 100
    later = state.values(NOW_S + 5)
    assert later["embedder_published_age_seconds"] == 105 and later["embedder_index_recall"] == 0.9
    assert len(asked) == 1
    assert state.values(NOW_S + 10) == state.values(NOW_S + 20) == {}
    assert state.values(NOW_S + 30).keys() == {"embedder_published_timestamp_seconds", "embedder_published_age_seconds"}
    assert PublishedState(None, read).values(NOW_S) == {} and len(asked) == 4


def test_reading_a_store_that_is_not_there_makes_none(tmp_path):
    assert read_published(str(tmp_path / "none")) is None
    assert not (tmp_path / "none").exists()


def test_many_scrapes_beside_a_feeding_thread_are_whole():
    metrics, done = LiveMetrics("s", "refresh", NOW_S), threading.Event()
    with answering("127.0.0.1:0", metrics) as port:

        def feed():
            for number in range(3000):
                metrics.on_entry(entry(call(f"stage {number % 7}", wall_s=1.0)))
            done.set()

        feeder = threading.Thread(target=feed)
        feeder.start()
        last = 0.0
        while not done.is_set():
            items = found_in(scrape(port))["embedder_live_items_total",]
            assert items >= last and items % 8 == 0
            last = items
        feeder.join()
        assert found_in(scrape(port))["embedder_live_items_total",] == 24_000


def test_a_port_that_is_taken_is_told_and_fails_nothing(make_run, tmp_path, said):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        embed(make_run(samples.folder(tmp_path / "in"), metrics_address=address))
    assert any(f"metrics_address {address}: can't be listened on (Address already in use)" in line for line in said)


@pytest.mark.parametrize("host", ["a..b", "x" * 70])
def test_a_host_that_can_be_no_name_is_told_and_fails_nothing(host, said):
    with answering(f"{host}:9477", LiveMetrics(None, "embed", 0.0)) as port:
        assert port is None
    assert any("can't be listened on" in line for line in said)


def test_a_run_that_fails_leaves_no_server(make_run, tmp_path, said):
    with pytest.raises(RunFailedError), observe_run(make_run(tmp_path, metrics_address=":0").observing, "embed"):
        raise RunFailedError("the guard")
    *_, line = [line for line in said if line.startswith("metrics of this run")]
    with pytest.raises(OSError, match="refused"):
        scrape(int(line.rpartition(":")[2].partition("/")[0]))


@pytest.mark.parametrize("address", ["9477", "host", "host:", "http://host:9477", "a b:1", ":123456"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ConfigError, match="metrics_address"):
        load_config(overrides={"metrics_address": address})
