"""The limit's best batch and thread count, and the loop's best numbers of workers and threads, found by trying.

    python -m pipeline_bench.tuning TASK      # the last line is what was found, as JSON

All in one process, so that libraries are imported once. A trial's rate is that of its later part; the first batches
load kernels. The batch size found for the limit is everybody's but the pipeline's, which chooses its own.
"""

import itertools
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import run_watched
from pipeline_bench.steady import steady_window
from pipeline_bench.task import Task, read_finished

BATCH_SIZES = (8, 16, 32, 64)
TRIAL_S = 4.0  # of forward passes
LOOP_TRIAL_S = 8.0
MIN_BATCHES = 4
MAX_ITEMS = 4096

Settings = dict[str, Any]
"""Numbers of a `Task` for the limit and for the loop, and the items a second of each trial."""


def settings_of(limit: tuple[int, int], loop: tuple[int, int], trials: dict[str, float]) -> Settings:
    """What to run with.

    Args:
        limit: batch size and threads.
        loop: threads and workers; its batch size is the limit's.
        trials: items a second by what was tried.
    """
    batch_size = limit[0]
    return {
        "limit": {"batch_size": batch_size, "num_threads": limit[1], "num_workers": 1},
        "loop": {"batch_size": batch_size, "num_threads": loop[0], "num_workers": loop[1]},
        "trials": trials,
    }


def tuned(task: Task, num_cores: int, folder: Path, timeout_s: float) -> Settings:
    """Look for the best numbers in a process of its own.

    Args:
        task: model and items.
        num_cores: of this machine.
        folder: to make.
        timeout_s: of the search.
    """
    folder.mkdir(parents=True)
    task = replace(task, out=str(folder), num_threads=num_cores)
    watched = run_watched([sys.executable, "-m", "pipeline_bench.tuning", task.to_json()], folder, timeout_s)
    return json.loads(watched.last_line)


def thread_counts(num_cores: int) -> list[int]:
    """All cores, one core less, half of them."""
    return sorted({num_cores, max(1, num_cores - 1), max(1, num_cores // 2)})


def main() -> None:
    task = Task.from_command_line()
    limits = limit_trials(task, task.num_threads)
    limit = max(limits, key=limits.__getitem__)
    loops = loop_trials(replace(task, batch_size=limit[0]), task.num_threads, limits[limit])
    named = {f"limit, batch {batch}, {threads} threads": rate for (batch, threads), rate in limits.items()}
    named |= {f"loop, {threads} threads, {workers} workers": rate for (threads, workers), rate in loops.items()}
    print(json.dumps(settings_of(limit, max(loops, key=loops.__getitem__), named)))


def limit_trials(task: Task, num_cores: int) -> dict[tuple[int, int], float]:
    """Items a second of forward passes alone, by batch size and thread count."""
    import torch

    from pipeline_bench.plain import as_batch, decoded, embed_batch, load_whole

    pairs = decoded(task, min(task.num_distinct, 2 * max(BATCH_SIZES)))
    model = load_whole(task.model, task.dtype, num_cores)
    rates: dict[tuple[int, int], float] = {}
    for batch_size, threads in itertools.product(BATCH_SIZES, thread_counts(num_cores)):
        torch.set_num_threads(threads)
        endless = itertools.cycle(pairs)
        begun_s, done = 0.0, -1  # the first batch loads kernels and does not count
        while done < MIN_BATCHES or time.perf_counter() - begun_s < TRIAL_S:
            embed_batch(model, as_batch(list(itertools.islice(endless, batch_size))))
            done += 1
            begun_s = begun_s or time.perf_counter()
        rates[batch_size, threads] = done * batch_size / (time.perf_counter() - begun_s)
    return rates


def loop_trials(task: Task, num_cores: int, limit_rate: float) -> dict[tuple[int, int], float]:
    """Items a second of the loop by hand, by threads and workers.

    Args:
        task: model, items and batch size.
        num_cores: of this machine.
        limit_rate: items a second of forward passes alone, which give the length of a trial.
    """
    from pipeline_bench.plain import run_loop

    num_items = max(MIN_BATCHES * 2 * task.batch_size, min(MAX_ITEMS, int(LOOP_TRIAL_S * limit_rate)))
    images = list(itertools.islice(itertools.cycle(task.images()), num_items))
    rates: dict[tuple[int, int], float] = {}
    for threads, workers in itertools.product(thread_counts(num_cores), sorted({1, max(1, num_cores // 2), num_cores})):
        with tempfile.TemporaryDirectory(dir=task.out) as out:
            run_loop(replace(task, out=out, num_threads=threads, num_workers=workers), images)
            window = steady_window(read_finished(Path(out)))
        rates[threads, workers] = window.items_per_s if window else 0.0
    return rates


if __name__ == "__main__":
    main()
