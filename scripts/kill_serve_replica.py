"""Two replicas of a query service behind Ray Serve's proxy, one of them killed under load: what failed.

    python scripts/kill_serve_replica.py STORE [NUM_REQUESTS [NUM_CLIENTS]]     # 2000 by 8 clients

Half of the clients ask each request once, half by `embedder.connect`, which asks again what was lost. Only what was at
the replica when it was killed may fail, and only for the first half. The last line is one JSON document.
"""

import itertools
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

import psutil

import embedder
from harness import descendants, title
from serve_bench.server import Server, serving
from serve_bench.stores import Texts

REPLICA = "ServeReplica"  # in the title that Ray gives a replica's process
K = 5
RAY = ("--ray", "--replicas", "2", "--max-replicas", "2")


@dataclass
class Found:
    """What the clients found."""

    answered: list[float] = field(default_factory=list)  # when those began that were answered
    # failed: of those that were asked once, when they began and why
    failed: list[tuple[float, str]] = field(default_factory=list)
    failed_for_good: list[str] = field(default_factory=list)  # of those that `embedder.connect` asked again
    is_over: bool = False  # whether the clients end

    @property
    def number(self) -> int:
        """How many requests there were."""
        return len(self.answered) + len(self.failed) + len(self.failed_for_good)


def main() -> None:
    store = sys.argv[1]
    num_requests = int(sys.argv[2]) if len(sys.argv) > 2 else 2000
    num_clients = int(sys.argv[3]) if len(sys.argv) > 3 else 8
    with tempfile.TemporaryDirectory(prefix="kill-serve-replica-") as folder:
        found = kill_one(store, Path(folder), num_requests, num_clients)
    print(json.dumps(found))
    sys.exit(1 if found["failed_for_good"] or found["failed_after_the_kill"] or not found["killed"] else 0)


def kill_one(store: str, folder: Path, num_requests: int, num_clients: int) -> dict:
    """Ask, kill a replica when half of the requests are answered, and ask on."""
    with serving(store, folder / "serve.log", RAY) as server:
        until(lambda: len(replicas_of(server)) >= 2)
        found, numbers = Found(), itertools.count()
        kinds = itertools.cycle((ask_once, ask_again))
        threads = [
            threading.Thread(target=next(kinds), args=(server.url, found, numbers)) for _ in range(max(num_clients, 2))
        ]
        for thread in threads:
            thread.start()
        try:
            until(lambda: found.number >= num_requests / 2)
            replicas = replicas_of(server)
            killed_s = time.monotonic()
            replicas[0].kill()
            until(lambda: found.number >= num_requests)
            until(lambda: len(replicas_of(server)) == len(replicas))
        finally:
            found.is_over = True
            for thread in threads:
                thread.join()
    late = [why for began_s, why in found.failed if began_s > killed_s]
    for line in [*late[:5], *found.failed_for_good[:5], *(why for _, why in found.failed[:2])]:
        print(line, file=sys.stderr)
    return {
        "requests": found.number,
        "clients": len(threads),
        "replicas": len(replicas),
        "killed": len(replicas) > 1,
        "failed_in_flight": len(found.failed) - len(late),
        "failed_after_the_kill": len(late),
        "failed_for_good": len(found.failed_for_good),
    }


def replicas_of(server: Server) -> list[psutil.Process]:
    """Processes of the replicas."""
    return [each for each in descendants(server.process.pid) if REPLICA in title(each)]


def ask_once(url: str, found: Found, numbers: "itertools.count[int]") -> None:
    """Ask one text after another; what fails has failed."""
    address, texts = urlsplit(url), Texts()
    connection = HTTPConnection(address.hostname or "", address.port, timeout=60)
    while not found.is_over:
        body = json.dumps({"queries": [{"text": texts[next(numbers)]}], "k": K})
        began_s = time.monotonic()
        try:
            connection.request("POST", "/search", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, HTTPException) as error:
            connection.close()
            found.failed.append((began_s, f"{type(error).__name__}: {error}"))
            continue
        if answer.status == 200:
            found.answered.append(began_s)
        else:
            found.failed.append((began_s, f"{answer.status}: {content[:300]!r}"))
    connection.close()


def ask_again(url: str, found: Found, numbers: "itertools.count[int]") -> None:
    """Ask one text after another by the Python client."""
    texts = Texts()
    with embedder.connect(url) as remote:
        while not found.is_over:
            began_s = time.monotonic()
            try:
                remote.search(texts[next(numbers)], K)
            except ValueError as error:
                found.failed_for_good.append(f"{type(error).__name__}: {error}")
            else:
                found.answered.append(began_s)


def until(happened: Callable[[], bool], limit_s: float = 180.0) -> None:
    """Wait for something."""
    stop_s = time.monotonic() + limit_s
    while not happened():
        if time.monotonic() > stop_s:
            sys.exit(f"kill_serve_replica: waited {limit_s:g} s in vain")
        time.sleep(0.02)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of each replica: two share this machine's cores
    main()
