"""What the planner's costs predict against what runs reach: three models through three stages on Ray.

    python scripts/compare_predictions.py [SECONDS] [MODEL]     # 45 s a run: about six minutes on two quiet cores

MODEL is demo, ViT-S/16 or captions; all three by default.

Layers, decoding, writing and hand-overs are measured on this machine and on the run's own items, then the run is
predicted, then it is made. On few cores the bound is the cores themselves: they hold so many CPU seconds a second, and
an item needs those of decoding, of all stages, of writing and of Ray. So the table also sets CPU seconds of an item
side by side, which other work on the machine doesn't change much; items/s need a machine that does nothing else.

A run's actors are up before its first item (Ray Data's `wait_for_min_actors_s`), and a run that is thrown away starts
the processes of its tasks. The last line is one JSON document.
"""

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench_runs import NUM_WARM, Items, configured, predictor_of, warm_ray, write_items

import embedder
from corpus import DEMO_MODEL, make_model
from embedder.config import RunConfig
from embedder.executors.job import make_plan
from embedder.models.model_folder import Model
from embedder.placement import hardware
from embedder.planning.profile import ENGINE_CALL_S, ENGINE_CORES
from embedder.report.plan_review import shapes_of
from embedder.report.prediction import RunPrediction
from embedder.report.schema import Report
from harness import show

PROMISE = 0.20
START_CPU_S = 5.0  # of a run's decode and write processes, which start when they are first needed
COLUMNS = {
    "model": "{model}",
    "items/s": "{items_per_s:.2f}",
    "predicted": "{predicted_items_per_s:.2f}",
    "ratio": "{ratio:.2f}",
    "CPU ms/item": "{cpu_ms:.2f}",
    "predicted CPU": "{predicted_cpu_ms:.2f}",
    "limited by": "{bottleneck}",
}


@dataclass(frozen=True)
class Case:
    """A model and its items."""

    name: str
    model: Path
    items: Items
    batch_size: int


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 45.0
    with tempfile.TemporaryDirectory(prefix="compare-predictions-") as root, warm_ray():
        chosen = [case for case in cases(Path(root)) if case.name.startswith("".join(sys.argv[2:3]))]
        rows = [compare(case, Path(root), seconds) for case in chosen]
    show(rows, COLUMNS)
    if len(rows) > 1:
        print_engine(rows)
    worst = max(abs(row["ratio"] - 1) for row in rows)
    print(json.dumps({"rows": rows, "worst_error": round(worst, 3), "within_promise": worst <= PROMISE}))


def print_engine(rows: list[dict[str, float]]) -> None:
    """Ray's own share beside what the constants of embedder/planning/profile.py say of such runs."""
    said = [ENGINE_CORES + ENGINE_CALL_S * row["calls_per_s"] + START_CPU_S / row["window_s"] for row in rows]
    shown = (f"{row['engine_cores']:.2f} ({each:.2f})" for row, each in zip(rows, said, strict=True))
    print(f"Ray itself, of a core, observed (usual): {', '.join(shown)}")


def cases(root: Path) -> list[Case]:
    """The shipped model; a ViT-S/16 with a text tower of its width; a deep text tower that sees mostly captions."""
    square = {"width": 384, "num_heads": 6}
    text = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536, "embedding_size": 128}
    vit_s = {"image_size": 224, "patch_size": 16, "depth": 12, **square}
    small = {"image_size": 64, "patch_size": 8, "depth": 4, "width": 192, "num_heads": 3, "stem": "conv"}
    return [
        Case("demo: conv stem, 6 + 4", DEMO_MODEL, Items(), 32),
        Case(
            "ViT-S/16, 12 + 12",
            make_model(root / "vit-s", vit_s, text | {"num_hidden_layers": 12}),
            Items(),
            8,
        ),
        Case(
            "captions: small ViT, 4 + 18",
            make_model(root / "captions", small, text | {"num_hidden_layers": 18}),
            Items(image_every=8, captions=4),
            16,
        ),
    ]


def compare(case: Case, root: Path, seconds: float) -> dict[str, object]:
    """Measure, predict, run."""
    place = root / case.name.replace(" ", "-").replace("/", "-").replace(":", "")
    settings = {"batch_size": case.batch_size, "num_stages": 3}
    warm = write_items(place / "warm", NUM_WARM, case.items)
    config, model = configured(case.model, warm, place / "store-warm", **settings)
    embedder.embed(config)
    num_items = max(NUM_WARM, int(seconds * expected(config, model).items_per_s))
    source = write_items(place / "in", num_items, case.items)
    config, _ = configured(case.model, source, place / "store", **settings)
    predicted = expected(config, model)  # from a sample of what is run
    # The run is short: starting the processes of its tasks is a part of it.
    start_s = START_CPU_S / hardware.num_cpus()
    items_per_s = num_items / (num_items / predicted.items_per_s + start_s)
    report = embedder.embed(config)
    print_steps(case, predicted, report)
    observed_s = sum(report.review.observed_seconds_per_item.values())
    return {
        "model": case.name,
        "num_items": num_items,
        "items_per_s": report.items_per_s,
        "predicted_items_per_s": items_per_s,
        "ratio": items_per_s / report.items_per_s,
        "cpu_ms": 1e3 * observed_s,
        "predicted_cpu_ms": 1e3 * predicted.cpu_s,
        "bottleneck": predicted.bottleneck,
        "engine_cores": report.engine_cores,
        "window_s": report.window_s,
        "calls_per_s": sum(step.num_calls for step in report.steps) / report.window_s,
    }


def expected(config: RunConfig, model: Model) -> RunPrediction:
    """Measure this machine and a sample of the run's items, and predict the run."""
    predictor, allocation = predictor_of(config, model)
    return predictor(shapes_of([stage.spec for stage in make_plan(config.compute, model).stages], allocation))


def print_steps(case: Case, predicted: RunPrediction, report: Report) -> None:
    """CPU milliseconds of an item by step."""
    print(f"{case.name}: {report.num_items:,} items in {report.window_s:.0f} s; CPU ms/item, observed (predicted)")
    said = {f"stage {index}": seconds for index, seconds in enumerate(predicted.stage_s)}
    said |= {"decode": predicted.decode_s}
    rest_s = predicted.cpu_s - sum(said.values())
    observed = dict(report.review.observed_seconds_per_item)
    other_s = sum(value for step, value in observed.items() if step not in said)
    steps = [f"{step} {1e3 * observed[step]:.2f} ({1e3 * said[step]:.2f})" for step in sorted(said)]
    print("   ", ", ".join([*steps, f"write and Ray {1e3 * other_s:.2f} ({1e3 * rest_s:.2f})"]), flush=True)


if __name__ == "__main__":
    main()
