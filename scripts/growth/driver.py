"""What the driver of a run holds over time: captions through a model of next to no work, by the command itself."""

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from corpus import make_model, write_config
from harness import EMBEDDER, MIB, environment, kill_all, show
from pipeline_bench.steady import read_calls

VISION = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 1, "num_heads": 2}
TEXT = {"embedding_size": 16, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
LOOK_EVERY_S = 0.1
FIRST_SHARE = 10  # the driver's memory at a tenth of all items is compared with that at the end
COLUMNS = {
    "items": "{num_items:,}",
    "engine": "{engine}",
    "items/s": "{rate:,.0f}",
    "MiB at a tenth": "{early_mib:,.1f}",
    "MiB at the end": "{late_mib:,.1f}",
    "growth, MiB": "{growth_mib:,.1f}",
    "to publish, s": "{publish_s:,.1f}",
    "peak MiB": "{peak_mib:,.0f}",
}


def measure_driver(root: Path, num_items: int, engine: str, timeout_s: float) -> dict[str, Any]:
    """Embed captions in one run, and look at the memory of its driver.

    Returns:
        Items a second between a tenth of all items and all; the resident memory of the driver around these two
        moments (medians); the seconds from the last item's end to that of the command, and the peak of all looks.
    """
    root.mkdir(parents=True)
    model = make_model(root / "model", VISION, TEXT | {"intermediate_size": 32})
    source = root / "captions.parquet"
    ids = [f"item-{number:09d}" for number in range(num_items)]
    pq.write_table(pa.table({"id": ids, "caption": ["a picture"] * num_items}), source)
    config = write_config(root / "run.toml", model, root / "store", source, engine=engine, num_stages=1)
    with config.open("a") as file:
        file.write('[source.columns]\nid = "id"\ncaption = "caption"\n[index]\nbuild = false\n')
    looks, stopped_s = watch([*EMBEDDER, "embed", "--config", str(config), "--json"], root, timeout_s)
    writes = [call for call in read_calls(root / "store") if call["step"] == "write"]
    ends = sorted((call["started_s"] + call["wall_s"], call["num_rows"]) for call in writes)
    times_s, done = np.array([at_s for at_s, _ in ends]), np.cumsum([number for _, number in ends])
    early_s = float(times_s[np.searchsorted(done, num_items / FIRST_SHARE)])
    late_s = float(times_s[-1])
    early, late = (around(looks, at_s) for at_s in (early_s, late_s))
    return {
        "num_items": num_items,
        "engine": engine,
        "rate": (1 - 1 / FIRST_SHARE) * num_items / max(late_s - early_s, 1e-9),
        "early_bytes": early,
        "late_bytes": late,
        "publish_s": stopped_s - late_s,
        "peak_bytes": max(size for _, size in looks),
    }


def watch(command: Sequence[str], root: Path, timeout_s: float) -> tuple[list[tuple[float, int]], float]:
    """Run a command; give the resident bytes of its own process over Unix time, and the time of its end."""
    from harness import CommandFailedError

    looks: list[tuple[float, int]] = []
    with (root / "printed.txt").open("w") as printed:
        process = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT, env=environment())
        seen = psutil.Process(process.pid)
        began_s = time.time()
        while process.poll() is None and time.time() - began_s < timeout_s:
            try:
                looks.append((time.time(), seen.memory_info().rss))
            except psutil.NoSuchProcess:
                break
            time.sleep(LOOK_EVERY_S)
    if process.poll() is None and time.time() - began_s >= timeout_s:
        kill_all([*seen.children(recursive=True), seen])
    if process.wait() != 0:
        raise CommandFailedError(f"{' '.join(command)}: {(root / 'printed.txt').read_text()[-2000:]}")
    return [look for look in looks if look[1]], time.time()


def around(looks: Sequence[tuple[float, int]], at_s: float) -> int:
    """Median of what was seen up to half a second before a moment and after it, or the nearest look."""
    near = [size for seen_s, size in looks if abs(seen_s - at_s) <= 0.5]
    return int(np.median(near)) if near else min(looks, key=lambda look: abs(look[0] - at_s))[1]


def show_driver(taken: Sequence[dict[str, Any]]) -> None:
    """Print one line for each run."""
    show(
        [
            row
            | {name: row[f"{name[:-4]}_bytes"] / MIB for name in ("early_mib", "late_mib", "peak_mib")}
            | {"growth_mib": (row["late_bytes"] - row["early_bytes"]) / MIB}
            for row in taken
        ],
        COLUMNS,
    )
