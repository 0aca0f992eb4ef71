"""One tower as cuttable stages, `hf`, .pt2, TorchScript and ONNX through one pipeline: their vectors, their speed.

    python scripts/bench_servables.py                                 # shipped emoji, ViT-S/16: about ten minutes
    python scripts/bench_servables.py --photographs DIR --num-images 400 --rounds 5
    python scripts/bench_servables.py --quick                         # a tiny tower: shows that the script runs

A ViT of transformers with random weights is saved in all forms; .pt2 is also run compiled. Each goes through
`BatchPredictor.from_servables` on the same images, in turns, each round in another order, and what is first is thrown
away. There are then

- cosine: the least of all images against the cut tower's vectors; also without the mean of those, as the vectors of
  random weights resemble each other;
- items/s: between the first and the last block that left the pipeline, decoding beside it, median of the rounds;
- alone: items/s of the loaded servable in this process, in turns, on images that were decoded before, median; and the
  CPU of an item, which other work on the machine changes less;
- GFLOP/s of the latter, beside what a product of matrices reaches on these threads: no form can be faster.

Ratios are medians of those of single rounds, against `hf`, which runs torch eagerly.
The last line is one JSON document.
"""

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from corpus import read_shipped, unit
from harness import number, table

FORMS = ("towers", "hf", "torch_export", "compiled", "torchscript", "onnx")
EAGER = "hf"
LEAST_COSINE = 0.9999
VIT_S = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536}
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
BLOCK_ROWS = 32
MATRIX = 1024  # side of the matrices whose product is the yardstick
MOST_BATCH = 1024  # rows of a batch that the exported graphs take

Sections = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Form:
    """One form of the tower; ratios are against the eager one.

    Attributes:
        form: kind of the servable, or `compiled`.
        cosine: least cosine against the cut tower.
        centred_cosine: likewise, without the mean of the cut tower's vectors.
        items_per_s: through the pipeline.
        ratio: of it.
        alone_items_per_s: of the loaded servable.
        alone_ratio: of it.
        cpu_ms: CPU of an item then.
        gflop_per_s: operations of the latter.
    """

    form: str
    cosine: float
    centred_cosine: float
    items_per_s: float
    ratio: float
    alone_items_per_s: float
    alone_ratio: float
    cpu_ms: float
    gflop_per_s: float


class UnitVectors(torch.nn.Module):
    """Pooled features of a tower of transformers with length 1, of normalised pixels (B, 3, H, W)."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Compute vectors (B, E)."""
        return torch.nn.functional.normalize(self.model(pixels).pooler_output, dim=-1)


def save_forms(folder: Path, side_px: int) -> Sections:
    """Save a checkpoint of transformers in all other forms; gives the section of each kind but for its name.

    Args:
        folder: holds `checkpoint`, a ViT with its image processor; gets the other forms.
        side_px: side of its images.
    """
    from transformers import AutoModel

    from shards.convert import import_checkpoint

    checkpoint = folder / "checkpoint"
    model = AutoModel.from_pretrained(checkpoint)
    import_checkpoint(checkpoint, folder / "model")
    export(UnitVectors(model).eval(), folder, side_px)
    preprocess = preprocess_of(side_px)
    graph = {
        "inputs": {"pixels": {"make": "pixels", "preprocess": preprocess}},
        "outputs": {"image_embedding": {"shape": [model.config.hidden_size]}},
    }
    features = {"task": "image-feature-extraction", "preprocess": preprocess}
    return {
        "towers": {"kind": "towers", "uri": str(folder / "model")},
        "hf": {"kind": "hf", "uri": str(checkpoint), **features},
        "torch_export": {"kind": "torch_export", "uri": str(folder / "tower.pt2"), **graph},
        "compiled": {"kind": "torch_export", "uri": str(folder / "tower.pt2"), "compiled": True, **graph},
        "torchscript": {"kind": "torchscript", "uri": str(folder / "tower.pt"), **graph},
        "onnx": {"kind": "onnx", "uri": str(folder / "tower.onnx"), **graph},
    }


def preprocess_of(side_px: int) -> dict[str, Any]:
    """Section that does what transformers' image processor of a ViT does; mean and deviation are the default."""
    rule = {"resize": "squash", "interpolation": "bilinear", "resampler": "torchvision", "reduced_decode": False}
    return {"image_size": side_px, **rule}


def export(module: torch.nn.Module, folder: Path, side_px: int, outputs: Sequence[str] = ("image_embedding",)) -> None:
    """Save a module of pixels as .pt2, TorchScript and ONNX, for any number of rows.

    Args:
        module: in evaluation mode.
        folder: gets tower.pt2, tower.pt and tower.onnx.
        side_px: side of the images.
        outputs: their names in ONNX.
    """
    pixels = torch.rand(2, 3, side_px, side_px)
    batch = {0: torch.export.Dim("batch", max=MOST_BATCH)}
    program = torch.export.export(module, (pixels,), dynamic_shapes=(batch,))
    torch.export.save(program, folder / "tower.pt2")
    with torch.no_grad():
        torch.jit.trace(module, (pixels,), strict=False).save(str(folder / "tower.pt"))
    torch.onnx.export(
        program, f=str(folder / "tower.onnx"), input_names=["pixels"], output_names=list(outputs), dynamo=True
    )


def save_checkpoint(folder: Path, sizes: Mapping[str, int], side_px: int, patch_px: int) -> None:
    """Save a ViT of transformers with random weights and its image processor.

    Args:
        folder: of the checkpoint.
        sizes: of its layers, by transformers' names.
        side_px: side of its images.
        patch_px: side of its patches.
    """
    from transformers import ViTConfig, ViTImageProcessor, ViTModel

    torch.manual_seed(0)
    model = ViTModel(ViTConfig(**sizes, image_size=side_px, patch_size=patch_px)).eval()
    model.save_pretrained(folder)
    ViTImageProcessor(size={"height": side_px, "width": side_px}).save_pretrained(folder)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photographs", type=Path, metavar="DIR", help="a folder of JPEGs; by default shipped emoji")
    parser.add_argument("--num-images", type=int, default=320)
    parser.add_argument("--rounds", type=int, default=3, help="of all forms")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a tiny tower, 96 images, one round")
    options = parser.parse_args(arguments)
    if options.quick:
        options.num_images, options.rounds = 96, 1
    if options.num_images < 2 * BLOCK_ROWS:
        parser.error(f"--num-images {options.num_images}: two blocks of {BLOCK_ROWS} at least are needed")
    sizes, side_px, patch_px = (TINY, 32, 8) if options.quick else (VIT_S, 224, 16)
    images = read_images(options.photographs, options.num_images)
    with tempfile.TemporaryDirectory(prefix="bench-servables-") as root, warnings.catch_warnings(action="ignore"):
        save_checkpoint(Path(root) / "checkpoint", sizes, side_px, patch_px)
        sections = save_forms(Path(root), side_px)
        flop = flop_of(Path(root) / "model")
        alone = measure_alone(sections, images, options)
        through = through_pipeline(sections, images, options)
    peak = matrix_gflop_per_s(options.threads)
    forms = [form_of(name, alone, through, flop) for name in sections]
    show(forms, peak)
    document = {"matrix_gflop_per_s": peak, "flop": flop, "num_images": len(images), "options": vars(options)}
    is_equal = all(form.cosine >= LEAST_COSINE for form in forms)
    document |= {"forms": [asdict(form) for form in forms], "is_equal": is_equal}
    print(json.dumps(document, default=str))


def read_images(folder: Path | None, num_images: int) -> list[bytes]:
    """Encoded images, repeated where there are fewer."""
    found = [path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()] if folder else read_shipped()[0]
    if not found:
        raise SystemExit(f"{folder}: no file there; give a folder of JPEGs")
    return [found[number % len(found)] for number in range(num_images)]


def flop_of(model: Path) -> float:
    """Operations of one image, by the tower's own count."""
    from shards.config import load_model_config

    tower = load_model_config(model).required_vision
    flops = tower.flops(1)
    return flops.front + tower.num_layers * flops.layer + flops.head


@dataclass(frozen=True)
class Alone:
    """Items a second of a loaded servable, and CPU milliseconds of an item, of each round."""

    items_per_s: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)


def measure_alone(sections: Sections, images: Sequence[bytes], options: argparse.Namespace) -> dict[str, Alone]:
    """Measure each loaded servable in this process, in turns; all see the same decoded images."""
    from embedder.media.limits import DecodeLimits
    from embedder.servables import make_servable
    from embedder.servables.predict import decode_rows
    from embedder.servables.run import RunningServable

    servables = [make_servable(section | settings_of(form, options)) for form, section in sections.items()]
    given = pa.table({"image": images[: 2 * options.batch_size]})
    names = {"image": "image", "caption": "caption", "limits": DecodeLimits()}
    decoded = pa.concat_tables(decode_rows(given, servables=servables, **names))
    running = [RunningServable(each, num_threads=options.threads) for each in servables]
    found = {each.name: Alone() for each in servables}
    for turn in range(options.rounds + 1):
        for each in in_turn(running, turn):
            started_s, cpu_s = time.perf_counter(), time.process_time()
            each(decoded)
            if turn:
                alone = found[each.servable.name]
                alone.items_per_s.append(decoded.num_rows / (time.perf_counter() - started_s))
                alone.cpu_ms.append((time.process_time() - cpu_s) * 1000 / decoded.num_rows)
    for each in running:
        each.close()
    return found


def settings_of(form: str, options: argparse.Namespace) -> dict[str, Any]:
    return {"name": form, "batch_size": options.batch_size, "num_cpus": options.threads}


def in_turn(things: Sequence[Any], turn: int) -> list[Any]:
    """The same things, beginning with another one in each round."""
    first = turn % len(things)
    return [*things[first:], *things[:first]]


@dataclass(frozen=True)
class Passed:
    """Vectors of one form, float32 (N, E) in the order of the images, and items a second of each round."""

    vectors: np.ndarray
    items_per_s: list[float]


def through_pipeline(sections: Sections, images: Sequence[bytes], options: argparse.Namespace) -> dict[str, Passed]:
    """Run each form through the pipeline on a Ray of its own, in turns; the first run starts Ray's processes."""
    import ray

    from embedder.executors.ray_session import start_ray

    start_ray(num_cpus=options.threads, num_gpus=0)
    ray.data.DataContext.get_current().enable_progress_bars = False
    try:
        rows = pa.table({"number": list(range(len(images))), "image": images})
        dataset = ray.data.from_arrow([rows.slice(at, BLOCK_ROWS) for at in range(0, len(images), BLOCK_ROWS)])
        rates: dict[str, list[float]] = {form: [] for form in sections}
        vectors = {}
        one_run(dataset.limit(2 * BLOCK_ROWS), sections[EAGER] | settings_of(EAGER, options))
        for turn in range(options.rounds):
            for form in in_turn([*sections], turn):
                vectors[form], rate = one_run(dataset, sections[form] | settings_of(form, options))
                rates[form].append(rate)
                print(f"round {turn + 1}: {form} {rate:.1f} items/s", flush=True)
    finally:
        ray.shutdown()
    return {form: Passed(vectors[form], rates[form]) for form in sections}


def one_run(dataset: Any, section: Mapping[str, Any]) -> tuple[np.ndarray, float]:
    """Vectors and items a second of one run."""
    import embedder

    found = embedder.BatchPredictor.from_servables([section]).predict(dataset)
    blocks, seen_s = [], []
    for block in found.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        blocks.append(block)
        seen_s.append(time.perf_counter())
    done = pa.concat_tables(blocks).sort_by("number")
    (name,) = (each for each in done.column_names if each.endswith("embedding"))
    if done[name].null_count:
        raise SystemExit(f"{name}: {done[section['name'] + '.error'].drop_null()[0]}")
    return np.array(done[name].to_pylist(), np.float32), steady_rate([block.num_rows for block in blocks], seen_s)


def steady_rate(num_rows: Sequence[int], seen_s: Sequence[float]) -> float:
    """Rows a second after the first block: starting and loading are no part of it.

    Args:
        num_rows: of each block.
        seen_s: moments at which they came.
    """
    return sum(num_rows[1:]) / (seen_s[-1] - seen_s[0])


def matrix_gflop_per_s(num_threads: int) -> float:
    """Operations of the product of two float32 matrices on as many threads; the best of some."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    left, right = torch.rand(2, MATRIX, MATRIX)
    best_s = float("inf")
    for _ in range(20):
        started_s = time.perf_counter()
        torch.mm(left, right)
        best_s = min(best_s, time.perf_counter() - started_s)
    torch.set_num_threads(before)
    return 2 * MATRIX**3 / best_s / 1e9


def form_of(form: str, alone: Mapping[str, Alone], through: Mapping[str, Passed], flop: float) -> Form:
    """Medians of one form.

    Args:
        form: of the tower.
        alone: the loaded servables.
        through: what went through the pipeline.
        flop: operations of an image.
    """
    cut = through["towers"].vectors
    rate = statistics.median(alone[form].items_per_s)
    return Form(
        form=form,
        cosine=least_cosine(cut, through[form].vectors),
        centred_cosine=least_cosine(cut - cut.mean(0), through[form].vectors - cut.mean(0)),
        items_per_s=statistics.median(through[form].items_per_s),
        ratio=median_ratio(through[form].items_per_s, through[EAGER].items_per_s),
        alone_items_per_s=rate,
        alone_ratio=median_ratio(alone[form].items_per_s, alone[EAGER].items_per_s),
        cpu_ms=statistics.median(alone[form].cpu_ms),
        gflop_per_s=rate * flop / 1e9,
    )


def least_cosine(expected: np.ndarray, found: np.ndarray) -> float:
    """Least cosine of rows, float32 (N, E)."""
    return float((unit(expected) * unit(found)).sum(1).min())


def median_ratio(rates: Sequence[float], others: Sequence[float]) -> float:
    """Median over the rounds of a form's rate over another's of the same round."""
    return statistics.median(rate / other for rate, other in zip(rates, others, strict=True))


def show(forms: Sequence[Form], peak: float) -> None:
    """Print the table."""
    heading = (
        "form",
        "cosine",
        "without mean",
        "items/s",
        "of hf",
        "alone",
        "of hf",
        "CPU ms",
        "GFLOP/s",
        "of a product",
    )
    rows = [
        (
            form.form,
            number(form.cosine, 6),
            number(form.centred_cosine, 6),
            number(form.items_per_s, 1),
            number(form.ratio, 2),
            number(form.alone_items_per_s, 1),
            number(form.alone_ratio, 2),
            number(form.cpu_ms, 1),
            number(form.gflop_per_s, 0),
            number(form.gflop_per_s / peak, 2),
        )
        for form in forms
    ]
    table([heading, *rows])


if __name__ == "__main__":
    main()
