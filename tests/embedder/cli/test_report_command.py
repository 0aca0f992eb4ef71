"""The report of a run, shown afterwards, and its plot."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
import samples
from PIL import Image
from rich.console import RenderableType

from embedder.cli.render_report import report_parts
from embedder.cli.terminal import Terminal, operator_lines
from embedder.compat.operator_stats import OperatorState, Replica, Sample
from embedder.executors.bottleneck import OperatorView
from embedder.ingest.embed import embed
from embedder.report.report_schema import EventReport, NodeReport, OperatorReport, Report, StepReport
from embedder.report.timeline import TIMELINE_FILE, Timeline, timeline_of

WIDTH = 200


def shown_text(parts: list[RenderableType]) -> str:
    console = Terminal(width=WIDTH)
    with console.capture() as captured:
        for part in parts:
            console.print(part, soft_wrap=True)
    return captured.get()


def sample(time_s, num_rows):
    states = (
        OperatorState("decode", 4, 2, num_rows=num_rows),
        OperatorState("stage 0", 12, 2, (Replica("x", "n"),), 1, 0.25, 0.5, 3 << 20, num_rows=num_rows // 2),
        OperatorState("write"),
    )
    return Sample(time_s, states)


@pytest.fixture
def finished(make_run, tmp_path):
    """A store with one run, in one process; its address and the run's report."""
    config = make_run(samples.folder(tmp_path / "in"), prices={"CPU": 0.1})
    return config.store, embed(config)


def test_the_report_of_the_last_run_is_shown_again(finished, run_embedder):
    store, report = finished
    code, found, _ = run_embedder("report", "--store", store, "--json")
    assert code == 0 and found == json.loads(report.model_dump_json())
    (node,) = found["nodes"]
    assert node["steps"] == ["decode", "stage 0", "stage 1", "stage 2", "write"] and node["peak_memory_bytes"] > 0
    assert (found["operators"], found["events"], found["moved_bytes"]) == ([], [], None)
    expected = node["num_cpus"] * 0.1 / 3600 / found["items_per_s"] * 1e6
    assert found["cost_per_million"] == pytest.approx(expected)


def test_an_unknown_run_is_refused_with_those_that_are_known_and_a_damaged_report_in_one_line(finished, run_embedder):
    store, report = finished
    code, _, error = run_embedder("report", "20200101T000000Z-ffff", "--store", store)
    assert code == 2 and "no report of run 20200101T000000Z-ffff" in error and report.run_id in error
    path = Path(store) / "runs" / report.run_id / "report.json"
    for content in ("[" * 200_000, "{", "{}"):
        path.write_text(content)
        code, _, error = run_embedder("report", "--store", store)
        assert code == 2, content[:9]
        assert error.startswith(f"embedder: {path}: not a whole report.json (")
        assert "or name another run" in error and error.count("\n") <= 1


@pytest.mark.medium
def test_runs_on_ray_and_in_one_process_are_drawn(finished, run_embedder, tmp_path):
    store, report = finished
    plot = tmp_path / "run.png"
    assert report.engine == "local"
    code, _, error = run_embedder("report", "--store", store, "--plot", str(plot))
    assert code == 0, error
    own = Timeline.model_validate_json((tmp_path / "store" / "runs" / report.run_id / TIMELINE_FILE).read_text())
    assert [each.name for each in own.operators] == ["decode", "stage 0", "stage 1", "stage 2", "write"]
    assert {each.num_rows[-1] for each in own.operators} == {report.num_items}
    assert own.times_s[0] > 0 and list(own.times_s) == sorted(own.times_s)
    (tmp_path / "store" / "runs" / report.run_id / TIMELINE_FILE).unlink()
    plot.unlink()
    code, _, error = run_embedder("report", "--store", store, "--plot", str(plot))
    assert code == 2 and "name another run" in error and not plot.exists()
    timeline = timeline_of([sample(100.0 + 2 * number, 64 * number) for number in range(2000)], 90.0)
    assert len(timeline.times_s) <= 501 and (timeline.times_s[0], timeline.times_s[-1]) == (10.0, 4008.0)
    assert timeline.operators[1].num_rows[-1] == 32 * 1999
    (tmp_path / "store" / "runs" / report.run_id / TIMELINE_FILE).write_text(timeline.model_dump_json())
    code, _, _ = run_embedder("report", report.run_id, "--store", store, "--plot", str(plot))
    assert code == 0
    with Image.open(plot) as image:
        assert image.format == "PNG" and image.width > 800


def full_report():
    """A report of a run on a cluster, with all that there may be."""
    figures = {"num_calls": 9, "num_rows": 90, "wall_s": 1, "cpu_s": 1, "wall_share": 1, "cpu_share": 1}
    step = StepReport(step="stage 0", bytes_out=0, bytes_per_row=0, peak_rss_bytes=0, **figures)
    held = {"max_queued_blocks": 12, "max_tasks": 3, "max_object_store_bytes": 7 << 20, "num_cpus": 2, "num_gpus": 0.5}
    return Report(
        run_id="r",
        outcome="published",
        started_at=datetime(2026, 1, 1, tzinfo=UTC),
        wall_s=60,
        versions={},
        items_per_s=50,
        steady_items_per_s=110,
        steps=(step,),
        operators=(OperatorReport(name="stage 0", busy_share=0.97, backpressure_s=4.2, **held),),
        observed_bottleneck="stage 0",
        nodes=(
            NodeReport(name="a 10.0.0.1", num_cpus=4, steps=("decode",), peak_memory_bytes=5 << 20),
            NodeReport(name="b 10.0.0.2", num_cpus=8, num_gpus=2, gpu_type="L4"),
        ),
        events=(EventReport(at_s=31.4, text="node b 10.0.0.2 is lost"),),
        spilled_bytes=3 << 20,
        moved_bytes=9 << 20,
        cost_per_million=1.2345,
    )


def test_operators_nodes_events_and_cost_are_shown():
    lines = shown_text(report_parts(full_report())).splitlines()
    (operator,) = [line.split() for line in lines if line.startswith("stage 0") and "0.97" in line]
    assert operator == ["stage", "0", "12", "3", "2", "0.5", "7.0", "0.97", "4.2"]
    assert "bottleneck: stage 0" in lines
    assert ["a", "10.0.0.1", "4", "0", "5", "decode"] in [line.split() for line in lines]
    assert ["b", "10.0.0.2", "8", "2", "L4", "0", "none"] in [line.split() for line in lines]
    assert "9.0 MiB of blocks were moved between nodes" in lines
    assert "at 31 s: node b 10.0.0.2 is lost" in lines
    assert any(line.startswith("3.0 MiB of blocks were moved to disk") for line in lines)
    assert "1.23 per million items, in the currency of [prices], which `currency` would name" in lines
    in_euros = full_report().model_copy(update={"currency": "EUR"})
    assert "1.23 EUR per million items, by [prices]" in shown_text(report_parts(in_euros)).splitlines()
    assert any("50 items/s (110 once all stages were up)" in line for line in lines)
    [step] = full_report().steps
    noted = full_report().model_copy(update={"steps": (step.model_copy(update={"notes": ("stage 0: no compiler",)}),)})
    assert "stage 0: no compiler" in shown_text(report_parts(noted)).splitlines()


def test_a_short_run_on_ray_says_that_it_is_no_judge():
    report = full_report().model_copy(update={"observed_bottleneck": None, "steady_items_per_s": None})
    text = shown_text(report_parts(report))
    assert "bottleneck: not known, the run was too short" in text and "once all stages" not in text


def test_the_lines_below_the_bar_mark_the_bottleneck():
    lines = operator_lines(OperatorView(sample(0.0, 10).operators, "stage 0")).plain.splitlines()
    assert lines[0].split() == ["queue", "tasks", "replicas", "CPUs", "GPUs", "store"]
    assert lines[1].split() == ["decode", "4", "2", "0", "0", "0.0", "MiB"]
    expected = ["stage", "0", "12", "2", "1", "(+1", "starting)", "0.25", "0.5", "3.0", "MiB", "bottleneck"]
    assert lines[2].split() == expected
    assert len({len(line) for line in (*lines[:2], lines[3])}) == 1, "columns stand below each other"
