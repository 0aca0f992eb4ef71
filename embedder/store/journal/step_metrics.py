"""Time and memory of each step, carried by the rows so that they are saved with the results."""

import os
import platform
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pyarrow as pa

from embedder.batch_schema import TRACE

_MAXRSS_UNIT = 1024 if sys.platform == "linux" else 1
LOAD = "load"  # followed by the stage's number: the start of a stage, with the import of its libraries


@dataclass
class Measurement:
    """Measurement of one call of one step; filled in when the call ends."""

    step: str
    node: str = field(default_factory=platform.node)
    pid: int = field(default_factory=os.getpid)
    started_s: float = 0.0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    num_rows: int = 0
    num_images: int = 0
    num_captions: int = 0
    num_tokens: int = 0
    num_cut_captions: int = 0
    """Captions beyond a model's limit; set by decode, like the next."""
    num_cut_characters: int = 0
    """Characters of them that no tower sees."""
    caption_places: Counter[str] = field(default_factory=Counter)
    """Captions by the place where they were found; set by decode, like the next."""
    num_frames: int = 0
    """Embedded video frames; set by decode, like the next."""
    num_decoded_frames: int = 0
    """Video frames that were decoded for those."""
    bytes_out: int = 0
    peak_rss_bytes: int = 0
    peak_gpu_bytes: int = 0
    waited_input_s: float = 0.0
    """Seconds before the call in which a GPU computed nothing because the step before had no input for it yet."""
    waited_driver_s: float = 0.0
    """The same, while Ray's driver had not sent the input to the stage's process."""
    waited_store_s: float = 0.0
    """The same, while it came from the object store."""
    waited_unpack_s: float = 0.0
    """The same, while it was unpacked and grouped."""
    waited_copy_s: float = 0.0
    """The same, while the input was being copied to the GPU."""
    waited_launch_s: float = 0.0
    """The same, until the first kernel was launched."""
    device_speed: dict[str, float] = field(default_factory=dict)
    """Figures of the stage's GPU (`shards.planning.planning_costs.DeviceSpeed`); of a stage's start."""
    note: str = ""
    """Line for the report, of what a process of Ray's can say to nobody else."""
    num_calls: int = 1
    """More than one if this sums several calls of a process (`embedder.report.step_sums.join_measurements`)."""

    def __post_init__(self) -> None:
        """Read what rows and journals have as pairs."""
        self.caption_places = Counter(dict(self.caption_places or ()))
        self.device_speed = dict(self.device_speed or ())
        self.note = self.note or ""


@contextmanager
def measure(step: str, cpu_clock: Callable[[], float] = time.process_time) -> Iterator[Measurement]:
    """Measure the block; the caller sets the counts.

    `step` is decode, stage 0, stage 1, ..., or write. `cpu_clock` gives CPU seconds of all threads and processes of the
    step.
    """
    measurement = Measurement(step, started_s=time.time())
    wall_s, cpu_s = time.perf_counter(), cpu_clock()
    yield measurement
    measurement.wall_s = time.perf_counter() - wall_s
    measurement.cpu_s = cpu_clock() - cpu_s
    measurement.peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT


def trace_column(
    num_rows: int, measurement: Measurement, earlier: pa.ChunkedArray | None = None, load: Measurement | None = None
) -> pa.Array:
    """Build a trace column: the first row holds the batch's measurements so far, the others null."""
    steps = [step for steps in earlier.drop_null().to_pylist() for step in steps] if earlier is not None else []
    steps += [vars(each) for each in (load, measurement) if each is not None]
    first = pa.array([steps], TRACE)
    return pa.concat_arrays([first, pa.nulls(num_rows - 1, TRACE)])
