"""What listing many names and comparing them with a store takes: the commands that do it, each in its own process."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peak_rss import peak_rss_bytes

from growth.names import MODEL, change_names, write_names
from pipeline_bench.watch import environment

CHANGED_EVERY = 100
LOOK_EVERY_S = 0.05
EMBEDDER = (sys.executable, "-m", "embedder")


class WrongAnswer(Exception):
    """A command failed, or did not find what there is."""


@dataclass(frozen=True)
class Taken:
    """What one process took.

    Attributes:
        wall_s: from its start to its end.
        cpu_s: of its threads and of all that it started.
        peak_bytes: the most memory it held (resident set size).
        found: the JSON of its last line, where it prints any.
    """

    wall_s: float
    cpu_s: float
    peak_bytes: int
    found: dict[str, Any]


def measure_names(root: Path, num_names: int) -> dict[str, Taken]:
    """List names that are all new, publish them, list them unchanged, and with 1 % changed.

    Raises:
        WrongAnswer: a command failed, or did not find what there is.
    """
    source, store, config = root / "names", root / "store", root / "nightly.toml"
    write_names(source, num_names)
    config.write_text(f'model = "{MODEL}"\nstore = "{store}"\n[[source]]\npath = "{source}"\n')
    refresh = [*EMBEDDER, "refresh", str(config), "--json"]
    taken = {"all new, --dry-run": take([*refresh, "--dry-run"])}
    check(to_embed(taken["all new, --dry-run"]) == {"new": num_names}, "all names are new")
    taken["publish"] = take([sys.executable, "-m", "growth.names", str(source), str(store)])
    taken["unchanged"] = take(refresh)
    check(taken["unchanged"].found["num_unchanged"] == num_names, "nothing has changed")
    num_changed = change_names(source, CHANGED_EVERY)
    taken["1 % changed, --dry-run"] = take([*refresh, "--dry-run"])
    check(to_embed(taken["1 % changed, --dry-run"]) == {"content changed": num_changed}, "one in a hundred has changed")
    return taken


def take(command: Sequence[str]) -> Taken:
    """Run a command to its end, and ask the kernel what it took.

    Raises:
        WrongAnswer: it failed.
    """
    started_s, peak_bytes = time.perf_counter(), 0
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(command, stdout=printed, text=True, env=environment())
        while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
            # What `wait4` tells is no less than the memory of this process, of which that one is a copy at first.
            peak_bytes = max(peak_bytes, peak_rss_bytes(process.pid))
            time.sleep(LOOK_EVERY_S)
        wall_s = time.perf_counter() - started_s
        process.returncode = os.waitstatus_to_exitcode(ended[1])
        check(process.returncode == 0, f"{' '.join(command)} succeeds")
        printed.seek(0)
        last_line = printed.read().rstrip().rpartition("\n")[2]
    found = json.loads(last_line) if last_line.startswith("{") else {}
    return Taken(wall_s, ended[2].ru_utime + ended[2].ru_stime, peak_bytes, found)


def to_embed(taken: Taken) -> dict[str, int]:
    """How many items a dry run would embed, by reason."""
    return {each["reason"]: each["num_items"] for each in taken.found["reasons"]}


def check(holds: bool, promise: str) -> None:
    """End with what does not hold."""
    if not holds:
        raise WrongAnswer(f"it does not hold that {promise}")
