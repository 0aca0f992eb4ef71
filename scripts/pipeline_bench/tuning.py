"""The limit's best batch and thread count, and a loop's best numbers of workers and threads, found by trying.

    python -m pipeline_bench.tuning TASK      # the last line is what was found, as JSON

All in one process, so that libraries are imported once. A trial's rate is that of its later part; the first batches
load kernels. The batch size found for the limit is everybody's but the pipeline's, which chooses its own. Of a
library's checkpoint only the library's own loop is tuned, with its image processor and how far its workers are ahead.
"""

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import run_watched
from pipeline_bench.steady import steady_window
from pipeline_bench.task import Task, read_finished

BATCH_SIZES = (8, 16, 32, 64)
PREFETCHES = (2, 4, 8)
TRIAL_S = 4.0  # of forward passes
LOOP_TRIAL_S = 8.0
MIN_BATCHES = 4
MAX_ITEMS = 4096
NUM_DECODED = 64  # images, to find the faster image processor

Settings = dict[str, Any]
"""Numbers of a `Task` for the limit and for the loop, or for a library's loop, and the items a second of each trial."""


def settings_of(limit: tuple[int, int], loop: tuple[int, int], trials: dict[str, float]) -> Settings:
    batch_size = limit[0]
    return {
        "limit": {"batch_size": batch_size, "num_threads": limit[1], "num_workers": 1},
        "loop": {"batch_size": batch_size, "num_threads": loop[0], "num_workers": loop[1]},
        "trials": trials,
    }


def library_settings(batch_size: int, num_threads: int, num_workers: int, **others: Any) -> Settings:
    """What to run a library's loop with."""
    trials = others.pop("trials", {})
    numbers = {"batch_size": batch_size, "num_threads": num_threads, "num_workers": num_workers} | others
    return {"library": numbers, "trials": trials}


def tuned(task: Task, num_cores: int, folder: Path, timeout_s: float) -> Settings:
    """Look for the best numbers in a process of its own."""
    folder.mkdir(parents=True)
    task = replace(task, out=str(folder), num_threads=num_cores)
    watched = run_watched([sys.executable, "-m", "pipeline_bench.tuning", task.to_json()], folder, timeout_s)
    return json.loads(watched.last_line)


def thread_counts(num_cores: int) -> list[int]:
    """All cores, one core less, half of them."""
    return sorted({num_cores, max(1, num_cores - 1), max(1, num_cores // 2)})


def main() -> None:
    task = Task.from_command_line()
    print(json.dumps(tune_library(task) if task.checkpoint else tune_plain(task)))


def tune_plain(task: Task) -> Settings:
    """Find the best numbers of the limit and of the loop, on `num_threads` cores."""
    from pipeline_bench.plain import run_loop

    limits = limit_trials(task, task.num_threads)
    limit = max(limits, key=limits.__getitem__)
    loops = loop_trials(replace(task, batch_size=limit[0]), task.num_threads, limits[limit], run_loop)
    named = {f"limit, batch {batch}, {threads} threads": rate for (batch, threads), rate in limits.items()}
    named |= {f"loop, {threads} threads, {workers} workers": rate for (threads, workers), rate in loops.items()}
    return settings_of(limit, max(loops, key=loops.__getitem__), named)


def tune_library(task: Task) -> Settings:
    """Find the best numbers of a library's loop, on `num_threads` cores, one after the other."""
    import torch

    from pipeline_bench.library import LibraryPairs, collator, embed_batch, load_model, run_loop

    torch.set_num_threads(1)  # as `DataLoader` has it in its workers
    named: dict[str, float] = {}
    images = task.images()[: min(task.num_distinct, NUM_DECODED)]
    backends = {}
    for backend in ("pil", "torchvision"):
        pairs = LibraryPairs(replace(task, backend=backend), images)
        pairs[0]
        begun_s = time.perf_counter()
        rows = [pairs[number] for number in range(len(images))]
        backends[backend] = named[f"decoding, {backend}"] = len(rows) / (time.perf_counter() - begun_s)
    task = replace(task, backend=max(backends, key=backends.__getitem__))

    model, collate = load_model(task), collator(task)
    batches = {size: collate(list(itertools.islice(itertools.cycle(rows), size)))[1] for size in BATCH_SIZES}
    forwards = forward_trials(lambda size: embed_batch(model, batches[size]), task.num_threads)
    named |= {f"forward, batch {batch}, {threads} threads": rate for (batch, threads), rate in forwards.items()}
    batch_size, _ = best = max(forwards, key=forwards.__getitem__)

    loops = loop_trials(replace(task, batch_size=batch_size), task.num_threads, forwards[best], run_loop)
    named |= {f"loop, {threads} threads, {workers} workers": rate for (threads, workers), rate in loops.items()}
    threads, workers = chosen = max(loops, key=loops.__getitem__)
    task = replace(task, batch_size=batch_size, num_threads=threads, num_workers=workers)
    ahead = {task.prefetch: loops[chosen]}
    for prefetch in PREFETCHES:
        if prefetch not in ahead:
            ahead[prefetch] = loop_rate(replace(task, prefetch=prefetch), loops[chosen], run_loop)
            named[f"loop, {prefetch} batches ahead"] = ahead[prefetch]
    prefetch = max(ahead, key=ahead.__getitem__)
    return library_settings(batch_size, threads, workers, prefetch=prefetch, backend=task.backend, trials=named)


def limit_trials(task: Task, num_cores: int) -> dict[tuple[int, int], float]:
    """Items a second of forward passes alone, by batch size and thread count."""
    from pipeline_bench.plain import as_batch, decoded, embed_batch, load_whole

    pairs = decoded(task, min(task.num_distinct, 2 * max(BATCH_SIZES)))
    model, endless = load_whole(task.model, task.dtype, num_cores), itertools.cycle(pairs)
    return forward_trials(
        lambda batch_size: embed_batch(model, as_batch(list(itertools.islice(endless, batch_size)))), num_cores
    )


def forward_trials(embed: Callable[[int], object], num_cores: int) -> dict[tuple[int, int], float]:
    """Items a second of forward passes, by batch size and thread count."""
    import torch

    rates: dict[tuple[int, int], float] = {}
    for batch_size, threads in itertools.product(BATCH_SIZES, thread_counts(num_cores)):
        torch.set_num_threads(threads)
        begun_s, done = 0.0, -1  # the first batch loads kernels and does not count
        while done < MIN_BATCHES or time.perf_counter() - begun_s < TRIAL_S:
            embed(batch_size)
            done += 1
            begun_s = begun_s or time.perf_counter()
        rates[batch_size, threads] = done * batch_size / (time.perf_counter() - begun_s)
    return rates


def loop_trials(
    task: Task, num_cores: int, limit_rate: float, run_loop: Callable[[Task, list[Path]], None]
) -> dict[tuple[int, int], float]:
    """Items a second of a loop, by threads and workers."""
    worker_counts = sorted({1, max(1, num_cores // 2), num_cores})
    return {
        (threads, workers): loop_rate(replace(task, num_threads=threads, num_workers=workers), limit_rate, run_loop)
        for threads, workers in itertools.product(thread_counts(num_cores), worker_counts)
    }


def loop_rate(task: Task, limit_rate: float, run_loop: Callable[[Task, list[Path]], None]) -> float:
    """Items a second of a loop; 0 where it ended in one batch."""
    num_items = max(MIN_BATCHES * 2 * task.batch_size, min(MAX_ITEMS, int(LOOP_TRIAL_S * limit_rate)))
    images = list(itertools.islice(itertools.cycle(task.images()), num_items))
    with tempfile.TemporaryDirectory(dir=task.out) as out:
        run_loop(replace(task, out=out), images)
        window = steady_window(read_finished(Path(out)))
    return window.items_per_s if window else 0.0


if __name__ == "__main__":
    main()
