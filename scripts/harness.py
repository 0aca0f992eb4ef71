"""What the scripts share: commands and services that are run and watched, what their processes take, and tables.

Imports of this project only how it measures CPU and memory itself, so that both are counted alike, and its threads.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import urllib3

from embedder.executors.monitor import CpuUse, PeakMemory
from embedder.store.environment import RepeatingThread

SCRIPTS = Path(__file__).parent
EMBEDDER = (sys.executable, "-m", "embedder")
INTERVAL_S = 0.5
MIB = 1 << 20
HTTP = urllib3.PoolManager(maxsize=64, retries=False)


class CommandFailedError(Exception):
    """A command ended with an error, took too long, or did not find what there is."""


@dataclass(frozen=True)
class Watched:
    """One process with all that it started."""

    started_s: float  # Unix time of its start
    wall_s: float  # from its start to its end
    cpu_use: CpuUse  # CPU seconds over time
    peak_bytes: int  # memory, each shared page counted once (PSS)
    last_line: str  # of its standard output


def run_watched(
    command: Sequence[str | Path], folder: Path, timeout_s: float, *, checkout: Path | None = None
) -> Watched:
    """Run a command to its end, and watch the cores and the memory that its processes take."""
    out, err = folder / "stdout.txt", folder / "stderr.txt"
    cpu_use, peak_memory = CpuUse(), PeakMemory()
    started_s = time.time()
    with out.open("w") as stdout, err.open("w") as stderr:
        output = {"stdout": stdout, "stderr": stderr}
        process = subprocess.Popen(command, **output, cwd=checkout, env=environment(checkout), start_new_session=True)
    root = psutil.Process(process.pid)

    def look() -> bool:
        everyone = [root, *descendants(process.pid)]
        cpu_use.look(everyone)
        peak_memory.look(everyone)
        return True

    watcher = RepeatingThread(INTERVAL_S, look, "watch")
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        code = None
        kill_all([*descendants(process.pid), root])
        process.wait()
    finally:
        watcher.stop()
    wall_s = time.time() - started_s
    if code != 0:
        how = f"took longer than {timeout_s:.0f} s" if code is None else f"ended with exit code {code}"
        raise CommandFailedError(f"{' '.join(map(str, command))[:300]}\n{how}: {err.read_text()[-2000:]}")
    last_line = out.read_text().rstrip().rpartition("\n")[2]
    return Watched(started_s, wall_s, cpu_use, peak_memory.num_bytes, last_line)


def json_of(command: Sequence[str | Path], timeout_s: float, **variables: str) -> dict:
    """Run a command that has to succeed; gives the JSON of the last line that it prints."""
    output = {"capture_output": True, "text": True, "env": environment() | variables}
    try:
        done = subprocess.run(command, check=False, timeout=timeout_s, **output)
    except subprocess.TimeoutExpired as error:
        raise CommandFailedError(f"took longer than {timeout_s:.0f} s") from error
    if done.returncode:
        raise CommandFailedError(done.stderr.strip() or f"ended with exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def environment(checkout: Path | None = None) -> dict[str, str]:
    """This process's variables, with the scripts and a checkout on Python's path, by default their own."""
    path = [str(SCRIPTS), str(checkout or SCRIPTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "DO_NOT_TRACK": "1", "DAFT_PROGRESS_BAR": "0"}
    return os.environ | quiet | {"PYTHONPATH": os.pathsep.join(path), "TOKENIZERS_PARALLELISM": "false"}


def until(happened: Callable[[], bool], what: str, limit_s: float = 300.0) -> None:
    stop_s = time.monotonic() + limit_s
    while not happened():
        if time.monotonic() > stop_s:
            raise CommandFailedError(f"{what}: waited {limit_s:g} s in vain")
        time.sleep(0.02)


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


START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 120.0  # Ray Serve's replicas end one after the other


class Server:
    """A running service."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, ready_s: float) -> None:
        self.process, self.url, self.ready_s = process, url, ready_s

    def _total(self, of: Callable[[psutil.Process], float]) -> float:
        total = 0.0
        for each in [psutil.Process(self.process.pid), *descendants(self.process.pid)]:
            with contextlib.suppress(psutil.Error):
                total += of(each)
        return total

    @property
    def cpu_s(self) -> float:
        """CPU seconds of its processes so far."""
        return self._total(lambda each: sum(each.cpu_times()[:2]))

    @property
    def memory_bytes(self) -> int:
        return int(self._total(lambda each: each.memory_full_info().pss))


@contextmanager
def serving(store: str | Path, log: Path, options: Sequence[str] = ()) -> Iterator[Server]:
    """Start `embedder serve` on a free port of this machine, wait until it is ready, and end it in the end."""
    port = free_port()
    began_s, url = time.perf_counter(), f"http://127.0.0.1:{port}"
    command = [*EMBEDDER, "serve", "--store", str(store), "--port", str(port), *options]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment(), start_new_session=True)
    try:
        while not is_ready(url):
            if process.poll() is not None or time.perf_counter() - began_s > START_TIMEOUT_S:
                raise CommandFailedError(f"{' '.join(command)} is not ready: {log.read_text()[-2000:]}")
            time.sleep(0.02)
        yield Server(process, url, time.perf_counter() - began_s)
    finally:
        started = descendants(process.pid)
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        kill_all(started)


def is_ready(url: str) -> bool:
    try:
        return ask(f"{url}/readyz", timeout_s=5.0)[0] == 200
    except urllib3.exceptions.HTTPError:
        return False


def ask(url: str, body: Mapping[str, object] | None = None, timeout_s: float = 60.0) -> tuple[int, bytes]:
    """Ask a service, and by POST where there is a body; status and content."""
    answer = HTTP.request("GET" if body is None else "POST", url, json=body, timeout=timeout_s)
    return answer.status, answer.data


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
