"""Timing of a piece of computation: seconds and workspace bytes on this machine's device; needs torch.

A replica of one thread is measured by its own CPU clock, which other processes hardly affect.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shards.compat import silent_stderr

# Calls and seconds per part (a tower's embeddings, one of its layers, its head); their median counts.
MAX_CALLS, MIN_CALLS = 15, 5
PART_S = 0.5
# A batch that takes longer than this is measured with fewer inputs, which use the device as well.
LONG_CALL_S = 0.1
COPY_BYTES = 16 << 20  # beyond the caches, as activations in the object store are

# Runs a part on the first n inputs of a batch.
Step = Callable[[int], torch.Tensor]


@dataclass(frozen=True)
class TimingSetting:
    """Conditions of a measurement.

    Attributes:
        dtype: compute dtype of embeddings and layers.
        device: torch device.
        num_threads: torch threads of one replica.
        num_rows: inputs of one batch.
        caption_tokens: tokens of one caption.
    """

    dtype: str = "float32"
    device: str = "cpu"
    num_threads: int = 1
    num_rows: int = 32
    caption_tokens: int = 16

    @property
    def device_name(self) -> str:
        """Name for `ModelCosts.device`: torch's name of a GPU, or the CPU with its threads."""
        return f"cpu x{self.num_threads}" if self.device == "cpu" else torch.cuda.get_device_name(self.device)


@dataclass(frozen=True)
class TimedPart:
    """Costs of a part for one input."""

    seconds: float
    workspace_bytes: int


def measure_copy() -> float:
    """Measure the seconds per byte of a copy in memory: the least that a transfer between processes takes."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8)
    target = torch.ones(COPY_BYTES, dtype=torch.uint8)
    return _median_s(lambda: target.copy_(source), time.perf_counter) / COPY_BYTES


def measure_part(run: Step, setting: TimingSetting) -> TimedPart:
    """Time one part by whole batches, and measure the memory that it allocates beside its output.

    Args:
        run: the part.
        setting: conditions of the measurement.
    """
    clock = clock_of(setting.device, setting.num_threads)
    with torch.inference_mode():
        num_rows = _fitting_rows(run, setting)
        workspace_bytes = _workspace_bytes(run, num_rows, setting.device)
        seconds = _median_s(lambda: _finish(run, num_rows, setting.device), clock)
    return TimedPart(seconds / num_rows, workspace_bytes // num_rows)


def has_own_clock(device: str, num_threads: int) -> bool:
    """Whether a computation runs in one thread, so that the thread's CPU clock measures it."""
    return device == "cpu" and num_threads == 1


def clock_of(device: str, num_threads: int) -> Callable[[], float]:
    """Choose the clock of a computation: the thread's own, which other processes don't affect, or wall time."""
    return time.thread_time if has_own_clock(device, num_threads) else time.perf_counter


def _fitting_rows(run: Step, setting: TimingSetting) -> int:
    """Number of inputs whose batch takes about `LONG_CALL_S`: with whole batches a large model would take minutes."""
    num_rows = 1
    _finish(run, num_rows, setting.device)  # the first call of all loads kernels
    while True:
        started_s = time.perf_counter()
        _finish(run, num_rows, setting.device)
        if num_rows == setting.num_rows or time.perf_counter() - started_s > LONG_CALL_S / 2:
            return num_rows
        num_rows = min(2 * num_rows, setting.num_rows)


def _finish(run: Step, num_rows: int, device: str) -> None:
    run(num_rows)
    if device != "cpu":
        torch.cuda.synchronize(device)


def _median_s(call: Callable[[], object], clock: Callable[[], float]) -> float:
    """Median seconds of a call, the first one left out."""
    call()
    seconds: list[float] = []
    ends_s = time.perf_counter() + PART_S
    while len(seconds) < MIN_CALLS or (len(seconds) < MAX_CALLS and time.perf_counter() < ends_s):
        started_s = clock()
        call()
        seconds.append(clock() - started_s)
    return statistics.median(seconds)


def _workspace_bytes(run: Step, num_rows: int, device: str) -> int:
    """Peak memory of a call, without its output, which is counted as the activation that leaves."""
    if device != "cpu":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        output_bytes = run(num_rows).nbytes
        return int(max(torch.cuda.max_memory_allocated(device) - before - output_bytes, 0))
    with silent_stderr(), torch.autograd.profiler.profile(use_kineto=False, profile_memory=True) as profile:
        output_bytes = run(num_rows).nbytes
    events = profile.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = peak = 0
    for _, num_bytes in changes:
        held += num_bytes
        peak = max(peak, held)
    return max(peak - output_bytes, 0)
