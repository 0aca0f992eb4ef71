"""Where and whom to kill or pause: a run is watched from outside, and disturbed as soon as the moment has come."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from random import Random

import psutil

from embedder.compat import STORE_TRACE_VARIABLE
from embedder.store.files import StoreFiles
from embedder.store.lock import read_holder
from harness import EMBEDDER, descendants, environment, kill_all, title

RUN_TIMEOUT_S = 240.0
LOOK_S = 0.001
LOOK_AT_ALL_S = 0.05  # at all processes of the run, which takes longer

Reached = Callable[[], bool]


@dataclass(frozen=True)
class Kill:
    """One disturbance.

    Attributes:
        engine: of the run that is disturbed.
        what: the process that dies: driver, decoding child, step's process; on Ray also a stage actor, worker, raylet.
        moment: what has just happened when it dies.
        is_pause: whether it is stopped for a while instead.
    """

    engine: str
    what: str
    moment: str
    is_pause: bool = False

    def __str__(self) -> str:
        return f"{self.engine}: {self.what}{' paused' if self.is_pause else ''}, {self.moment}"


MOMENTS = {
    "at any time": "",
    "after a part file": "runs/*/journal/*.json",
    "after the order": "runs/*/publication.json",
    "after the commit of embeddings": "embeddings/_delta_log/*.json",
    "after the commit of items": "items/_delta_log/*.json",
    "while the index is built": "index/*",
    "after the run's record": "runs/*/published.json",
    "after the swap": "CURRENT.json",
}
"""Moments of a run, and the files of the store that appear or change then."""

AT_ONCE = "as soon as it is there"
SHORT_LIVED = ("decode worker", "decoding child")  # all is decoded before the first part file is written
RAY_PROCESSES = {
    "driver": "",
    "stage actor": "ray::MapWorker(MapBatches(Stage",
    "decode worker": "ray::MapBatches(decode",
    "write worker": "ray::Write",
    "decoding child": "media/sandbox_server.py",
    "raylet": "raylet/raylet",
}
STEP_PROCESS = "step's process"
TITLES = RAY_PROCESSES | {STEP_PROCESS: "servables/program.py"}
LEASE_S = 6.0
"""Of runs in a bucket: a driver that lives beats every second, also on a busy machine."""
START_S = 3.0  # of a run, until it looks at the lock
CHILD_PAUSE_S = (2.0, 8.0)
LOST = ("took the store over", "another run published")
REFUSAL_CODE, LOST_CODE = 2, 1
PAUSED_ON_RAY = ("driver", "write worker", "raylet", "decoding child", "stage actor")


def plan_kills(num: int, rng: Random, *, has_step: bool = False, num_pauses: int = 0) -> list[Kill]:
    """Every moment and every kind of process, as often as there is room; a fifth on Ray.

    Args:
        num: how many.
        rng: of their order.
        has_step: whether there is a step, whose process may die.
        num_pauses: how many more processes are stopped for a while: a fifth on Ray, and mostly drivers.
    """
    num_ray = min(max(num // 5, len(RAY_PROCESSES) if num >= 20 else 0), num)
    names = list(RAY_PROCESSES)
    ray = [
        Kill("ray", name, AT_ONCE if name in SHORT_LIVED else "after a part file") for name in (names * num)[:num_ray]
    ]
    local = []
    for number in range(num - num_ray):
        is_child = number % 10 == 9
        moment = AT_ONCE if is_child else list(MOMENTS)[number % len(MOMENTS)]
        child = STEP_PROCESS if has_step and number % 20 == 9 else "decoding child"
        local.append(Kill("local", child if is_child else "driver", moment))
    plan = [*ray, *local, *map(_pause, range(num_pauses))]
    rng.shuffle(plan)
    return plan


def _pause(number: int) -> Kill:
    if number % 5 == 4:
        what = PAUSED_ON_RAY[number // 5 % len(PAUSED_ON_RAY)]
        return Kill("ray", what, AT_ONCE if what in SHORT_LIVED else "after a part file", is_pause=True)
    if number % 10 == 8:
        return Kill("local", "decoding child", AT_ONCE, is_pause=True)
    moments = [*list(MOMENTS)[1:], "at any time"]
    return Kill("local", "driver", moments[number % len(moments)], is_pause=True)


@dataclass
class Paused:
    """What became of a paused run.

    Attributes:
        was_there: whether there was something to pause in time.
        code: exit code of the run.
        second: exit code of the same command, where it ran meanwhile.
        faults: what is wrong with either.
    """

    was_there: bool
    code: int
    second: int | None
    faults: list[str]


@dataclass
class Victim:
    """A run in a process of its own.

    Attributes:
        store: folder or URI.
        config: of the run.
        log: what it says.
        trace: what its processes change in the store.
        second: configuration of a run beside it; by default the same.
    """

    store: Path | str
    config: Path
    log: Path
    trace: Path
    second: Path | None = None

    def start(self, config: Path | None = None) -> "subprocess.Popen[bytes]":
        """Start it; what it says goes into a file, which no orphan can hold open."""
        command = [*EMBEDDER, "refresh", str(config or self.config)]
        variables = environment() | {STORE_TRACE_VARIABLE: str(self.trace), "EMBEDDER_LEASE_S": f"{LEASE_S:g}"}
        with self.log.open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=variables)

    def disturb(self, kill: Kill, rng: Random, typical_s: float) -> tuple[bool, int]:
        """Run it and kill; says whether there was something to kill in time, and the exit code.

        Args:
            kill: whom, and when.
            rng: of the moment.
            typical_s: seconds of a run.
        """
        return self._struck(self.start(), kill, rng, typical_s, lambda pid: os.kill(pid, signal.SIGKILL))

    def _struck(
        self,
        process: "subprocess.Popen[bytes]",
        kill: Kill,
        rng: Random,
        typical_s: float,
        strike: Callable[[int], None],
    ) -> tuple[bool, int]:
        family: dict[int, psutil.Process] = {}
        try:
            is_struck = self._strike_when(process, kill, self._trigger(kill.moment, rng, typical_s), family, strike)
            code = process.wait(RUN_TIMEOUT_S)
        finally:
            # What a killed run leaves behind: the daemons of its Ray would notice only after a while.
            kill_all(family.values())
            if process.poll() is None:
                process.kill()
        return is_struck, code

    def pause(self, kill: Kill, rng: Random, typical_s: float) -> Paused:
        """Run it, stop a process for a while, and let it end.

        Beside a paused driver the same command runs. On a disk it is refused, and the paused one goes on. In a bucket
        it takes the store over, and the paused one wakes while it is at work, or after it has ended.

        Args:
            kill: whom, and when.
            rng: of the moment.
            typical_s: seconds of a run.
        """
        start = self.log.stat().st_size if self.log.exists() else 0
        process, second, is_held = self.start(), list["subprocess.Popen[bytes]"](), list[bool]()

        def strike(pid: int) -> None:
            os.kill(pid, signal.SIGSTOP)
            try:
                if pid != process.pid:
                    time.sleep(rng.uniform(*CHILD_PAUSE_S))
                    return
                is_held.append(self._holder() == pid)
                second.append(self.start(self.second))
                if isinstance(self.store, Path) or rng.random() < 0.5:
                    second[0].wait(RUN_TIMEOUT_S)
                else:
                    time.sleep(START_S + LEASE_S + rng.uniform(0.0, typical_s))
            finally:
                os.kill(pid, signal.SIGCONT)

        was_there, code = self._struck(process, kill, rng, typical_s, strike)
        codes = [each.wait(RUN_TIMEOUT_S) for each in second]
        said = self.log.read_bytes()[start:].decode(errors="replace")
        faults = [f"{kill}: {each}" for each in self._wrong(code, codes, said, is_held=any(is_held))]
        return Paused(was_there, code, codes[0] if codes else None, faults)

    def _holder(self) -> int | None:
        """Process that holds the store's lock."""
        return read_holder(StoreFiles(self.store)).get("pid")

    def _wrong(self, code: int, codes: list[int], said: str, *, is_held: bool) -> list[str]:
        """What is wrong with the ends of a run that was paused, and of one beside it."""
        if not codes:
            return []
        (second,) = codes
        wrong = ["a traceback"] if "Traceback (most recent" in said else []
        if isinstance(self.store, Path):
            wrong += [f"the paused run ended with {code}"] if code != 0 else []
            expected = REFUSAL_CODE if is_held else 0
            return wrong + ([f"the one beside it ended with {second}"] if second != expected else [])
        if code == LOST_CODE and not any(text in said for text in LOST):
            wrong.append("the paused run failed, and had not lost the store")
        if 0 not in (code, second) or not {code, second} <= {0, LOST_CODE, REFUSAL_CODE}:
            wrong.append(f"the paused run ended with {code}, the one beside it with {second}")
        return wrong

    def _strike_when(
        self,
        process: "subprocess.Popen[bytes]",
        kill: Kill,
        reached: Reached,
        family: dict[int, psutil.Process],
        strike: Callable[[int], None],
    ) -> bool:
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline:
            if reached():
                known = {each.pid: each for each in descendants(process.pid)}
                family.update(known)
                named = (each.pid for each in known.values() if TITLES[kill.what] in title(each))
                pid = process.pid if kill.what == "driver" else next(named, None)
                if pid is not None:
                    with contextlib.suppress(ProcessLookupError):
                        strike(pid)
                        return True
            time.sleep(LOOK_S if kill.moment != AT_ONCE else LOOK_AT_ALL_S)
        return False

    def _trigger(self, moment: str, rng: Random, typical_s: float) -> Reached:
        """Tell when the moment has come, by what stands in the store that did not before."""
        if moment == AT_ONCE:
            return lambda: True
        if moment == "at any time":
            at_s = time.monotonic() + typical_s * rng.uniform(0.3, 1.0)
            return lambda: time.monotonic() >= at_s
        wanted = rng.randint(1, 3) if moment == "after a part file" else 1
        if not isinstance(self.store, Path):
            tail = TraceTail(self.trace, MOMENTS[moment])
            return lambda: tail.num_written() >= wanted
        before = self._stamps(self.store, MOMENTS[moment])
        store = self.store
        return lambda: len(self._stamps(store, MOMENTS[moment]) - before) >= wanted

    def _stamps(self, store: Path, pattern: str) -> set[tuple[str, int]]:
        """Files of the store, with the times of their last change."""
        found = set()
        for path in store.glob(pattern):
            with contextlib.suppress(OSError):
                found.add((str(path), path.stat().st_mtime_ns if path.is_file() else 0))
        return found


class TraceTail:
    """Files of one pattern that are written from now on, by the trace of the store: asking a bucket takes longer."""

    def __init__(self, trace: Path, pattern: str) -> None:
        self._trace, self._pattern = trace, pattern
        self._read = trace.stat().st_size if trace.exists() else 0
        self._begun: set[tuple[str, int, int]] = set()
        self._num_written = 0

    def num_written(self) -> int:
        """How many are."""
        if self._trace.exists() and self._trace.stat().st_size > self._read:
            with self._trace.open("rb") as file:
                file.seek(self._read)
                whole, _, _ = file.read().rpartition(b"\n")
            self._read += len(whole) + 1 if whole else 0
            for line in whole.splitlines():
                self._count(json.loads(line))
        return self._num_written

    def _count(self, change: dict) -> None:
        key = (change["host"], change["pid"], change["id"])
        if change.get("what") == "put" and fnmatch(change["path"], self._pattern):
            self._begun.add(key)
        self._num_written += key in self._begun and change.get("outcome") == "done"
