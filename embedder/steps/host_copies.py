"""Copies of a batch to a GPU and back that run beside what the GPU computes.

A stage on a GPU has two calls at once: while one computes, the other's input comes or its output goes. Both copies go
through pinned memory, the only one that a GPU reads and writes by itself, each on a stream of its own. One call
computes at a time, so the activations of one batch are on the device. Unmeasured on a GPU: `scripts/bench_gpu.py`.
"""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from shards.activations import Batch, TowerState


class OverlappedCopies:
    """Runner of a shard on batches in host memory; several threads may use it at once."""

    def __init__(self, device: str, gpu: Any = torch.cuda) -> None:
        """Make the streams.

        Args:
            device: torch device of the shard.
            gpu: streams and events as `torch.cuda` has them.
        """
        self._device, self._gpu = device, gpu
        self._inward, self._outward = gpu.Stream(device), gpu.Stream(device)
        self._computing = threading.Lock()

    def __call__(self, run: Callable[[Batch], Batch], batch: Batch) -> tuple[Batch, float]:
        """Copy a batch to the device, run the shard, and copy the result back.

        Args:
            run: the shard; a batch on the device in, another out.
            batch: a batch in host memory; it may change as soon as this returns.

        Returns:
            The result in host memory, and the seconds that the device computed on it.
        """
        with self._gpu.stream(self._inward):
            moved = _with_values(batch, self._upload)
            arrived = self._inward.record_event()
        with self._computing:
            stream = self._gpu.current_stream(self._device)
            stream.wait_event(arrived)
            for values in _values(moved):
                self._keep_for(stream, values)
            started, ended = (self._gpu.Event(enable_timing=True) for _ in range(2))
            started.record(stream)
            encoded = run(moved)
            ended.record(stream)
            # Put in place here: behind the next call's copy, it would wait for that call's computation.
            with self._gpu.stream(self._outward):
                self._outward.wait_event(ended)
                result = _with_values(encoded, self._download)
                gone = self._outward.record_event()
        gone.synchronize()
        return result, started.elapsed_time(ended) / 1000

    def _upload(self, values: torch.Tensor) -> torch.Tensor:
        pinned = self._pinned(values).copy_(values)
        return self._copy(torch.empty_like(pinned, device=self._device), pinned)

    def _download(self, values: torch.Tensor) -> torch.Tensor:
        return self._copy(self._pinned(values), values)

    def _pinned(self, like: torch.Tensor) -> torch.Tensor:
        """Host memory that the device can copy; torch keeps what is freed, and gives it out after the copy's event."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def _keep_for(self, stream: torch.cuda.Stream, values: torch.Tensor) -> None:
        """Let the memory of a stream's tensor go to its next copy only when another stream is done with it, too."""
        values.record_stream(stream)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Begin a copy on the current stream."""
        return target.copy_(source, non_blocking=True)


def _values(batch: Batch) -> list[torch.Tensor]:
    return [state.values for state in (batch.vision, batch.text) if state is not None]


def _with_values(batch: Batch, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    def changed(state: TowerState | None) -> TowerState | None:
        return None if state is None else replace(state, values=change(state.values))

    return Batch(changed(batch.vision), changed(batch.text))
