"""Runs one contestant in a process of its own, and watches what its processes take of cores and memory."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from embedder.engine.cpu_use import CpuUse
from embedder.engine.monitor import PeakMemory

INTERVAL_S = 0.5
SCRIPTS = Path(__file__).parents[1]


class ContestantFailed(Exception):
    """A contestant's process ended with an error, or took too long."""


@dataclass(frozen=True)
class Watched:
    """One process with all that it started.

    Attributes:
        pid: its process id.
        started_s: Unix time of its start.
        wall_s: from its start to its end.
        cpu_use: CPU seconds over time.
        peak_bytes: memory, each shared page counted once (PSS).
        last_line: of its standard output.
    """

    pid: int
    started_s: float
    wall_s: float
    cpu_use: CpuUse
    peak_bytes: int
    last_line: str


def run_watched(
    command: Sequence[str], folder: Path, timeout_s: float, peak_memory: PeakMemory | None = None
) -> Watched:
    """Run a command to its end; what it prints stands in the folder.

    Args:
        command: the command line.
        folder: exists.
        timeout_s: after which it is ended, with all that it started.
        peak_memory: what looks at the memory, where more than its peak is asked for.

    Raises:
        ContestantFailed: it took too long, or failed; with the end of what it said.
    """
    out, err = folder / "stdout.txt", folder / "stderr.txt"
    started_s = time.time()
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=environment(), start_new_session=True)
        with _Watch(process.pid, peak_memory or PeakMemory()) as watch:
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                code = None
                _end(process)
    wall_s = time.time() - started_s
    if code != 0:
        how = f"took longer than {timeout_s:.0f} s" if code is None else f"ended with exit code {code}"
        raise ContestantFailed(f"{' '.join(command)[:300]}\n{how}: {err.read_text()[-2000:]}")
    last_line = out.read_text().rstrip().rpartition("\n")[2]
    return Watched(process.pid, started_s, wall_s, watch.cpu_use, watch.peak_memory.num_bytes, last_line)


def environment() -> dict[str, str]:
    """This process's, with the benchmark's parts and this checkout on Python's path."""
    path = [str(SCRIPTS), str(SCRIPTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "DO_NOT_TRACK": "1", "DAFT_PROGRESS_BAR": "0"}
    return os.environ | quiet | {"PYTHONPATH": os.pathsep.join(path), "TOKENIZERS_PARALLELISM": "false"}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and everything that it started."""
    everyone = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for each in everyone:
        try:
            each.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    process.wait()


class _Watch:
    """A thread that looks at a process and its descendants between entering and leaving the block."""

    def __init__(self, pid: int, peak_memory: PeakMemory) -> None:
        self.peak_memory = peak_memory
        self.cpu_use = CpuUse()
        self._process = psutil.Process(pid)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> "_Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            try:
                everyone = [self._process, *self._process.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            self.cpu_use.look(everyone)
            self.peak_memory.look(everyone)
