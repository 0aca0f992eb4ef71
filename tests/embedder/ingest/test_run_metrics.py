"""Metrics of runs: the figures are those of the published rows, each counted once, whatever happened on the way."""

import json
import math
from collections import Counter

import numpy as np
import pytest
import samples
from command_runs import run_here
from embedding_runs import embedded
from prometheus_client.parser import text_string_to_metric_families
from refresh_runs import refreshed

from embedder.errors import ConfigError
from embedder.executors import local
from embedder.ingest.embed import embed
from embedder.store.files import StoreFiles
from embedder.store.journal.journal import entry_path, read_entries, stream_entries
from embedder.store.layout import write_record

METRICS = [
    {"name": "rows", "kind": "count"},
    {"name": "captions", "kind": "count", "column": "caption"},
    {"name": "ends", "kind": "moments", "column": "end_s"},
    {"name": "starts", "kind": "quantiles", "column": "start_s"},
    {"name": "kinds", "kind": "confusion", "column": "modality", "label": "uri"},
    {"name": "pairs", "kind": "recall"},
    {"name": "drift", "kind": "drift", "column": "image_embedding"},
]
SETTINGS = {
    "segment_s": 0.5,
    "frames_per_segment": 1,
    "rows_per_part": 3,
    "batch_size": 2,
    "decode": {"items_per_task": 2},
}

RAYS_OWN = {"datasets_stats_actor", "AutoscalingCoordinator", "ActorLocationTracker"}
"""Actors of Ray Data itself, one each, which it asks for again from time to time."""
ON_RAY = SETTINGS | {"engine": "ray", "num_stages": 1, "no_progress_timeout_s": 600}


class KilledError(Exception):
    """End of a process, as a test plays it."""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return samples.folder(tmp_path_factory.mktemp("metrics") / "in", num_images=10, num_clips=2)


def figures_of(rows):
    """A few of the figures, computed from the table."""
    ends = [row["end_s"] for row in rows.values() if row["end_s"] is not None]
    return {
        "rows": len(rows),
        "captions": sum(row["caption"] is not None for row in rows.values()),
        "mean_end": pytest.approx(math.fsum(ends) / len(ends), rel=1e-15),
    }


def figures_in(report):
    found = report.metrics
    return {"rows": found["rows"]["num"], "captions": found["captions"]["num"], "mean_end": found["ends"]["mean"]}


def killed_at(monkeypatch, num_parts):
    """Let a run end while its next part after so many is written: vectors are there, the journal entry is not."""
    write, done = local.write_parts, []

    def failing(*arguments, **options):
        if len(done) == num_parts:
            raise KilledError
        done.append(write(*arguments, **options))
        return done[-1]

    monkeypatch.setattr(local, "write_parts", failing)


@pytest.mark.medium
def test_figures_are_those_of_the_published_rows_and_are_told_everywhere(make_run, source, tmp_path):
    config = make_run(source, metric=METRICS, metrics_file=str(tmp_path / "run.prom"), **SETTINGS)
    report, rows = embedded(config)
    assert figures_in(report) == figures_of(rows)
    assert report.metrics["pairs"]["num_pairs"] == 5 and report.metrics["pairs"]["recall_at_5"] == 1.0
    files = StoreFiles(config.store)
    kept = json.loads(files.read(f"runs/{report.run_id}/metrics.json"))
    line = json.loads(files.read("runs.jsonl").splitlines()[-1])
    assert kept["figures"] == line["metrics"] == json.loads(report.model_dump_json())["metrics"]
    families = {each.name: each for each in text_string_to_metric_families((tmp_path / "run.prom").read_text())}
    samples_of = {each.labels["metric"]: each.value for each in families["embedder_run_metric"].samples}
    assert samples_of["rows.num"] == len(rows) and samples_of["ends.mean"] == report.metrics["ends"]["mean"]


@pytest.mark.medium
def test_a_run_killed_ten_times_has_the_figures_of_an_undisturbed_one(make_run, source, tmp_path, monkeypatch):
    expected, _ = embedded(make_run(source, store=str(tmp_path / "undisturbed"), metric=METRICS, **SETTINGS))
    config = make_run(source, store=str(tmp_path / "killed"), metric=METRICS, **SETTINGS)
    num_killed = 0
    for num_parts in (0, 1, 0, 0, 1, 0, 0, 0, 1, 0):
        with monkeypatch.context() as patched:
            killed_at(patched, num_parts)
            with pytest.raises(KilledError):
                embed(config)
            num_killed += 1
    report, rows = embedded(config)
    assert num_killed == 10 and len({each.name[:4] for each in entries_of(config, report)}) >= 4, "several sessions"
    assert report.metrics == expected.metrics
    assert figures_in(report) == figures_of(rows)


def entries_of(config, report):
    return read_entries(StoreFiles(config.store), report.run_id)


@pytest.mark.slow
def test_metrics_on_ray_are_those_of_one_process_and_take_not_one_task_or_actor_more(
    make_run, source, tmp_path, monkeypatch, ray_cluster
):
    """All tasks and actors of a run are submitted by its driver, this process; whom they are of is counted there.

    Vectors may differ in their last bits between batches; what is not of vectors may not.
    """
    from ray.actor import ActorClass
    from ray.remote_function import RemoteFunction

    submitted = []

    def counted(remote):
        def counting(self, *arguments, **options):
            own = getattr(self, "_function_name", None) or self.__ray_metadata__.class_name
            if (name := options.get("name") or own) not in RAYS_OWN:
                submitted.append(name)
            return remote(self, *arguments, **options)

        return counting

    monkeypatch.setattr(RemoteFunction, "_remote", counted(RemoteFunction._remote))
    monkeypatch.setattr(ActorClass, "_remote", counted(ActorClass._remote))
    counts = []
    # A write for each block: with more rows to a part, blocks go into writes as they come, and so into three or four.
    settings = ON_RAY | {"rows_per_part": 1}
    for metrics in ([], METRICS):
        store = str(tmp_path / f"store{len(counts)}")
        report, rows = embedded(make_run(source, store=store, metric=metrics, **settings))
        assert report.engine == "ray" and len(report.metrics) == len(metrics)
        counts.append(Counter(submitted))
        submitted.clear()
    assert any("write" in name.lower() for name in counts[0]), counts[0]
    assert counts[1] == counts[0]
    expected, _ = embedded(make_run(source, store=str(tmp_path / "local"), metric=METRICS, **SETTINGS))
    of_vectors = [each["name"] for each in METRICS if each["kind"] in ("recall", "drift")]
    assert len(of_vectors) < len(METRICS) and figures_in(report) == figures_of(rows)
    for name in expected.metrics.keys() - of_vectors:
        assert report.metrics[name] == expected.metrics[name], name


@pytest.mark.medium
def test_rows_that_are_done_again_count_once(make_run, source, tmp_path, monkeypatch):
    """A part with rows of a clip whose other part is lost: its states hold rows that don't count."""
    expected, _ = embedded(make_run(source, store=str(tmp_path / "undisturbed"), metric=METRICS, **SETTINGS))
    config = make_run(source, store=str(tmp_path / "lost"), metric=METRICS, **SETTINGS)
    with monkeypatch.context() as patched:
        killed_at(patched, 4)
        with pytest.raises(KilledError):
            embed(config)
    files = StoreFiles(config.store)
    run_id = json.loads(next((tmp_path / "lost" / "runs").glob("*/run.json")).read_text())["run_id"]
    spread = [entry for entry in read_entries(files, run_id) if any("clips" in str(part.stats) for part in entry.parts)]
    assert len(spread) >= 2, "clips lie in several parts"
    files.delete(entry_path(run_id, spread[-1].name))
    report, rows = embedded(config)
    assert report.metrics == expected.metrics and figures_in(report) == figures_of(rows)


@pytest.mark.medium
def test_states_of_another_definition_are_computed_again(make_run, source, tmp_path, monkeypatch):
    store = str(tmp_path / "store")
    with monkeypatch.context() as patched:
        killed_at(patched, 2)
        with pytest.raises(KilledError):
            embed(make_run(source, store=store, **SETTINGS))  # without any metric
    report, rows = embedded(make_run(source, store=store, metric=METRICS, **SETTINGS))
    assert figures_in(report) == figures_of(rows)


@pytest.mark.medium
def test_a_refresh_tells_of_what_it_embedded_and_how_it_moved(make_run, tmp_path):
    source = samples.folder(tmp_path / "in", num_images=6)
    config = make_run(source, metric=METRICS, **SETTINGS)
    first, _ = embedded(config)
    assert "since" not in first.metrics["drift"]
    for number in range(10, 13):
        (source / "pictures" / f"{number:04d}.png").write_bytes(samples.image_bytes(number))
    second, _ = refreshed(config)
    assert second.metrics["rows"]["num"] == 3, "the rows of this run, not those of the store"
    moved = second.metrics["drift"]
    assert moved["since"] == first.run_id and 0 < moved["mean_distance"] < 2
    assert moved["cosine_of_means"] == pytest.approx(np.clip(moved["cosine_of_means"], -1, 1))


@pytest.mark.medium
def test_a_run_without_rows_has_figures_of_nothing(make_run, tmp_path):
    source = samples.folder(tmp_path / "in", num_images=3)
    config = make_run(source, metric=METRICS, **SETTINGS)
    embedded(config)
    (source / "pictures" / "0001.png").unlink()
    report, _ = refreshed(config, forced=("retire",))
    assert report.num_retired == 1 and report.metrics["rows"] == {"num": 0, "num_null": 0}
    assert report.metrics["pairs"]["num_pairs"] == 0 and report.metrics["ends"]["num"] == 0


def test_a_missing_column_is_refused_before_anything_is_embedded(make_run, source):
    config = make_run(source, metric=[{"name": "price", "kind": "sum", "column": "price"}], **SETTINGS)
    with pytest.raises(ConfigError, match="no column 'price'"):
        embed(config)


@pytest.mark.medium
def test_a_run_that_an_earlier_release_began_with_states_in_its_journal_has_the_same_figures(
    make_run, source, tmp_path, monkeypatch
):
    expected, _ = embedded(make_run(source, store=str(tmp_path / "undisturbed"), metric=METRICS, **SETTINGS))
    config = make_run(source, store=str(tmp_path / "store"), metric=METRICS, **SETTINGS)
    with monkeypatch.context() as patched:
        killed_at(patched, 2)
        with pytest.raises(KilledError):
            embed(config)
    files = StoreFiles(config.store)
    run_id = json.loads(next((tmp_path / "store" / "runs").glob("*/run.json")).read_text())["run_id"]
    for entry in list(stream_entries(files, run_id)):
        data = entry.model_dump() | {"metrics": {"0011223344556677": {"num": 1_000_000, "num_null": 0}}}
        write_record(files, entry_path(run_id, entry.name), type(entry).model_validate(data))
    report, rows = embedded(config)
    assert report.metrics == expected.metrics and figures_in(report) == figures_of(rows)


@pytest.mark.medium
def test_vectors_are_compared_with_what_an_earlier_release_kept(make_run, tmp_path):
    """Its file has states of all metrics; the digest of a drift and its state are as they were."""
    source = samples.folder(tmp_path / "in", num_images=6)
    config = make_run(source, metric=METRICS, **SETTINGS)
    report, _ = embedded(config)
    kept = json.loads((tmp_path / "store" / f"runs/{report.run_id}/metrics.json").read_text())
    assert [*kept["states"]] == ["b7446965657ce357"] and sorted(kept["states"]["b7446965657ce357"]) == [
        "num",
        "num_null",
        "squares",
        "sums",
    ]


@pytest.mark.medium
def test_the_history_and_the_report_show_the_figures(make_run, source):
    config = make_run(source, metric=METRICS, **SETTINGS)
    report, rows = embedded(config)
    shown = run_here("history", "--store", config.store, "--metrics")
    assert shown.code == 0 and f"metric rows: num {len(rows)}, num_null 0" in shown.stdout
    found = run_here("history", "--store", config.store, "--metrics", "--json").found
    assert found["publications"][-1]["metrics"] == json.loads(report.model_dump_json())["metrics"]
    assert "metric ends: num " in run_here("report", "--store", config.store).stdout
