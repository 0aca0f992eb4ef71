"""Time and memory of each step, carried by the rows so that they are saved with the results."""

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyarrow as pa

from embedder.batch_schema import TRACE, Measurement

_MAXRSS_UNIT = 1024 if sys.platform == "linux" else 1
LOAD = "load"  # followed by the stage's number: the start of a stage, with the import of its libraries


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
