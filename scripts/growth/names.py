"""What listing many names and comparing them with a store takes: the commands that do it, each in its own process.

The store has all names published, although no model ever saw them (`growth.made_up`).
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from corpus import DEMO_MODEL, write_config
from harness import EMBEDDER, MIB, CommandFailedError, environment, peak_rss_bytes, show

PER_FOLDER = 1000
CONTENT = b"\0"
CHANGED_CONTENT = b"\0\0"  # of another size, whatever the clock says
CHANGED_EVERY = 100
LOOK_EVERY_S = 0.05
COLUMNS = {
    "names": "{num_names:,}",
    "what": "{what}",
    "wall s": "{wall_s:,.1f}",
    "CPU s": "{cpu_s:,.1f}",
    "CPU us/name": "{us:,.1f}",
    "peak MiB": "{mib:,.0f}",
}


def measure_names(root: Path, num_names: int) -> list[dict[str, Any]]:
    """List files that are all new, make the store of them, list them unchanged, and with 1 % changed.

    Returns:
        What each command took: wall and CPU seconds, and the most memory that it held (resident set size).
    """
    source = root / "names"
    write_names(source, num_names)
    config = write_config(root / "nightly.toml", DEMO_MODEL, root / "store", source, index={"build": False})
    refresh = [*EMBEDDER, "refresh", str(config), "--json"]
    taken = []

    def run(what: str, command: Sequence[str]) -> dict[str, Any]:
        figures, found = take(command)
        taken.append({"num_names": num_names, "what": what, **figures})
        return found

    check(to_embed(run("all new, --dry-run", [*refresh, "--dry-run"])) == {"new": num_names}, "all names are new")
    run("make the store", [sys.executable, "-m", "growth.made_up", "make", str(config)])
    check(run("unchanged", refresh)["num_unchanged"] == num_names, "nothing has changed")
    num_changed = change_names(source, CHANGED_EVERY)
    found = run("1 % changed, --dry-run", [*refresh, "--dry-run"])
    check(to_embed(found) == {"content changed": num_changed}, "one in a hundred has changed")
    return taken


def write_names(folder: Path, num_names: int) -> None:
    """Write names, a thousand a folder; those of one folder are links to one file, which costs next to no room."""
    for start in range(0, num_names, PER_FOLDER):
        inside = folder / f"{start // PER_FOLDER:05d}"
        inside.mkdir(parents=True)
        first, *others = (f"{inside}/{number:08d}.png" for number in range(start, min(start + PER_FOLDER, num_names)))
        Path(first).write_bytes(CONTENT)
        for name in others:
            os.link(first, name)


def change_names(folder: Path, every: int) -> int:
    """Give every `every`-th name a file of its own with another content; returns how many there are."""
    names = (path for inside in sorted(folder.iterdir()) for path in sorted(inside.iterdir()))
    changed = list(islice(names, 0, None, every))
    for path in changed:
        path.unlink()
        path.write_bytes(CHANGED_CONTENT)
    return len(changed)


def take(command: Sequence[str], variables: Mapping[str, str] | None = None) -> tuple[dict[str, float], dict[str, Any]]:
    """Run a command to its end, and ask the kernel what it took; gives the JSON of its last line, too."""
    before_s, started_s, peak_bytes = children_cpu_s(), time.perf_counter(), 0
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(command, stdout=printed, text=True, env=environment() | dict(variables or {}))
        while process.poll() is None:
            # `ru_maxrss` is no less than the memory of this process, of which that one is a copy at first.
            peak_bytes = max(peak_bytes, peak_rss_bytes(process.pid))
            time.sleep(LOOK_EVERY_S)
        wall_s = time.perf_counter() - started_s
        check(process.returncode == 0, f"{' '.join(command)} succeeds")
        printed.seek(0)
        last_line = printed.read().rstrip().rpartition("\n")[2]
    found = json.loads(last_line) if last_line.startswith("{") else {}
    return {"wall_s": wall_s, "cpu_s": children_cpu_s() - before_s, "peak_bytes": peak_bytes}, found


def children_cpu_s() -> float:
    """CPU seconds of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def to_embed(found: dict[str, Any]) -> dict[str, int]:
    """How many items a dry run would embed, by reason."""
    return {each["reason"]: each["num_items"] for each in found["reasons"]}


def check(holds: bool, promise: str) -> None:
    """End with what does not hold."""
    if not holds:
        raise CommandFailedError(f"it does not hold that {promise}")


def show_names(taken: Sequence[dict[str, Any]]) -> None:
    """Print one line for each command over each number of names."""
    rows = [row | {"us": 1e6 * row["cpu_s"] / row["num_names"], "mib": row["peak_bytes"] / MIB} for row in taken]
    show(rows, COLUMNS)
