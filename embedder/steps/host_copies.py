"""Copies batches to a GPU and back while the GPU computes, and launches all kernels from one thread.

A stage on a GPU has several calls at once: while one computes, the others' inputs or outputs are copied. Copies go
through pinned memory, the only kind that a GPU accesses by itself, with a separate stream for each direction. One
thread launches all kernels: two would take the interpreter's lock from each other at every operation, and together
reach half the speed of one (`docs/decisions.md`). It never waits, so the next batch's kernels are queued while the GPU
still computes the last one; as one stream computes them all, they share memory for activations.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from shards.activations import Batch
from shards.layouts import Move


class DeviceTimes(NamedTuple):
    """Seconds of a device for a batch, and idle before it, since the previous batch.

    `computed_s` runs from the first kernel to the last. Idle time is split by cause: `waited_input_s`, no input was
    given yet; `waited_copy_s`, the input was being copied; `waited_launch_s`, the first kernel wasn't launched yet.
    `launching_s` and `launching_cpu_s` are those of the thread that launched the kernels.
    """

    computed_s: float
    waited_input_s: float
    waited_copy_s: float
    waited_launch_s: float
    launching_s: float
    launching_cpu_s: float

    def while_compiling(self) -> "DeviceTimes":
        """Count the time of launching as a wait for it: the first kernel came, and the others were compiled."""
        idle_s = min(self.launching_s, self.computed_s)
        return self._replace(computed_s=self.computed_s - idle_s, waited_launch_s=self.waited_launch_s + idle_s)


class Movable(Protocol):
    """Something with tensors in host memory."""

    def move_to(self, move: Move) -> Any:
        """Move the tensors that the device needs."""


Input = TypeVar("Input", bound=Movable)


class OverlappedCopies:
    """Runs a shard on batches in host memory; thread-safe."""

    def __init__(self, device: str, gpu: Any = torch.cuda) -> None:
        """Make the streams and the launching thread; `gpu` has streams and events like `torch.cuda`."""
        self._device, self._gpu = device, gpu
        self._inward, self._outward = gpu.Stream(device), gpu.Stream(device)
        self._launcher = ThreadPoolExecutor(1, "launch")
        self._last_ended: Any = None  # used by the launching thread

    def __call__(self, run: Callable[[Input], Batch], batch: Input) -> tuple[Batch, DeviceTimes]:
        """Copy a batch to the device, run the shard there, and copy the result back to host memory.

        The batch may be changed as soon as this returns. The second result has the seconds of the device.
        """
        asked, arrived = (self._gpu.Event(enable_timing=True) for _ in range(2))
        with self._gpu.stream(self._inward):
            asked.record(self._inward)
            moved = batch.move_to(self._upload)
            arrived.record(self._inward)
        # Don't give it a name: if it fails, its error would reference itself, and with it the tensors of its frames.
        result, events, gone, launching = self._launcher.submit(self._launch, run, moved, arrived).result()
        gone.synchronize()
        return result, DeviceTimes(*_times(asked, arrived, *events), *launching)

    def _launch(
        self, run: Callable[[Input], Batch], moved: Input, arrived: Any
    ) -> tuple[Batch, tuple[Any, ...], Any, tuple[float, float]]:
        """Queue a batch's computation and the copy of its result on their streams; also return its own seconds."""
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        stream = self._gpu.current_stream(self._device)
        stream.wait_event(arrived)
        moved.move_to(self._keep)
        started, ended = (self._gpu.Event(enable_timing=True) for _ in range(2))
        started.record(stream)
        encoded = run(moved)
        ended.record(stream)
        # Queued here: after the next batch's copy, it would wait for that batch's computation.
        with self._gpu.stream(self._outward):
            self._outward.wait_event(ended)
            result = encoded.move_to(self._download)
            gone = self._gpu.Event(blocking=True)  # else the waiting thread keeps a core busy until then
            gone.record(self._outward)
        before, self._last_ended = self._last_ended, ended
        launching = time.perf_counter() - began_s, time.thread_time() - began_cpu_s
        return result, (before, started, ended), gone, launching

    def _keep(self, values: torch.Tensor) -> torch.Tensor:
        """Reuse the memory of an input only after the computing stream is done with it, too."""
        self._keep_for(self._gpu.current_stream(self._device), values)
        return values

    def _upload(self, values: torch.Tensor) -> torch.Tensor:
        pinned = self._pin(values).copy_(values)
        return self._copy(torch.empty_like(pinned, device=self._device), pinned)

    def _download(self, values: torch.Tensor) -> torch.Tensor:
        """Start the copy of a result; the next batch gets its memory only when the copy is done.

        Without that, a result of megabytes is overwritten during the copy: activations between stages became NaN.
        """
        self._keep_for(self._gpu.current_stream(self._device), values)
        return self._copy(self._pin(values), values)

    def _pin(self, like: torch.Tensor) -> torch.Tensor:
        """Return host memory that the device can copy; torch reuses freed memory only after the copy's event."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def _keep_for(self, stream: torch.cuda.Stream, values: torch.Tensor) -> None:
        values.record_stream(stream)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return target.copy_(source, non_blocking=True)


def _times(asked: Any, arrived: Any, before: Any, started: Any, ended: Any) -> tuple[float, float, float, float]:
    """Return a batch's seconds of the device, from its completed events and from the previous batch's end, if any."""
    computed_s = started.elapsed_time(ended) / 1000
    if before is None:
        return computed_s, 0.0, 0.0, 0.0
    asked_s, arrived_s, started_s = (max(0.0, before.elapsed_time(event) / 1000) for event in (asked, arrived, started))
    given_s = min(asked_s, started_s)
    copied_s = min(max(arrived_s, given_s), started_s)
    return computed_s, given_s, copied_s - given_s, started_s - copied_s
