"""Each operator throttled in turn, on a real Ray with two CPUs: what a run shows and its report name the bottleneck."""

import os
import time
from collections import Counter
from contextlib import contextmanager

import pytest
import samples
from embedding_runs import embedded
from heavy_models import heavy_model

from embedder import pipeline
from embedder.cli.terminal import operator_lines
from embedder.executors import bottleneck
from embedder.executors.datasink import PartSink

STAGES = ("stage 0", "stage 1", "stage 2")
NUM_ITEMS = {"decode": 256, "write": 120}  # decoding begins while the stages start, and must not end with that
NUM_ITEMS_OF_STAGE = 500


def model_with_heavy_stage(folder, heavy):
    """A model that takes some 30 ms of a core for an image, almost all of it in one of three stages, or 1 ms in all."""
    ends = {"stage 0": (0, 10, 11, 12), "stage 1": (0, 1, 11, 12), "stage 2": (0, 1, 2, 12)}.get(heavy, (0, 4, 8, 12))
    cuts = list(zip(ends, range(4), strict=True))
    return heavy_model(folder, cuts) if heavy else heavy_model(folder, cuts, width=48, patch_size=32)


def images(folder, num_items, *, large):
    """One image under many names, with a caption each, as equal items are computed once.

    A large one takes a core for a twentieth of a second.
    """
    folder.mkdir()
    samples.make_image(0, *((2400, 1600) if large else (40, 30))).save(folder / "0000.png", compress_level=1)
    for number in range(num_items):
        (folder / f"{number:04d}.txt").write_text(f"number {number}")
        if number:
            os.link(folder / "0000.png", folder / f"{number:04d}.png")
    return folder


class Views:
    """Display that keeps what a terminal would show."""

    def __init__(self):
        self.views = []

    @contextmanager
    def show(self, num_items):
        yield self

    def __call__(self, num_done):
        """Keep nothing."""

    def show_operators(self, view):
        self.views.append(view)


@pytest.mark.slow
@pytest.mark.parametrize("throttled", ["decode", STAGES[1], "write"])
def test_the_throttled_operator_is_named(throttled, make_run, tmp_path, ray_cluster, monkeypatch):
    class SlowSink(PartSink):
        def write(self, blocks, context):
            time.sleep(1.0)
            return super().write(blocks, context)

    monkeypatch.setattr(bottleneck, "MIN_WATCHED_S", 2.0)  # for short runs
    if throttled == "write":
        monkeypatch.setattr(pipeline, "PartSink", SlowSink)
    num_items = NUM_ITEMS.get(throttled, NUM_ITEMS_OF_STAGE)
    config = make_run(
        images(tmp_path / "in", num_items, large=throttled == "decode"),
        engine="ray",
        stage=[{"num_cpus": 0.2, "num_threads": 1}] * 3,
        rows_per_part=8 if throttled == "write" else 512,
        decode={"num_cpus": 1.0, "items_per_task": 8},
        prices={"CPU": 0.05},
        min_vector_spread=0,
        min_vector_directions=0,
        **model_with_heavy_stage(tmp_path, throttled if throttled in STAGES else None),
    )
    shown = Views()
    report, rows = embedded(config, show_progress=shown.show)
    assert (report.num_items, len(rows)) == (num_items, num_items)
    assert report.observed_bottleneck == throttled
    named = Counter(view.bottleneck for view in shown.views if view.bottleneck)
    assert named.most_common(1)[0][0] == throttled, named
    view = next(view for view in reversed(shown.views) if view.bottleneck == throttled)
    (line,) = [line for line in operator_lines(view).plain.splitlines() if line.endswith("bottleneck")]
    assert line.startswith(throttled)
    operators = {operator.name: operator for operator in report.operators}
    assert list(operators) == ["decode", *STAGES, "write"]
    shares = [operator.busy_share for operator in report.operators]
    from_there = shares[list(operators).index(throttled) :]  # those before it may be busier until Ray holds them back
    assert from_there[0] == max(from_there) and from_there[0] >= bottleneck.MIN_BUSY * max(shares)
    assert operators["decode"].max_queued_blocks > 0 and operators["decode"].num_cpus == 1.0
    assert (report.spilled_bytes, report.moved_bytes, report.events) == (0, 0, ())
    (node,) = report.nodes
    assert node.steps == ("decode", *STAGES, "write") and node.peak_memory_bytes > 3 * 100 * 2**20
    rate = report.steady_items_per_s or report.items_per_s
    assert report.cost_per_million == pytest.approx(2 * 0.05 / 3600 / rate * 1e6)
