"""What a night costs: a refresh without a change, one with touched files, one with 1 % changed, over N images.

    python scripts/measure_refresh.py [N [MODEL]]   # 10000 with the shipped model: ten minutes on two cores

Each refresh runs in its own process. What bounds a night without a change is listing the source and comparing it
with `items`; touched files are read and hashed besides. Checked on the way: a night without a change leaves all files
of the store as they are; 1 % changed embeds exactly those rows, and all others keep vector and run. The last line is
one JSON document, with seconds on the clock and of CPU; `start_s` is what `embedder --help` needs, and part of each.
"""

import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

import embedder
from corpus import DEMO_MODEL, encode
from harness import EMBEDDER, environment

LIMIT_S = 10.0
PER_FOLDER = 1000


def main() -> None:
    num_items = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    model = Path(sys.argv[2]).absolute() if len(sys.argv) > 2 else DEMO_MODEL
    with tempfile.TemporaryDirectory(prefix="measure-refresh-") as name:
        print(json.dumps(measure(Path(name), num_items, model)))


def measure(root: Path, num_items: int, model: Path) -> dict:
    """Run the nights one after another; gives their seconds, on the clock (`_s`) and of CPU (`_cpu_s`)."""
    source, config = root / "images", root / "nightly.toml"
    paths = write_images(source, num_items)
    settings = f'model = "{model}"\nstore = "{root / "store"}"\nengine = "local"'  # the CPU of Ray's isn't seen here
    config.write_text(f'{settings}\n[[source]]\npath = "{source}"\n')
    taken = {"start": take("--help")[0]}
    taken["first"], _ = refresh(config)
    subprocess.run([*EMBEDDER, "index", "build", "--store", root / "store"], check=True)
    before, rows = digests(root / "store"), rows_of(root / "store")

    taken["idle"], idle = refresh(config)
    check(idle["outcome"] == "nothing to do", "a night without a change finds nothing to do")
    check(digests(root / "store") == before, "a night without a change leaves the store as it is")
    idle_s = taken["idle"]["wall_s"] - taken["start"]["wall_s"]
    check(idle_s < LIMIT_S, f"a night without a change takes less than {LIMIT_S:g} s after start-up")

    changed = paths[::100]
    for number, path in enumerate(changed):
        path.write_bytes(image(num_items + number))
    taken["changed"], report = refresh(config)
    after = rows_of(root / "store")
    names = {str(path.relative_to(source)) for path in changed}
    check({key for key, row in after.items() if row["run_id"] == report["run_id"]} == names, "those and no others")
    check(all(after[key] == rows[key] for key in rows if key not in names), "all others keep vector and run")

    for path in paths:
        os.utime(path, (1, 1))
    taken["touched"], report = refresh(config)
    check((report["num_equal"], report["num_vectors"]) == (num_items, 0), "touched files see no model")
    check(rows_of(root / "store") == after, "touched files keep vector and run")
    seconds = {f"{night}_s": round(took["wall_s"], 2) for night, took in taken.items()}
    cpu = {f"{night}_cpu_s": round(took["cpu_s"], 2) for night, took in taken.items()}
    return {"num_items": num_items, "num_changed": len(changed), **seconds, **cpu}


def refresh(config: Path) -> tuple[dict[str, float], dict]:
    took, last_line = take("refresh", str(config), "--json")
    report = json.loads(last_line)
    print(f"{took['wall_s']:7.2f} s  {report['outcome']}; {report['reasons']}", flush=True)
    return took, report


def take(*arguments: str) -> tuple[dict[str, float], str]:
    """Run a command of the product, and ask the kernel what it took; gives the last line that it prints, too."""
    before, started_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([*EMBEDDER, *arguments], check=True, stdout=subprocess.PIPE, text=True, env=environment())
    wall_s, after = time.perf_counter() - started_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return {"wall_s": wall_s, "cpu_s": cpu_s}, done.stdout.rstrip().rpartition("\n")[2]


def write_images(folder: Path, num_items: int) -> list[Path]:
    """Small images, a thousand a folder; gives their paths in the order of the listing."""
    paths = [folder / f"{number // PER_FOLDER:04d}" / f"{number:07d}.png" for number in range(num_items)]
    for number, path in enumerate(paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image(number))
    return paths


def image(seed: int) -> bytes:
    """Four colours that no other seed has, of 32 pixels; the model scales it."""
    pixels = np.random.default_rng(seed).integers(0, 256, (2, 2, 3), np.uint8)
    return encode(Image.fromarray(np.kron(pixels, np.ones((16, 16, 1), np.uint8))))


def digests(store: Path) -> dict[str, str]:
    """All files that readers and later runs look at, by content."""
    looked_at = (path for path in store.rglob("*") if path.is_file() and path.name not in (".lock", "runs.jsonl"))
    return {str(path.relative_to(store)): hashlib.sha256(path.read_bytes()).hexdigest() for path in looked_at}


def rows_of(store: Path) -> dict[str, dict]:
    return {row["item_id"]: row for row in embedder.open_store(store).to_arrow().to_pylist()}


def check(holds: bool, promise: str) -> None:
    if not holds:
        sys.exit(f"measure_refresh: it does not hold that {promise}")


if __name__ == "__main__":
    main()
