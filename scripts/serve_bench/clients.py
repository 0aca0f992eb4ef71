"""Clients of a query service in one process, which ask different texts: the times of their answers, as JSON.

    python -m serve_bench.clients URL NUM_CLIENTS SECONDS FIRST_TEXT           # each asks again once it is answered
    python -m serve_bench.clients URL NUM_CLIENTS SECONDS FIRST_TEXT RATE      # so many a second, whatever the answers

At a rate, a query's time counts from when it was due, so that a service that stalls is charged for all that waits.
Answers are not parsed: the clients share the cores with the service.
"""

import itertools
import json
import sys
import threading
import time
from http.client import HTTPConnection
from urllib.parse import urlsplit

import numpy as np

from serve_bench.stores import Texts

K = 10


class Clients:
    """Threads with a connection each, and what they found."""

    def __init__(self, url: str, seconds: float, first_text: int, rate: float | None) -> None:
        self.times_ms: list[float] = []
        self.errors: list[str] = []
        self._address, self._texts = urlsplit(url), Texts()
        self._numbers, self._first_text, self._rate = itertools.count(), first_text, rate
        self._began_s = time.perf_counter()
        self._stop_s = self._began_s + seconds

    def run(self) -> None:
        """Ask one query after another until the time is over."""
        connection = HTTPConnection(self._address.hostname or "", self._address.port, timeout=60)
        while True:
            number = next(self._numbers)
            began_s = time.perf_counter() if self._rate is None else self._began_s + number / self._rate
            if began_s >= self._stop_s:
                break
            time.sleep(max(began_s - time.perf_counter(), 0))
            body = {"queries": [{"text": self._texts[self._first_text + number]}], "k": K}
            try:
                connection.request("POST", "/search", json.dumps(body), {"Content-Type": "application/json"})
                answer = connection.getresponse()
                content = answer.read()
            except OSError as error:
                connection.close()
                self.errors.append(f"{type(error).__name__}: {error}")
                continue
            if answer.status == 200 and b'"hits":[{' in content:
                self.times_ms.append(1e3 * (time.perf_counter() - began_s))
            else:
                self.errors.append(f"{answer.status}: {content[:200]!r}")
        connection.close()


def main(url: str, num_clients: int, seconds: float, first_text: int, rate: float | None) -> dict:
    clients = Clients(url, seconds, first_text, rate)
    threads = [threading.Thread(target=clients.run) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    times_ms = clients.times_ms or [float("nan")]
    return {
        "num_answered": len(clients.times_ms),
        "num_errors": len(clients.errors),
        "errors": clients.errors[:3],
        "queries_per_s": len(clients.times_ms) / seconds,
        "p50_ms": float(np.percentile(times_ms, 50)),
        "p99_ms": float(np.percentile(times_ms, 99)),
    }


if __name__ == "__main__":
    url, num_clients, seconds, first_text, *rate = sys.argv[1:]
    sys.setswitchinterval(0.0005)  # a thread that has its answer notes the time at once
    found = main(url, int(num_clients), float(seconds), int(first_text), float(rate[0]) if rate else None)
    print(json.dumps(found))
