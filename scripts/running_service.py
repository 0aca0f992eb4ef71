"""A query service in a process of its own, and the CPU that it takes with all that it started."""

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import psutil

from harness import EMBEDDER, CommandFailedError, descendants, environment, kill_all

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 120.0  # Ray Serve's replicas end one after the other


class Server:
    """A running service."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, ready_s: float) -> None:
        self.process, self.url, self.ready_s = process, url, ready_s

    @property
    def cpu_s(self) -> float:
        total = 0.0
        for each in [psutil.Process(self.process.pid), *descendants(self.process.pid)]:
            with contextlib.suppress(psutil.Error):
                times = each.cpu_times()
                total += times.user + times.system
        return total

    @property
    def memory_bytes(self) -> int:
        """Memory of its processes, each shared page counted once (PSS)."""
        total = 0
        for each in [psutil.Process(self.process.pid), *descendants(self.process.pid)]:
            with contextlib.suppress(psutil.Error):
                total += each.memory_full_info().pss
        return total


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
        with urlopen(f"{url}/readyz", timeout=5) as answer:
            return answer.status == 200
    except (URLError, OSError):
        return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
