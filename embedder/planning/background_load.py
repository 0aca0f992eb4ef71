"""Background load as in a run: other processes compute during a measurement."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

CORES_S = 1.5  # many times the 0.1 s in which a quota of CPU time is counted

# Matrix products whose operands exceed a core's own cache, as those of layers do; ends with the parent process.
PROGRAM = """
import sys, threading
import numpy as np
threading.Thread(target=lambda: (sys.stdin.read(), __import__("os")._exit(0)), daemon=True).start()
x, w = np.ones((1024, 256), np.float32), np.ones((256, 1024), np.float32)
x @ w
print("busy", flush=True)
while True:
    (x @ w) @ w.T
"""


@contextmanager
def busy_machine(num_processes: int) -> Iterator[None]:
    """Keep processes computing, one thread each, until the block ends.

    In a run each core serves several processes, which evict one another's data from its caches: small layers take a
    tenth more CPU seconds than on an idle machine, decoding a third. So CPU-time measurements are made under such load.
    """
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    command = [sys.executable, "-c", PROGRAM]
    processes = [
        subprocess.Popen(command, env=os.environ | one_thread, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(num_processes)
    ]
    try:
        for process in processes:
            if process.stdout is not None:
                process.stdout.readline()  # wait until it computes
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def delivered_cores(num_processes: int) -> float:
    """Measure how many cores' time so many busy processes get together: less under a quota, or next to other load."""
    with busy_machine(num_processes):
        before_s, started_s = _children_cpu_s(), time.perf_counter()
        time.sleep(CORES_S)
        return (_children_cpu_s() - before_s) / (time.perf_counter() - started_s)


def _children_cpu_s() -> float:
    times = (child.cpu_times() for child in psutil.Process().children())
    return float(sum(each.user + each.system for each in times))
