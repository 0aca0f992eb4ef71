"""What comparing a Parquet listing with a store of as many items takes, and publishing what changed.

The rows are captions, so that a row's own text says whether it has changed. No model sees them (`growth.made_up`). Each
command runs in a process of its own, which is all that is running.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from corpus import DEMO_MODEL, write_config
from growth.names import take
from harness import EMBEDDER, MIB, CommandFailedError, show

ROWS_PER_FILE = 500_000
CHANGED_EVERY, GONE_EVERY = 100, 200  # 1 %, and 0.5 %
PATTERNS = ("scattered", "the same again", "clustered")
SEEN = ("seen once", "seen again", "seen a third time")
COLUMNS = {
    "names": "{num_names:,}",
    "what": "{what}",
    "wall s": "{wall_s:,.1f}",
    "CPU s": "{cpu_s:,.1f}",
    "CPU s/million": "{per_million:,.1f}",
    "peak MiB": "{mib:,.0f}",
    "MiB written": "{written_mib:,.1f}",
    "of those changed": "{changed_mib:,.2f}",
}


def measure_comparison(root: Path, num_names: int) -> list[dict[str, Any]]:
    """Compare names with a store that has them, when a part of them has changed, and publish that.

    Returns:
        What each command took: wall and CPU seconds, the most memory that it held (resident set size), the bytes of
        part files that it wrote, and those that the changed rows alone would have.
    """
    source, store = root / "names", root / "store"
    root.mkdir()
    settings = {"max_retire_fraction": 0.1, "index": {"build": False}}
    config = write_config(root / "nightly.toml", DEMO_MODEL, store, source, **settings)
    with config.open("a") as file:
        file.write('[source.columns]\nid = "id"\ncaption = "caption"\n')
    own = (sys.executable, "-m", "growth.made_up")
    taken: list[dict[str, Any]] = []

    def run(what: str, *command: str, num_changed: int = 0) -> dict[str, Any]:
        before = part_files(store)
        figures, found = take([*command, str(config), *(["--json"] if command[0] == EMBEDDER[0] else [])])
        written = {path: size for path, size in part_files(store).items() if path not in before}
        row_bytes = sum(before.values()) / max(num_names, 1)
        figures |= {"written_bytes": sum(written.values()), "changed_bytes": num_changed * row_bytes}
        taken.append({"num_names": num_names, "what": what, **figures})
        print(f"{num_names:,} names: {what}: {figures['cpu_s']:.1f} s of CPU", flush=True)
        return found

    def expect(found: dict[str, Any], **wanted: object) -> None:
        different = {key: found.get(key) for key, value in wanted.items() if found.get(key) != value}
        if different:
            raise CommandFailedError(f"{taken[-1]['what']}: found {different}, and there are {wanted}")

    write_listing(source, num_names)
    run("make the store", *own, "make")
    expect(run("idle night", *EMBEDDER, "refresh"), outcome="nothing to do", num_unchanged=num_names)
    before, there = choose(num_names, "")
    for pattern in PATTERNS:
        now, left = choose(num_names, pattern)
        write_listing(source, num_names, pattern)
        gone = int((there & ~left).sum())
        reasons = {"content changed": int(((now != before) & left & there).sum()), "new": int((left & ~there).sum())}
        reasons = {reason: number for reason, number in reasons.items() if number}
        found = run(f"{pattern}, --dry-run", *EMBEDDER, "refresh", "--dry-run")
        if {each["reason"]: each["num_items"] for each in found["reasons"]} != reasons or found["num_retired"] != gone:
            raise CommandFailedError(f"{pattern}: the dry run finds {found}, and there are {reasons}, {gone} gone")
        found = run(f"{pattern}, published", *own, "refresh", num_changed=sum(reasons.values()) + gone)
        expect(found, reasons=reasons, num_retired=gone, published=True)
        before, there = now, left
    return taken


def choose(num_names: int, pattern: str) -> tuple[np.ndarray, np.ndarray]:
    """Choose the captions of the names, by their place in `SEEN`, and the names that stay; uint8 and bool (N,)."""
    numbers, first = np.arange(num_names), max(num_names // CHANGED_EVERY, 1)
    if pattern in ("scattered", "the same again"):
        seen = np.where(numbers % CHANGED_EVERY == 1, 1 if pattern == "scattered" else 2, 0)
        return seen.astype(np.uint8), numbers % GONE_EVERY != 0
    if pattern == "clustered":
        seen = np.where((numbers > 0) & (numbers <= first), 1, np.where(numbers % CHANGED_EVERY == 1, 2, 0))
        is_last = numbers >= num_names - num_names // GONE_EVERY
        return seen.astype(np.uint8), (numbers % GONE_EVERY != 0) & ~is_last
    return np.zeros(num_names, np.uint8), numbers >= 0


def write_listing(folder: Path, num_names: int, pattern: str = "") -> None:
    """Write the names with their captions, without those that are gone."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    now, left = choose(num_names, pattern)
    for start in range(0, num_names, ROWS_PER_FILE):
        numbers = np.arange(start, min(start + ROWS_PER_FILE, num_names))[left[start : start + ROWS_PER_FILE]]
        seen = pa.array(SEEN).take(pa.array(now[numbers]))
        captions = pc.binary_join_element_wise("picture", pa.array(numbers).cast(pa.string()), seen, " ")
        pq.write_table(pa.table({"id": ids_of(numbers), "caption": captions}), folder / f"{start:012d}.parquet")


def ids_of(numbers: np.ndarray) -> pa.Array:
    """Ids of names, whose order is not the order of the names: hashes and UUIDs are usual."""
    parts = ((numbers * 2_654_435_761) % (1 << 32), 10), (numbers, 9)
    return pc.binary_join_element_wise(
        *(pc.utf8_lpad(pa.array(each).cast(pa.string()), width, "0") for each, width in parts), "-"
    )


def part_files(store: Path) -> dict[Path, int]:
    """Part files of both tables, with their bytes."""
    return {path: path.stat().st_size for name in ("items", "embeddings") for path in (store / name).glob("*.parquet")}


def show_comparison(taken: list[dict[str, Any]]) -> None:
    """Print one line for each command over each number of names."""
    rows = [
        row
        | {"per_million": 1e6 * row["cpu_s"] / row["num_names"], "mib": row["peak_bytes"] / MIB}
        | {"written_mib": row["written_bytes"] / MIB, "changed_mib": row["changed_bytes"] / MIB}
        for row in taken
    ]
    show(rows, COLUMNS)
