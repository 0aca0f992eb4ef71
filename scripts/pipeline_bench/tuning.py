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
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pipeline_bench.steady import steady_window
from pipeline_bench.task import Task, read_finished
from pipeline_bench.watch import run_watched

BATCH_SIZES = (8, 16, 32, 64)
TRIAL_S = 4.0  # of forward passes
LOOP_TRIAL_S = 8.0
MIN_BATCHES = 4
MAX_ITEMS = 4096


@dataclass(frozen=True)
class Choice:
    """Numbers to run with."""

    batch_size: int
    num_threads: int
    num_workers: int = 1


@dataclass(frozen=True)
class Settings:
    """What was found best."""

    limit: Choice
    loop: Choice
    trials: Mapping[str, float]


def untuned(num_cores: int, batch_size: int) -> Settings:
    """Plausible numbers, where there is no time to look for better ones."""
    return Settings(Choice(batch_size, num_cores), Choice(batch_size, num_cores, num_cores), {})


def tuned(task: Task, num_cores: int, folder: Path, timeout_s: float) -> Settings:
    """Look for the best numbers in a process of its own."""
    folder.mkdir(parents=True)
    task = replace(task, out=str(folder), num_threads=num_cores)
    watched = run_watched([sys.executable, "-m", "pipeline_bench.tuning", task.to_json()], folder, timeout_s)
    found = json.loads(watched.last_line)
    return Settings(Choice(**found["limit"]), Choice(**found["loop"]), found["trials"])


def thread_counts(num_cores: int) -> list[int]:
    """All cores, one core less, half of them."""
    return sorted({num_cores, max(1, num_cores - 1), max(1, num_cores // 2)})


def main() -> None:
    task = Task.from_command_line()
    limits = limit_trials(task, task.num_threads)
    batch_size, num_threads = max(limits, key=limits.__getitem__)
    loops = loop_trials(replace(task, batch_size=batch_size), task.num_threads, limits[batch_size, num_threads])
    loop_threads, num_workers = max(loops, key=loops.__getitem__)
    named = {f"limit, batch {batch}, {threads} threads": rate for (batch, threads), rate in limits.items()}
    named |= {f"loop, {threads} threads, {workers} workers": rate for (threads, workers), rate in loops.items()}
    settings = Settings(Choice(batch_size, num_threads), Choice(batch_size, loop_threads, num_workers), named)
    print(json.dumps(asdict(settings)))


def limit_trials(task: Task, num_cores: int) -> dict[tuple[int, int], float]:
    """Items a second of forward passes alone, by batch size and thread count."""
    import torch

    from pipeline_bench.limit import decoded
    from pipeline_bench.plain import as_batch, embed_batch, load_whole

    pairs = decoded(replace(task, num_distinct=min(task.num_distinct, 2 * max(BATCH_SIZES))))
    model = load_whole(task.model, task.dtype, num_cores)
    rates: dict[tuple[int, int], float] = {}
    for batch_size, threads in itertools.product(BATCH_SIZES, thread_counts(num_cores)):
        torch.set_num_threads(threads)
        batches = itertools.cycle(as_batch(some) for some in whole_batches(pairs, batch_size))
        embed_batch(model, next(batches))
        begun_s, done = time.perf_counter(), 0
        while done < MIN_BATCHES or time.perf_counter() - begun_s < TRIAL_S:
            embed_batch(model, next(batches))
            done += 1
        rates[batch_size, threads] = done * batch_size / (time.perf_counter() - begun_s)
    return rates


def whole_batches(pairs: list, batch_size: int) -> Iterable[list]:
    """Batches of exactly so many pairs, which begin anew where there are too few."""
    enough = list(itertools.islice(itertools.cycle(pairs), max(len(pairs), batch_size)))
    return [enough[start : start + batch_size] for start in range(0, len(enough) - batch_size + 1, batch_size)]


def loop_trials(task: Task, num_cores: int, limit_rate: float) -> dict[tuple[int, int], float]:
    """Items a second of the loop by hand, by threads and workers."""
    from pipeline_bench.loop import embed_all

    pictures = task.pictures()
    num_items = max(MIN_BATCHES * 2 * task.batch_size, min(MAX_ITEMS, int(LOOP_TRIAL_S * limit_rate)))
    pictures = list(itertools.islice(itertools.cycle(pictures), num_items))
    rates: dict[tuple[int, int], float] = {}
    for threads, workers in itertools.product(thread_counts(num_cores), sorted({1, max(1, num_cores // 2), num_cores})):
        with tempfile.TemporaryDirectory(dir=task.out) as out:
            embed_all(replace(task, out=out, num_threads=threads, num_workers=workers), pictures)
            window = steady_window(read_finished(Path(out)))
        rates[threads, workers] = window.items_per_s if window else 0.0
    return rates


if __name__ == "__main__":
    main()
