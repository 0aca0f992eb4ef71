"""Where and whom to kill: a run is watched from outside, and ended hard as soon as the moment has come."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import psutil

from harness import EMBEDDER, descendants, kill_all, title

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
    """

    engine: str
    what: str
    moment: str

    def __str__(self) -> str:
        return f"{self.engine}: {self.what}, {self.moment}"


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
    "decoding child": "media/sandbox_main.py",
    "raylet": "raylet/raylet",
}
STEP_PROCESS = "step's process"
TITLES = RAY_PROCESSES | {STEP_PROCESS: "servables/interpreter_child.py"}


def plan_kills(num: int, rng: Random, *, has_step: bool = False) -> list[Kill]:
    """Every moment and every kind of process, as often as there is room; a fifth on Ray.

    Args:
        num: how many.
        rng: of their order.
        has_step: whether there is a step, whose process may die.
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
    plan = [*ray, *local]
    rng.shuffle(plan)
    return plan


@dataclass
class Victim:
    """A run in a process of its own."""

    store: Path
    config: Path
    log: Path

    def start(self) -> "subprocess.Popen[bytes]":
        """Start it; what it says goes into a file, which no orphan can hold open."""
        command = [*EMBEDDER, "refresh", str(self.config)]
        with self.log.open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    def disturb(self, kill: Kill, rng: Random, typical_s: float) -> tuple[bool, int]:
        """Run it and kill; says whether there was something to kill in time, and the exit code.

        Args:
        kill: whom, and when.
        rng: of the moment.
        typical_s: seconds of a run.
        """
        process = self.start()
        family: dict[int, psutil.Process] = {}
        try:
            is_killed = self._kill_when(process, kill, self._trigger(kill.moment, rng, typical_s), family)
            code = process.wait(RUN_TIMEOUT_S)
        finally:
            # What a killed run leaves behind: the daemons of its Ray would notice only after a while.
            kill_all(family.values())
            if process.poll() is None:
                process.kill()
        return is_killed, code

    def _kill_when(
        self, process: "subprocess.Popen[bytes]", kill: Kill, reached: Reached, family: dict[int, psutil.Process]
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
                        os.kill(pid, signal.SIGKILL)
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
        before = self._stamps(MOMENTS[moment])
        return lambda: len(self._stamps(MOMENTS[moment]) - before) >= wanted

    def _stamps(self, pattern: str) -> set[tuple[str, int]]:
        """Files of the store, with the times of their last change."""
        found = set()
        for path in self.store.glob(pattern):
            with contextlib.suppress(OSError):
                found.add((str(path), path.stat().st_mtime_ns if path.is_file() else 0))
        return found
