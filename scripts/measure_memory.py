"""Peak memory does not grow with the number of items: embeds N and 5 N pictures on Ray and compares.

    python scripts/measure_memory.py [N]           # N = 2000: about four minutes on two cores

What is compared is the proportional set size (PSS) of all processes: the command, Ray's daemons, decode workers with
their children, three stages; each shared page counted once. It is bounded by the processes themselves (three times
torch, about 0.7 GiB each) and by what Ray lets wait between the steps. The last line is one JSON document.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from shipped_pictures import read_shipped

PACKAGE = Path(__file__).parents[1] / "embedder"
GROWTH = 5


def main() -> None:
    num_items = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    with tempfile.TemporaryDirectory(prefix="measure-memory-") as root:
        peaks = {count: measure(Path(root) / str(count), count) for count in (num_items, GROWTH * num_items)}
    for count, report in peaks.items():
        mib = report["peak_memory_bytes"] / 2**20
        print(f"{count:7,} items: peak {mib:,.0f} MiB, {report['items_per_s']:.0f} items/s")
    small, large = (report["peak_memory_bytes"] for report in peaks.values())
    print(json.dumps({"num_items": list(peaks), "peak_memory_bytes": [small, large], "ratio": round(large / small, 3)}))


def measure(folder: Path, num_items: int) -> dict:
    """Embed so many pictures with the command, on Ray; gives its report."""
    write_pictures(folder / "pictures", num_items)
    command = [sys.executable, "-m", "embedder", "embed", folder / "pictures", "--model", PACKAGE / "demo_model"]
    options = ["--store", folder / "store", "--engine", "ray", "--json"]
    done = subprocess.run([*command, *options], check=True, capture_output=True, text=True, timeout=3000)
    return json.loads(done.stdout.splitlines()[-1])


def write_pictures(folder: Path, num_items: int) -> None:
    """Write the shipped emoji again and again under new names."""
    folder.mkdir(parents=True)
    pictures, _ = read_shipped()
    for number in range(num_items):
        (folder / f"{number:06d}.png").write_bytes(pictures[number % len(pictures)])


if __name__ == "__main__":
    main()
