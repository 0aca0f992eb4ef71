"""What the scripts share: commands that are run and watched, what their processes take, and tables.

Imports of this project only how it measures CPU and memory itself, so that both are counted alike.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from embedder.executors.monitor import CpuUse, PeakMemory

SCRIPTS = Path(__file__).parent
EMBEDDER = (sys.executable, "-m", "embedder")
INTERVAL_S = 0.5
MIB, GIB = 1 << 20, 1 << 30


class CommandFailedError(Exception):
    """A command ended with an error, took too long, or did not find what there is."""


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
    command: Sequence[str | Path],
    folder: Path,
    timeout_s: float,
    *,
    peak_memory: PeakMemory | None = None,
    checkout: Path | None = None,
) -> Watched:
    """Run a command to its end, and watch the cores and the memory that its processes take.

    Args:
        command: the command line.
        folder: what the command prints goes into files there.
        timeout_s: after which it is ended, with all that it started.
        peak_memory: reader of the memory, where more than its peak is asked for.
        checkout: in which it runs, by the code that is there; by default the scripts' own code, from here.

    Raises:
        CommandFailedError: it took too long, or failed; with the end of its messages.
    """
    out, err = folder / "stdout.txt", folder / "stderr.txt"
    cpu_use, peak_memory, ended = CpuUse(), peak_memory or PeakMemory(), threading.Event()
    started_s = time.time()
    with out.open("w") as stdout, err.open("w") as stderr:
        output = {"stdout": stdout, "stderr": stderr}
        process = subprocess.Popen(command, **output, cwd=checkout, env=environment(checkout), start_new_session=True)
    root = psutil.Process(process.pid)

    def look() -> None:
        while not ended.wait(INTERVAL_S):
            everyone = [root, *descendants(process.pid)]
            cpu_use.look(everyone)
            peak_memory.look(everyone)

    watcher = threading.Thread(target=look, name="watch", daemon=True)
    watcher.start()
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        code = None
        kill_all([*descendants(process.pid), root])
        process.wait()
    finally:
        ended.set()
        watcher.join()
    wall_s = time.time() - started_s
    if code != 0:
        how = f"took longer than {timeout_s:.0f} s" if code is None else f"ended with exit code {code}"
        raise CommandFailedError(f"{' '.join(map(str, command))[:300]}\n{how}: {err.read_text()[-2000:]}")
    last_line = out.read_text().rstrip().rpartition("\n")[2]
    return Watched(process.pid, started_s, wall_s, cpu_use, peak_memory.num_bytes, last_line)


def json_of(command: Sequence[str | Path], timeout_s: float | None = None) -> dict:
    """Run a command that has to succeed; gives the JSON of the last line that it prints."""
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=timeout_s, env=environment())
    return json.loads(done.stdout.splitlines()[-1])


def environment(checkout: Path | None = None) -> dict[str, str]:
    """This process's variables, with the scripts and a checkout on Python's path, by default their own."""
    path = [str(SCRIPTS), str(checkout or SCRIPTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "DO_NOT_TRACK": "1", "DAFT_PROGRESS_BAR": "0"}
    return os.environ | quiet | {"PYTHONPATH": os.pathsep.join(path), "TOKENIZERS_PARALLELISM": "false"}


def descendants(pid: int) -> list[psutil.Process]:
    """All processes that a process has started, directly or not; none once it has ended."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def title(process: psutil.Process) -> str:
    """The command line of a process, or the title that Ray gave it; empty once it has ended."""
    try:
        return " ".join(process.cmdline()).strip()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """End processes at once; those that have ended are left out."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def peak_rss_bytes(pid: int) -> int:
    """The most memory that a process has held so far (resident set size, of the kernel); 0 once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)


def table(rows: Sequence[Sequence[object]]) -> None:
    """Print rows, the first as a heading, in columns."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    sys.stdout.flush()


def show(records: Iterable[Mapping[str, object]], columns: Mapping[str, str]) -> None:
    """Print a table of records; a column is a heading and how it is made of a record's values (`str.format`)."""
    table([list(columns), *([form.format_map(record) for form in columns.values()] for record in records)])


def number(value: float | None, digits: int) -> str:
    """A figure in a table; a dash where there is none."""
    return "-" if value is None else f"{value:,.{digits}f}"
