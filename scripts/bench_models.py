"""Two twin towers and a classifier in one run over photographs, beside a run of each alone.

    python scripts/bench_models.py                                  # 2,000 photographs: a quarter of an hour, two cores
    python scripts/bench_models.py --source path/to/photographs     # your own
    python scripts/bench_models.py --images 40 --rounds 1

Each run is a process of its own: start, list, decode, compute, publish. Where W is the wall time of a run, and nothing
is that of a run whose model computes next to nothing, one run of several models should take

    limit = nothing + the sum over the models of (W of the model alone - nothing):

each model's own computing, one decode and one start. Runs take turns, and medians are compared; vectors and labels must
be those of the runs alone. The last line is one JSON document.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from PIL import Image

import embedder
from corpus import encode, make_model
from harness import run_watched, show

TIMEOUT_S = 1800.0
PHOTOGRAPH_PX = (640, 480)
ALBERT = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3, "intermediate_size": 768}
NOTHING = {"image_size": 32, "patch_size": 16, "width": 32, "depth": 2, "num_heads": 1}
TOWERS = {
    "first": {"image_size": 224, "patch_size": 16, "width": 192, "depth": 12, "num_heads": 3},
    "second": {"image_size": 160, "patch_size": 16, "width": 384, "depth": 6, "num_heads": 6},
}
LABELS = ("interior", "landscape", "people", "text")
CLASSIFIER = "classifier"
COLUMNS = {"run": "{run}", "wall s": "{wall_s:.1f}", "decoded": "{num_decoded:,}", "items": "{num_items:,}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--source", type=Path, help="folder of photographs; by default they are drawn")
    parser.add_argument("--drive", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        drive(options.drive)
        return
    with tempfile.TemporaryDirectory(prefix="bench-models-") as folder:
        root = Path(folder)
        source = options.source or draw_photographs(root / "photographs", options.images)
        runs = dict(configured(root, source))
        rows = [run(root, name, path) for _ in range(options.rounds) for name, path in runs.items()]
        show(rows, COLUMNS)
        median_s = {name: statistics.median(row["wall_s"] for row in rows if row["run"] == name) for name in runs}
        own_s = {name: median_s[name] - median_s["nothing"] for name in (*TOWERS, CLASSIFIER)}
        limit_s = median_s["nothing"] + sum(own_s.values())
        apart_s = sum(median_s[name] for name in own_s)
        summary = {
            "median_s": rounded(median_s),
            "limit_s": round(limit_s, 1),
            "over_limit": round(median_s["together"] / limit_s, 3),
            "of_runs_apart": round(median_s["together"] / apart_s, 3),
            "largest_difference": compare(root),
            "decoded": {row["run"]: row["num_decoded"] for row in rows},
        }
    print(json.dumps(summary))


def rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds to a tenth."""
    return {name: round(value, 1) for name, value in seconds.items()}


def draw_photographs(folder: Path, num_images: int) -> Path:
    """Write JPEG files with the detail of photographs, and their size in a phone's messages."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    for number in range(num_images):
        coarse = Image.fromarray(generator.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize(PHOTOGRAPH_PX)
        noise = Image.fromarray(generator.integers(0, 256, (*PHOTOGRAPH_PX[::-1], 3), dtype=np.uint8))
        (folder / f"{number:06d}.jpg").write_bytes(encode(Image.blend(coarse, noise, 0.1), "JPEG", quality=85))
    return folder


def configured(root: Path, source: Path) -> Iterator[tuple[str, Path]]:
    """Make the models, and the configuration of each run; gives name and file."""
    towers = {
        name: make_model(root / f"model-{name}", vision, ALBERT)
        for name, vision in {"nothing": NOTHING, **TOWERS}.items()
    }
    classifier = {"name": CLASSIFIER, "kind": "torchscript", "uri": str(trace_classifier(root / "classifier.pt"))}
    classifier |= {
        "inputs": {"image": {"make": "pixels", "preprocess": {"image_size": 160, "resize": "squash"}}},
        "outputs": {"scores": {"type": "float32", "shape": [len(LABELS)]}},
    }
    first, second = ({"name": name, "uri": str(towers[name])} for name in TOWERS)
    runs = {
        "nothing": [{"uri": str(towers["nothing"])}],
        "first": [first],
        "second": [second],
        CLASSIFIER: [{"uri": str(towers["nothing"])}, classifier],
        "together": [first, second, classifier],
    }
    for name, models in runs.items():
        settings = {"model": models, "store": str(root / f"store-{name}"), "source": [{"path": str(source)}]}
        path = root / f"{name}.toml"
        path.write_text("".join(f"{key} = {as_toml(value)}\n" for key, value in settings.items()))
        yield name, path


def as_toml(value: object) -> str:
    """Write a value of strings, numbers, lists and dictionaries in one line of TOML."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {as_toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    return json.dumps(value)


def trace_classifier(path: Path) -> Path:
    """Write a small convolutional network with fresh weights as a TorchScript program."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128), (128, 128)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, len(LABELS)), nn.Softmax(1))
    torch.jit.trace(network.eval(), torch.rand(2, 3, 160, 160)).save(str(path))
    return path


def run(root: Path, name: str, path: Path) -> dict:
    """Embed into a new store, in a process of its own; gives a row of the table."""
    shutil.rmtree(root / f"store-{name}", ignore_errors=True)
    watched = run_watched([sys.executable, __file__, "--drive", path], root, TIMEOUT_S)
    return {"run": name, "wall_s": watched.wall_s, **json.loads(watched.last_line)}


def drive(path: Path) -> None:
    """Embed as a configuration says; prints counts of the report."""
    report = embedder.embed(embedder.load_config(path))
    (decode,) = (step for step in report.steps if step.step == "decode")
    print(json.dumps({"num_decoded": decode.num_rows, "num_items": report.num_items}))


def compare(root: Path) -> float:
    """Return the largest difference of a number in a vector or a score to that of the model's run alone."""
    found = embedder.open_store(root / "store-together").to_arrow().sort_by("item_id")
    columns = {"first": "image_embedding", "second": "second.image_embedding", CLASSIFIER: f"{CLASSIFIER}.scores"}
    differences = []
    for name, column in columns.items():
        alone = embedder.open_store(root / f"store-{name}").to_arrow().sort_by("item_id")
        if alone["item_id"] != found["item_id"]:
            raise SystemExit(f"{name}: the run of all models has other items than the run of this one")
        ours, theirs = (
            np.array(rows[key].to_pylist(), np.float32)
            for rows, key in ((found, column), (alone, "image_embedding" if name in TOWERS else column))
        )
        differences.append(float(np.abs(ours - theirs).max()))
    return max(differences)


if __name__ == "__main__":
    main()
