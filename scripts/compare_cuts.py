"""The planned cut against each tower in thirds, where a stage or the data is uneven: predicted, and measured in turn.

    python scripts/compare_cuts.py [SETTING] [SECONDS [TURNS]]     # first-half, middle-half or captions; 30 s a run
    python scripts/compare_cuts.py tiny 0 1                        # a minute: shows that it runs, measures nothing

first-half   the first of three stages may use half a core (a CPU quota); the model has the default's conv stem
middle-half  the second one may; a ViT of 10 layers has its thirds at 3, 4 and 3
captions     nine of ten items are captions alone; all stages are equal

Runs take turns, thirds and planned, TURNS (2) each; the best of each counts: about four minutes on two quiet cores.

On paper: three stages on two cores can't be faster than the cores, 2 / (CPU seconds of an item). Thirds of equal layers
give each stage a third of them, so with a stage on half a core they reach 0.5 / (1/3) = 1.5 where all cores together
reach at most 2: never more than 4/3 is to be won there. A conv stem, or layers that three doesn't divide, put more into
the slow stage, and the gain grows. And whatever the mix, thirds of both towers stay thirds: with equal stages they are
as good as any cut but for the stem, so `captions` gains nothing, which it says.

The quota is that of Linux's CPU bandwidth control, done without its privileges: a helper stops the stage's process
when it has used its part of the time, and wakes it when it has some again. The planned cut is the best of all cuts by
the same prediction, for stages that may use so much. The last line is one JSON document.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench_runs import Items, configured, predictor_of, warm_ray, write_items

import embedder
from corpus import make_model
from embedder import pipeline
from embedder.report.prediction import RunPrediction, StageShape
from embedder.steps.stage_actor import StageActor
from embedder.steps.stage_spec import StageSpec
from embedder.store.journal.runs import Run
from shards.config import ModelConfig
from shards.plan import plan_specs
from shards.ranges import LayerRange
from shards.shard_specs import ShardSpec

PROMISE = 1.3
NUM_STAGES = 3

# Stops a process whenever it is ahead of its part of the time; unused time is kept for a tenth of a second at most.
QUOTA = """
import os, signal, sys, time, psutil
pid, share, period_s = int(sys.argv[1]), float(sys.argv[2]), 0.1
process = psutil.Process(pid)
begun_s, before_s, stopped = time.monotonic(), sum(process.cpu_times()[:2]), False
while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
    used_s, allowed_s = sum(process.cpu_times()[:2]) - before_s, share * (time.monotonic() - begun_s)
    if allowed_s - used_s > share * period_s:
        begun_s += (allowed_s - used_s) / share - period_s
    if stopped != (used_s > allowed_s):
        stopped = not stopped
        os.kill(pid, signal.SIGSTOP if stopped else signal.SIGCONT)
    time.sleep(0.005)
"""


@dataclass(frozen=True)
class Setting:
    """What is uneven."""

    vision: dict
    items: Items
    shares: tuple[float, ...] = (1.0, 1.0, 1.0)


SQUARE = {"image_size": 128, "width": 256, "num_heads": 4}
SETTINGS = {
    "first-half": Setting({"patch_size": 16, "depth": 6, "stem": "conv", **SQUARE}, Items(), (0.5, 1.0, 1.0)),
    "middle-half": Setting({"patch_size": 8, "depth": 10, **SQUARE}, Items(), (1.0, 0.5, 1.0)),
    "captions": Setting({"patch_size": 8, "depth": 6, **SQUARE}, Items(image_every=10, captions=3)),
    "tiny": Setting({"image_size": 32, "width": 32, "num_heads": 2, "patch_size": 8, "depth": 3}, Items(), (0.5, 1, 1)),
}
TEXT = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024, "num_hidden_layers": 6}


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "first-half"
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 30.0
    num_turns = int(sys.argv[3]) if len(sys.argv) > 3 else 2
    setting = SETTINGS[name]
    with tempfile.TemporaryDirectory(prefix="compare-cuts-") as root, warm_ray():
        # The pipeline makes its actors of this class; Ray sends it to them by value.
        pipeline.StageActor = limited_actor(setting.shares)
        result = compare(setting, Path(root), seconds, num_turns)
    print(json.dumps({"setting": name, "shares": setting.shares, **result}))


def limited_actor(shares: Sequence[float]) -> type[StageActor]:
    """Actors of stages that may each use only their share of a core."""

    class LimitedStageActor(StageActor):
        def __init__(self, spec: StageSpec, run: Run | None = None) -> None:
            super().__init__(spec, run)
            if shares[spec.index] < 1:
                subprocess.Popen([sys.executable, "-c", QUOTA, str(os.getpid()), str(shares[spec.index])])

    return LimitedStageActor


def compare(setting: Setting, root: Path, seconds: float, num_turns: int) -> dict[str, object]:
    """Measure the costs, cut twice, run each cut in turn.

    Args:
        setting: model, items, and the part of a core that each stage may use.
        root: to work in.
        seconds: of a run, as predicted.
        num_turns: runs of each cut.
    """
    folder = make_model(root / "model", setting.vision, TEXT)
    sample = write_items(root / "sample", 100, setting.items)
    config, model = configured(folder, sample, root / "store-sample", batch_size=8)
    predictor, _ = predictor_of(config, model)

    def expect(cut: Sequence[ShardSpec]) -> RunPrediction:
        return predictor([StageShape(spec, share=share) for spec, share in zip(cut, setting.shares, strict=True)])

    cuts = {"thirds": thirds(model.config), "planned": best_cut(model.config, expect)}
    predicted = {name: expect(cut) for name, cut in cuts.items()}
    for name, cut in cuts.items():
        ranges = ", ".join(
            f"{spec.vision.start}-{spec.vision.stop} + {spec.text.start}-{spec.text.stop}" for spec in cut
        )
        print(f"{name:8} {ranges}: predicted {predicted[name].items_per_s:.1f} items/s, {predicted[name].bottleneck}")
        (root / f"{name}.json").write_text(plan_specs(model.config, cut).to_json())
    num_items = max(64, int(seconds * predicted["planned"].items_per_s))
    source = write_items(root / "in", num_items, setting.items)
    measured: dict[str, list[float]] = {name: [] for name in cuts}
    embedder.embed(config)  # starts the processes of tasks
    for turn, name in itertools.product(range(num_turns), cuts):
        settings = {"batch_size": 8, "plan": str(root / f"{name}.json")}
        report = embedder.embed(configured(folder, source, root / f"store-{name}-{turn}", **settings)[0])
        measured[name].append(report.items_per_s)
        print(f"{name:8} {report.items_per_s:.1f} items/s", flush=True)
    gain = max(measured["planned"]) / max(measured["thirds"])
    paper = predicted["planned"].items_per_s / predicted["thirds"].items_per_s
    print(f"planned over thirds: {gain:.2f}x measured, {paper:.2f}x predicted")
    return {"items_per_s": measured, "gain": gain, "predicted_gain": paper, "within_promise": gain >= PROMISE}


def thirds(config: ModelConfig) -> list[ShardSpec]:
    """Each tower in three parts, as equal as its layers allow."""
    depths = config.vision.depth, config.text.num_hidden_layers
    cuts = [tuple(round(depth * part / NUM_STAGES) for depth in depths) for part in range(NUM_STAGES + 1)]
    return specs_of(cuts)


def best_cut(config: ModelConfig, expect: Callable[[Sequence[ShardSpec]], RunPrediction]) -> list[ShardSpec]:
    """The cut that is predicted fastest, and the one with the most even stages among equals."""

    def merit(cut: list[ShardSpec]) -> tuple[float, float]:
        found = expect(cut)
        return round(found.items_per_s, 6), -max(found.stage_s)

    return max(all_cuts(config), key=merit)


def all_cuts(config: ModelConfig) -> Iterator[list[ShardSpec]]:
    """Every way to give three stages all layers in order, each at least one."""
    depths = config.vision.depth, config.text.num_hidden_layers
    places = list(itertools.product(range(depths[0] + 1), range(depths[1] + 1)))
    for first, second in itertools.product(places, places):
        cuts = [(0, 0), first, second, depths]
        if all(a != b and a[0] <= b[0] and a[1] <= b[1] for a, b in itertools.pairwise(cuts)):
            yield specs_of(cuts)


def specs_of(cuts: Sequence[tuple[int, ...]]) -> list[ShardSpec]:
    return [
        ShardSpec(LayerRange(start[0], stop[0]), LayerRange(start[1], stop[1]))
        for start, stop in itertools.pairwise(cuts)
    ]


if __name__ == "__main__":
    main()
