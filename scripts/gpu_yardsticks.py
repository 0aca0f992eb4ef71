"""What a user would do by hand on one device, and runs from files next to it: the yardsticks of `bench_gpu.py`.

The model is the library's own class with random weights, of a published configuration. `B` rows, `T` tokens.
"""

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from harness import EMBEDDER, MIB, CommandFailedError, run_watched

BATCHES = (64, 256, 1024)
WARM_CALLS, MIN_CALLS = 2, 4
SHORT_TOKENS = 16
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=utilization.gpu,power.draw", "--format=csv,noheader,nounits", "-l", "1")
WAITS = {cause: f"waited_{cause}_s" for cause in ("input", "driver", "store", "unpack", "copy", "launch")}


@dataclass(frozen=True)
class Library:
    """The library's own two towers on a device."""

    model: Any  # of transformers
    dtype: str
    device: str

    @property
    def num_tokens(self) -> int:
        """Tokens of a caption: all that there are where the model pads each."""
        text = self.model.config.text_config
        return text.max_position_embeddings if text.model_type.startswith("siglip") else SHORT_TOKENS

    def encode(self, pixels: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Vectors of (B, 3, S, S) pixels and of (B, T) token ids; (B, E) each."""
        sides = self.model.get_image_features(pixel_values=pixels), self.model.get_text_features(input_ids=token_ids)
        image, text = (getattr(side, "pooler_output", side) for side in sides)
        return image, text

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def make_library(tree: dict[str, Any], dtype: str, device: str) -> Library:
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.for_model(**tree)
    with torch.device(device):
        model = AutoModel.from_config(config).to(getattr(torch, dtype)).eval()
    return Library(model, dtype, device)


def forward_rates(library: Library, batches: tuple[int, ...], seconds: float) -> dict[str, Any]:
    """Pairs a second of forward passes only, their input on the device: by batch, and compiled at the best of them.

    A batch that the memory doesn't hold is left out; what could not be compiled has no rate.
    """
    rates = {}
    for num_rows in batches:
        with suppress(torch.cuda.OutOfMemoryError):
            rates[num_rows] = _forward_rate(library, library.encode, num_rows, seconds)
    if not rates:
        return {"eager": {}, "best_batch": None, "compiled": None, "not_compiled": "no batch fits the device's memory"}
    best = max(rates, key=rates.__getitem__)
    compiled, problem = None, None
    try:
        compiled = _forward_rate(library, torch.compile(library.encode), best, seconds)
    except Exception as error:  # noqa: BLE001  # whatever the compiler and what it calls raise
        problem = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return {"eager": rates, "best_batch": best, "compiled": compiled, "not_compiled": problem}


def _forward_rate(library: Library, encode: Callable[..., Any], num_rows: int, seconds: float) -> float:
    side = library.model.config.vision_config.image_size
    dtype, device = getattr(torch, library.dtype), library.device
    pixels = torch.randn(num_rows, 3, side, side, device=device, dtype=dtype)
    token_ids = torch.randint(1, 400, (num_rows, library.num_tokens), device=device)

    def forward() -> None:
        with torch.inference_mode():
            encode(pixels, token_ids)
        library.synchronize()

    return num_rows * call_rate(forward, seconds)


def call_rate(call: Callable[[], None], seconds: float) -> float:
    """Calls a second, once the first ones have loaded kernels."""
    for _ in range(WARM_CALLS):
        call()
    number_of, started_s = 0, time.perf_counter()
    while number_of < MIN_CALLS or time.perf_counter() - started_s < seconds:
        call()
        number_of += 1
    return number_of / (time.perf_counter() - started_s)


class Files(Dataset):
    """Pairs of files, decoded when they are asked for, as a careful script does it."""

    def __init__(self, folder: Path, side: int, tokenizer: Path, num_tokens: int) -> None:
        self.images = sorted(path for path in folder.iterdir() if path.suffix != ".txt")
        bicubic = v2.InterpolationMode.BICUBIC
        self.resize = v2.Compose([v2.Resize(side, interpolation=bicubic), v2.CenterCrop(side), v2.PILToTensor()])
        self.tokenizer = Tokenizer.from_file(str(tokenizer))
        self.tokenizer.enable_truncation(num_tokens)
        self.tokenizer.enable_padding(length=num_tokens)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        path = self.images[index]
        with Image.open(path) as image:
            pixels = self.resize(image.convert("RGB"))
        caption = path.with_suffix(".txt").read_text(encoding="utf-8")
        return pixels, torch.tensor(self.tokenizer.encode(caption).ids)


def loop_rate(library: Library, files: Files, batch_size: int, num_workers: int, seconds: float) -> dict[str, float]:
    """Pairs that a loop by hand did until so long after its first batch, their rate then, seconds to it, and in all.

    Workers read ahead while the first batch is computed, which flatters a loop of few batches.
    """
    on_gpu = library.device == "cuda"
    loader = DataLoader(
        files, batch_size=batch_size, num_workers=num_workers, pin_memory=on_gpu,
        prefetch_factor=4 if num_workers else None,
    )  # fmt: skip
    started_s, marks, vectors = time.perf_counter(), [], []
    with torch.inference_mode():
        for pixels, token_ids in loader:
            moved = pixels.to(library.device, non_blocking=True).float().div_(127.5).sub_(1)
            asked = token_ids.to(library.device, non_blocking=True)
            pair = library.encode(moved.to(getattr(torch, library.dtype)), asked)
            vectors.append([torch.nn.functional.normalize(side.float(), dim=-1).cpu() for side in pair])
            marks.append((time.perf_counter() - started_s, len(pixels)))
            if len(marks) > 1 and marks[-1][0] - marks[0][0] >= seconds:
                break
    first_s, whole_s = marks[0][0], marks[-1][0]
    later = sum(number_of for _, number_of in marks[1:])
    rate = later / (whole_s - first_s) if later else None
    return {"rows_per_s": rate, "num_rows": marks[0][1] + later, "first_s": first_s, "whole_s": whole_s}


@contextmanager
def gpu_samples(device: str) -> Iterator[list[tuple[float, float]]]:
    """Percents busy and watts of the first GPU, once a second; none on a CPU, or where its driver's tool is missing."""
    samples: list[tuple[float, float]] = []
    if device != "cuda" or shutil.which(NVIDIA_SMI[0]) is None:
        yield samples
        return
    process = subprocess.Popen((*NVIDIA_SMI, "-i", "0"), stdout=subprocess.PIPE, text=True)
    try:
        yield samples
    finally:
        process.terminate()
        lines, _ = process.communicate()
        for line in lines.splitlines():
            with suppress(ValueError):
                busy, watts = map(float, line.split(","))
                samples.append((busy, watts))


def run_from_files(
    model: Path, items: Path, out: Path, num_stages: int, *, dtype: str, device: str, compile_: bool, timeout_s: float
) -> dict[str, Any]:
    """Embed a folder of pairs with the command line; rates are pairs a second, the steady one and with start-up.

    Idle shares are of the time from a stage's first batch on, by cause and mean of the stages; what the driver said is
    of the time after the start. A run that fails or takes longer has only `failed`.
    """
    out.mkdir(parents=True)
    settings = {"num_stages": num_stages, "dtype": dtype, "device": device, "compile": str(compile_).lower()}
    options = [text for key, value in settings.items() for text in ("--set", f"{key}={value}")]
    fixed = ["--model", model, "--engine", "ray", "--set", "index.build=false", "--json"]
    command = [*EMBEDDER, "embed", items, "--store", out / "store", *fixed, *options]
    try:
        with gpu_samples(device) as samples:
            watched = run_watched(command, out, timeout_s)
    except CommandFailedError as error:
        return {"failed": str(error)}
    report = json.loads(watched.last_line)
    after = samples[int(report["startup_s"]) :]
    busy, watts = map(mean, zip(*after, strict=True)) if after else (None, None)
    return {
        "rows_per_s": report["steady_items_per_s"] or report["items_per_s"],
        "whole_rows_per_s": report["num_items"] / watched.wall_s, "startup_s": report["startup_s"],
        "bottleneck": report["observed_bottleneck"], "idle": idle_shares(report["steps"]),
        "gpu_busy": None if busy is None else busy / 100, "watts": watts, "peak_mib": watched.peak_bytes / MIB,
    }  # fmt: skip


def idle_shares(steps: list[dict[str, Any]]) -> dict[str, float] | None:
    """Shares of the time by cause, mean of a run's stages; None where none of them was on a GPU."""
    stages = [step for step in steps if step["step"].startswith("stage ") and any(step[key] for key in WAITS.values())]
    if not stages:
        return None
    whole_s = [stage["wall_s"] + sum(stage[key] for key in WAITS.values()) for stage in stages]
    timed = list(zip(stages, whole_s, strict=True))
    return {cause: mean(stage[key] / seconds for stage, seconds in timed) for cause, key in WAITS.items()}
