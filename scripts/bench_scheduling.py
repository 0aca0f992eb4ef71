"""How many calls a second Ray Data's scheduling loop makes, and what that means for a fleet.

    python scripts/bench_scheduling.py                       # one replica, then 25, 50 and 100
    python scripts/bench_scheduling.py --actors 1 --seconds 60 --no-fast-start

Decoding hands on blocks of 64 rows of 192 KiB that it made before, one stage does nothing but sleep 1 ms in a call, and
write tasks count rows. So nothing is computed, and what bounds the calls is Ray: its loop on the driver, and what its
processes take of the machine's cores. Session, callbacks and settings are those of a run.

Calls are counted where the loop sees them finished, for `--seconds` after all replicas were up for `--warm` seconds;
each number of replicas has a Ray of its own. A turn is one of the loop. CPU is told by kind of process, as on few cores
they take it from each other: the driver's bounds a fleet, all others grow with its nodes. The loop's CPU of a turn is
fitted as a + b x replicas + c x calls, over the seconds of all windows, and what follows for 100 nodes of one replica
each is told. Of more than one replica, rows are small, as the loop sees no bytes and one machine would have to copy
those of all.

A replica takes 0.15 GiB, and starting it 3 s of CPU. The last line is one JSON document.
"""

import argparse
import contextlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import ray.data
from ray.data import ActorPoolStrategy, Datasink
from ray.data._internal.execution.execution_callback import ExecutionCallback
from ray.data.block import Block

from embedder.compat import fast_start
from embedder.compat.draining import DrainedError, draining
from embedder.compat.pace import FEWEST_IN_FLIGHT
from embedder.compat.ray_start import replace_attribute
from embedder.executors.ray_session import ray_session, start_ray
from embedder.placement.device_settings import CPU_SETTINGS

KIB = 1 << 10
CALL_S = 0.001
NUM_CPUS = 8  # logical
ACTOR_CPUS = 0.01
DECODE_CPUS = 1.5  # five tasks at a time
BLOCKS_PER_TASK = 4  # of decoding, so that it bounds nothing
WRITE_CPUS = 0.25
PART_ROWS = 512
VECTOR_FLOATS = 256
NUM_NODES = 100
CALLBACKS = "custom_execution_callback_classes"


@dataclass(frozen=True)
class Paced:
    """What one number of replicas did in its window.

    Attributes:
        num_actors: replicas of the stage.
        calls_per_s: finished calls of the stage.
        rows_per_s: rows in them.
        turns_per_call: turns of the loop for each.
        loop_ms_per_call: CPU of the loop's thread.
        loop_ms_per_turn: likewise.
        driver_ms_per_call: CPU of the driver's process, other threads included.
        actors_ms_per_call: CPU of the replicas' processes.
        tasks_ms_per_call: CPU of processes that decode and write.
        ray_ms_per_call: CPU of Ray's own processes.
        in_flight: most calls that one replica could hold unfinished.
        seconds: turns, calls and the loop's CPU seconds of each second.
    """

    num_actors: int
    calls_per_s: float
    rows_per_s: float
    turns_per_call: float
    loop_ms_per_call: float
    loop_ms_per_turn: float
    driver_ms_per_call: float
    actors_ms_per_call: float
    tasks_ms_per_call: float
    ray_ms_per_call: float
    in_flight: int
    seconds: list[tuple[float, float, float]]


class Sleeping:
    """Stage that waits, and hands on one small vector a row."""

    def __init__(self, num_rows: int) -> None:
        self._vectors = pa.table({"vector": [np.zeros(VECTOR_FLOATS, np.float32)] * num_rows})

    def __call__(self, table: pa.Table) -> pa.Table:
        """Sleep."""
        time.sleep(CALL_S)
        return self._vectors.slice(0, table.num_rows)


class Passthrough:
    """Decoding that hands on the same rows again and again."""

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        self.num_rows, self.row_bytes = num_rows, row_bytes
        self._table: pa.Table | None = None

    def __call__(self, listing: pa.Table) -> Iterator[pa.Table]:
        """Yield blocks."""
        if self._table is None:
            pixels = pa.py_buffer(np.zeros(self.num_rows * self.row_bytes, np.uint8))
            column = pa.FixedSizeBinaryArray.from_buffers(pa.binary(self.row_bytes), self.num_rows, [None, pixels])
            self._table = pa.table({"pixels": column})
        for _ in range(BLOCKS_PER_TASK):
            yield self._table


class CountingSink(Datasink[int]):
    """Write tasks that count their rows."""

    def write(self, blocks: Iterable[Block], ctx: Any) -> int:
        """Count."""
        return sum(block.num_rows for block in blocks)

    @property
    def min_rows_per_write(self) -> int:
        """Rows of one task."""
        return PART_ROWS


class Window:
    """Turns of the loop, calls and CPU between two moments; also the request to stop at the second.

    Attributes:
        warm_s: seconds from the first call, with all replicas up, to the first moment.
        seconds: least from there to the second.
        num_calls: least calls that end between them.
    """

    def __init__(self, warm_s: float, seconds: float, num_calls: int = 1) -> None:
        self.warm_s, self.seconds, self.num_calls = warm_s, seconds, num_calls
        self.begin_s: float | None = None
        self.num_turns, self.in_flight = 0, 0
        self.marks: list[dict[str, float]] = []
        self.sums: list[tuple[float, float, float, float]] = []
        self.asked = self.is_overdue = False

    def see(self, executor: Any) -> None:
        """Count one turn of the loop."""
        self.num_turns += 1
        *_, stage, _ = executor._topology
        num_calls = stage.metrics.num_tasks_finished
        pool = stage._actor_pool
        self.in_flight = max(self.in_flight, pool.max_tasks_in_flight_per_actor())
        if self.begin_s is None:
            if num_calls and not pool.num_pending_actors():
                self.begin_s = time.monotonic()
            return
        past_s = time.monotonic() - self.begin_s
        if not self.marks:
            if past_s >= self.warm_s:
                self.marks.append(self._mark(num_calls))
            return
        if not self.sums or time.monotonic() >= self.sums[-1][0] + 1:
            self.sums.append((time.monotonic(), self.num_turns, num_calls, time.thread_time()))
        is_over = past_s >= self.warm_s + self.seconds and num_calls >= self.marks[0]["calls"] + self.num_calls
        if is_over and len(self.marks) == 1:
            self.marks.append(self._mark(num_calls))
            self.asked = self.is_overdue = True

    def _mark(self, num_calls: int) -> dict[str, float]:
        times = {"driver_s": time.process_time(), "actors_s": 0.0, "tasks_s": 0.0, "ray_s": 0.0}
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                name, cpu = " ".join(process.cmdline()[:1]), process.cpu_times()
                times[_kind_of(name)] += cpu.user + cpu.system
        return {
            "at_s": time.monotonic(),
            "calls": num_calls,
            "turns": self.num_turns,
            "loop_s": time.thread_time(),
            **times,
        }


def _kind_of(name: str) -> str:
    if name.startswith("ray::MapWorker"):
        return "actors_s"
    return "tasks_s" if name.startswith("ray::") else "ray_s"


WINDOW: list[Window] = []


class Watching(ExecutionCallback):
    """Callback that counts the loop's turns."""

    def on_execution_step(self, executor: Any) -> None:
        """Count one."""
        WINDOW[-1].see(executor)


def pace(num_actors: int, options: argparse.Namespace) -> Paced:
    """Run the graph with a number of replicas in a Ray of its own.

    Args:
        num_actors: replicas.
        options: of the command.
    """
    start_ray(num_cpus=NUM_CPUS)
    try:
        row_bytes = (options.row_kib if num_actors == 1 else options.law_row_kib) * KIB
        return measure(num_actors, options.calls, options.rows, row_bytes, Window(options.warm, options.seconds))
    finally:
        ray.shutdown()


def measure(num_actors: int, num_calls: int, num_rows: int, row_bytes: int, window: Window) -> Paced:
    """Run the graph on the Ray that is up, until its window is over.

    Args:
        num_actors: replicas of the stage.
        num_calls: blocks that there are.
        num_rows: rows of each.
        row_bytes: bytes of a row.
        window: what is counted.
    """
    WINDOW.append(window)
    with ray_session(None, no_progress_timeout_s=300.0):
        context = ray.data.DataContext.get_current()
        with replace_attribute(context, CALLBACKS, [*getattr(context, CALLBACKS), Watching]), draining(window):
            items = [pa.table({"item": [number]}) for number in range(num_calls // BLOCKS_PER_TASK)]
            graph = ray.data.from_blocks(items)
            graph = graph.map_batches(
                Passthrough(num_rows, row_bytes), batch_format="pyarrow", batch_size=None, num_cpus=DECODE_CPUS
            )
            graph = graph.map_batches_internal(
                Sleeping,
                fn_constructor_args=(num_rows,),
                batch_format="pyarrow",
                batch_size=None,
                compute=ActorPoolStrategy(min_size=num_actors, max_size=num_actors),
                num_cpus=ACTOR_CPUS,
            )
            with contextlib.suppress(DrainedError):
                graph.write_datasink(CountingSink(), ray_remote_args={"num_cpus": WRITE_CPUS}, concurrency=2)
    if len(window.marks) < 2:
        raise SystemExit(f"{num_actors} replicas: all {num_calls} calls were over before the window: more --calls")
    first, last = window.marks
    gone = {name: last[name] - first[name] for name in first}
    calls, seconds = gone["calls"], gone["at_s"]
    return Paced(
        num_actors=num_actors,
        calls_per_s=calls / seconds,
        rows_per_s=calls * num_rows / seconds,
        turns_per_call=gone["turns"] / calls,
        loop_ms_per_call=gone["loop_s"] * 1000 / calls,
        loop_ms_per_turn=gone["loop_s"] * 1000 / gone["turns"],
        driver_ms_per_call=gone["driver_s"] * 1000 / calls,
        actors_ms_per_call=gone["actors_s"] * 1000 / calls,
        tasks_ms_per_call=gone["tasks_s"] * 1000 / calls,
        ray_ms_per_call=gone["ray_s"] * 1000 / calls,
        in_flight=window.in_flight,
        seconds=[tuple(np.subtract(after, before)[1:].tolist()) for before, after in pairwise(window.sums)],
    )


@dataclass(frozen=True)
class Law:
    """Fit of the loop's CPU, and what it allows a fleet.

    Attributes:
        turn_ms: of a turn, whatever it does.
        replica_ms: more in each turn for each replica.
        call_ms: of each call.
        miss: root of the mean squared relative miss of a second's CPU.
        calls_per_s: of a loop that does nothing else, with `NUM_NODES` replicas of two calls a turn.
    """

    turn_ms: float
    replica_ms: float
    call_ms: float
    miss: float
    calls_per_s: float


def law_of(runs: Sequence[Paced]) -> Law:
    """Fit the law by least squares; all numbers of replicas count alike."""
    rows = [(turns, turns * run.num_actors, calls, cpu_s) for run in runs for turns, calls, cpu_s in run.seconds]
    table = np.array([row for row in rows if row[-1] > 0])
    relative = table[:, :3] / table[:, 3:]
    (turn, replica, call), *_ = np.linalg.lstsq(relative, np.ones(len(table)), rcond=None)
    miss = float(np.sqrt(np.mean((relative @ (turn, replica, call) - 1) ** 2)))
    num_calls = FEWEST_IN_FLIGHT * NUM_NODES
    seconds = turn + replica * NUM_NODES + call * num_calls
    return Law(turn * 1000, replica * 1000, call * 1000, miss, num_calls / seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", default="1,25,50,100", help="numbers of replicas")
    parser.add_argument("--warm", type=float, default=25.0, help="seconds before the window")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the window")
    parser.add_argument("--calls", type=int, default=5000, help="at most, warming included")
    parser.add_argument("--rows", type=int, default=64, help="of a block")
    parser.add_argument("--row-kib", type=int, default=192, help="of a row, for one replica")
    parser.add_argument("--law-row-kib", type=int, default=4, help="of a row, for several: what one machine copies")
    parser.add_argument("--no-fast-start", action="store_true", help="with Ray Data's own loop and pools")
    options = parser.parse_args()
    found = []
    with fast_start(not options.no_fast_start):
        for number in options.actors.split(","):
            found.append(pace(int(number), options))
            show(found[-1])
    law = law_of(found) if len(found) > 2 else None
    if law is not None:
        print(
            f"CPU of a turn: {law.turn_ms:.1f} ms + {law.replica_ms:.2f} ms x replicas + {law.call_ms:.1f} ms x calls "
            f"(miss {law.miss:.0%}); {NUM_NODES} replicas on {NUM_NODES} nodes: {law.calls_per_s:.0f} calls/s, "
            f"{law.calls_per_s * options.rows:,.0f} items/s in blocks of {options.rows}, "
            f"{law.calls_per_s * CPU_SETTINGS.max_items:,.0f} in blocks of {CPU_SETTINGS.max_items}"
        )
    print(json.dumps({"runs": [asdict(each) for each in found], "law": law and asdict(law)}))


def show(paced: Paced) -> None:
    """Print one line."""
    print(
        f"{paced.num_actors:4} replicas: {paced.calls_per_s:6.1f} calls/s ({paced.rows_per_s:,.0f} rows/s), "
        f"{paced.turns_per_call:.2f} turns a call, {paced.in_flight} in flight; CPU of a call: driver "
        f"{paced.driver_ms_per_call:.1f} ms (loop {paced.loop_ms_per_call:.1f}), replica "
        f"{paced.actors_ms_per_call:.1f} ms, tasks {paced.tasks_ms_per_call:.1f} ms, Ray {paced.ray_ms_per_call:.1f} "
        f"ms; of a turn {paced.loop_ms_per_turn:.1f} ms",
        flush=True,
    )


if __name__ == "__main__":
    main()
