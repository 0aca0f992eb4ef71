"""Kill and pause runs at every step, in every kind of process; the store must not lose, double or half-publish a row.

    python scripts/chaos.py [NUM_KILLS] [SEED] [--pauses N] [--bucket] [--keep DIR]
                            [--models 2] [--step] [--deletion-vectors]

Before most kills the source changes, and an undisturbed store is refreshed next to the disturbed one. A refresh of that
is killed at a random time, or when a file of some kind appears; on Ray, a stage actor, a worker, a decoding child, the
raylet or the driver dies. Then it is killed again, or the same command runs to its end, and the stores are compared:
keys, versions, fingerprints, vectors. All the while a reader checks that what is published is a state of the source,
whole; with `--models 2`, in both models. With `--step`, a step of one's own makes two rows of each image, and its
process is killed, too.

With `--pauses`, so many more processes stop, and continue later. Next to a stopped driver the same command runs: it
is refused, or in a bucket (`--bucket`, of the tests' server) takes the store over. What all processes change is held to
the protocol of the store (`scripts/check_store_trace.py`). The last line is one JSON object; exit 1 where anything was
wrong.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from random import Random

import psutil
from chaos_world import Poller, World, compare, state_of
from check_store_trace import Checked, check

import embedder
from embedder.compat import STORE_TRACE_VARIABLE
from embedder.store.files import StoreFiles
from embedder.store.lock import read_holder
from harness import EMBEDDER, SCRIPTS, descendants, environment, kill_all, title

RUN_TIMEOUT_S = 240.0
LOOK_S = 0.001
LOOK_AT_ALL_S = 0.05  # at all processes of the run, which takes longer


@dataclass(frozen=True)
class Kill:
    """One disturbance."""

    engine: str  # of the run that is disturbed
    # what: the process that dies: driver, decoding child, step's process; on Ray also a stage actor, worker, raylet
    what: str
    moment: str  # what has just happened when it dies
    is_pause: bool = False  # whether it is stopped for a while instead

    def __str__(self) -> str:
        return f"{self.engine}: {self.what}{' paused' if self.is_pause else ''}, {self.moment}"


MOMENTS = {
    "at any time": "", "after a part file": "runs/*/journal/*.json", "after the order": "runs/*/publication.json",
    "after the commit of embeddings": "embeddings/_delta_log/*.json",
    "after the commit of items": "items/_delta_log/*.json", "while the index is built": "index/*",
    "after the run's record": "runs/*/published.json", "after the swap": "CURRENT.json",
}  # fmt: skip
"""Moments of a run, and the files of the store that appear or change then."""

AT_ONCE = "as soon as it is there"
SHORT_LIVED = ("decode worker", "decoding child")  # all is decoded before the first part file is written
RAY_PROCESSES = {
    "driver": "", "stage actor": "ray::MapWorker(MapBatches(Stage", "decode worker": "ray::MapBatches(decode",
    "write worker": "ray::Write", "decoding child": "media/sandbox_server.py", "raylet": "raylet/raylet",
}  # fmt: skip
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
    """Every moment and every kind of process, as often as there is room; a fifth on Ray."""
    num_ray = min(max(num // 5, len(RAY_PROCESSES) if num >= 20 else 0), num)
    ray = [Kill("ray", each, _moment_of(each)) for each in ([*RAY_PROCESSES] * num)[:num_ray]]
    local = []
    for number in range(num - num_ray):
        is_child = number % 10 == 9
        moment = AT_ONCE if is_child else list(MOMENTS)[number % len(MOMENTS)]
        child = STEP_PROCESS if has_step and number % 20 == 9 else "decoding child"
        local.append(Kill("local", child if is_child else "driver", moment))
    plan = [*ray, *local, *map(_pause, range(num_pauses))]
    rng.shuffle(plan)
    return plan


def _moment_of(process: str) -> str:
    return AT_ONCE if process in SHORT_LIVED else "after a part file"


def _pause(number: int) -> Kill:
    if number % 5 == 4:
        what = PAUSED_ON_RAY[number // 5 % len(PAUSED_ON_RAY)]
        return Kill("ray", what, _moment_of(what), is_pause=True)
    if number % 10 == 8:
        return Kill("local", "decoding child", AT_ONCE, is_pause=True)
    moments = [*list(MOMENTS)[1:], "at any time"]
    return Kill("local", "driver", moments[number % len(moments)], is_pause=True)


@dataclass
class Victim:
    """A run in its own process."""

    store: Path | str  # folder or URI
    config: Path  # of the run
    log: Path  # what it says
    trace: Path  # what its processes change in the store
    second: Path | None = None  # configuration of a run next to it; by default the same

    def start(self, config: Path | None = None) -> "subprocess.Popen[bytes]":
        """Start it; what it says goes into a file, which no orphan can hold open."""
        command = [*EMBEDDER, "refresh", str(config or self.config)]
        variables = environment() | {STORE_TRACE_VARIABLE: str(self.trace), "EMBEDDER_LEASE_S": f"{LEASE_S:g}"}
        with self.log.open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=variables)

    def disturb(self, kill: Kill, rng: Random, typical_s: float) -> tuple[bool, int]:
        return self._strike(self.start(), kill, rng, typical_s, lambda pid: os.kill(pid, signal.SIGKILL))

    def _strike(
        self, process: "subprocess.Popen[bytes]", kill: Kill, rng: Random, typical_s: float,
        strike: Callable[[int], None],
    ) -> tuple[bool, int]:  # fmt: skip
        family, is_struck, deadline_s = dict[int, psutil.Process](), False, time.monotonic() + RUN_TIMEOUT_S
        reached = self._trigger(kill.moment, rng, typical_s)
        try:
            while not is_struck and process.poll() is None and time.monotonic() < deadline_s:
                if reached():
                    family |= (known := {each.pid: each for each in descendants(process.pid)})
                    named = (each.pid for each in known.values() if TITLES[kill.what] in title(each))
                    pid = process.pid if kill.what == "driver" else next(named, None)
                    if pid is not None:
                        with contextlib.suppress(ProcessLookupError):
                            strike(pid)
                            is_struck = True
                time.sleep(LOOK_S if kill.moment != AT_ONCE else LOOK_AT_ALL_S)
            return is_struck, process.wait(RUN_TIMEOUT_S)
        finally:
            # What a killed run leaves behind: the daemons of its Ray would notice only after a while.
            kill_all(family.values())
            if process.poll() is None:
                process.kill()

    def pause(self, kill: Kill, rng: Random, typical_s: float) -> tuple[bool, int, int | None, list[str]]:
        """Run it, stop a process for a while, and let it end.

        Next to a paused driver the same command runs. A disk refuses it, and the paused one continues. In a bucket
        it takes the store over, and the paused one wakes while it is at work, or after it has ended. Gives whether
        there was something to pause in time, both exit codes, and what is wrong with either run.
        """
        start = self.log.stat().st_size if self.log.exists() else 0
        process, second, is_held = self.start(), list["subprocess.Popen[bytes]"](), list[bool]()

        def strike(pid: int) -> None:
            os.kill(pid, signal.SIGSTOP)
            try:
                if pid != process.pid:
                    time.sleep(rng.uniform(*CHILD_PAUSE_S))
                    return
                is_held.append(read_holder(StoreFiles(self.store)).get("pid") == pid)
                second.append(self.start(self.second))
                if isinstance(self.store, Path) or rng.random() < 0.5:
                    second[0].wait(RUN_TIMEOUT_S)
                else:
                    time.sleep(START_S + LEASE_S + rng.uniform(0.0, typical_s))
            finally:
                os.kill(pid, signal.SIGCONT)

        was_there, code = self._strike(process, kill, rng, typical_s, strike)
        codes = [each.wait(RUN_TIMEOUT_S) for each in second]
        said = self.log.read_bytes()[start:].decode(errors="replace")
        faults = [f"{kill}: {each}" for each in self._wrong(code, codes, said, is_held=any(is_held))]
        return was_there, code, codes[0] if codes else None, faults

    def _wrong(self, code: int, codes: list[int], said: str, *, is_held: bool) -> list[str]:
        """What is wrong with the ends of a run that was paused, and of one next to it."""
        if not codes:
            return []
        (second,) = codes
        wrong = ["a traceback"] if "Traceback (most recent" in said else []
        if isinstance(self.store, Path):
            wrong += [f"the paused run ended with {code}"] if code != 0 else []
            expected = REFUSAL_CODE if is_held else 0
            return wrong + ([f"the one next to it ended with {second}"] if second != expected else [])
        if code == LOST_CODE and not any(text in said for text in LOST):
            wrong.append("the paused run failed, and had not lost the store")
        if 0 not in (code, second) or not {code, second} <= {0, LOST_CODE, REFUSAL_CODE}:
            wrong.append(f"the paused run ended with {code}, the one next to it with {second}")
        return wrong

    def _trigger(self, moment: str, rng: Random, typical_s: float) -> Callable[[], bool]:
        """Return whether the moment has come, as a function, by what stands in the store that did not before."""
        if moment == AT_ONCE:
            return lambda: True
        if moment == "at any time":
            at_s = time.monotonic() + typical_s * rng.uniform(0.3, 1.0)
            return lambda: time.monotonic() >= at_s
        wanted = rng.randint(1, 3) if moment == "after a part file" else 1
        if not isinstance(self.store, Path):
            tail = TraceTail(self.trace, MOMENTS[moment])
            return lambda: tail.num_written() >= wanted
        store, before = self.store, _stamps(self.store, MOMENTS[moment])
        return lambda: len(_stamps(store, MOMENTS[moment]) - before) >= wanted


def _stamps(store: Path, pattern: str) -> set[tuple[str, int]]:
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


CHANGE_SHARE = 0.7  # of kills before which the source changes
MAX_ATTEMPTS = 3  # to be there when the moment comes
FAULTS = ("rows_lost", "rows_duplicated", "rows_differing")
PAUSES = ("pauses", "refused_meanwhile", "overtaken", "ended_well")
FIGURES = ("kills", "missed", "survived_in_place", "reruns", "comparisons", "rows_compared", *PAUSES, *FAULTS)
BUCKET = "chaos"
AGAIN_SHARE = 0.3  # of kills after which the next one follows before a run has come to its end


class Chaos:
    """A disturbed store next to an undisturbed one."""

    def __init__(self, root: Path, place: str | None, options: argparse.Namespace) -> None:
        self.rng = Random(options.seed)
        self.world = World(root, Random(options.seed + 1), options.models, options.step)
        self.world.build()
        if place is not None:
            self.world.in_bucket["disturbed"] = f"{place}/disturbed"
        self.poller = Poller(self.world.store("disturbed"))
        self.settings = {"deletion_vectors": True} if options.deletion_vectors else {}
        self.tally: Counter[str] = Counter()
        self.by_kill: Counter[str] = Counter()
        self.faults: list[str] = []
        self.trace = root / "trace.jsonl"
        self.typical_s = 0.0  # seconds of a run

    def run(self, plan: list[Kill]) -> None:
        self._refresh_undisturbed()
        polling = self.poller.start()
        try:
            begun_s = time.monotonic()
            self._to_the_end()  # the first publication, with an index that later ones keep
            self.typical_s = time.monotonic() - begun_s
            for number, kill in enumerate(plan):
                self._one(number, kill, is_last=number == len(plan) - 1)
        finally:
            polling.stop()

    def _one(self, number: int, kill: Kill, *, is_last: bool) -> None:
        """One kill; a run that ends before its moment comes is followed by another."""
        for attempt in range(MAX_ATTEMPTS):
            is_killed, code, changes = self._attempt(kill, must_change=attempt > 0)
            what = ("paused" if kill.is_pause else "killed") if is_killed else "ended before"
            print(f"{number + 1:3}  {kill}: {what}, exit {code} ({changes})", flush=True)
            self.tally[("pauses" if kill.is_pause else "kills") if is_killed else "missed"] += 1
            self.tally["survived_in_place"] += is_killed and code == 0 and not kill.is_pause
            self.tally["ended_well"] += is_killed and code == 0 and kill.is_pause
            self.by_kill[str(kill)] += is_killed
            if is_killed:
                break
        if is_last or kill.is_pause or self.rng.random() >= AGAIN_SHARE:
            self._to_the_end()
            self._compare(str(kill))
            self.tally["open"] = 0

    def _attempt(self, kill: Kill, *, must_change: bool) -> tuple[bool, int, str]:
        changes = "no change"
        if must_change or kill.engine == "ray" or not self.tally["open"] or self.rng.random() < CHANGE_SHARE:
            changes = self.world.change()
            self._refresh_undisturbed()
        self.tally["open"] = 1
        begun_s = time.monotonic()
        if kill.is_pause:
            is_killed, code = self._pause(kill)
        else:
            is_killed, code = self._victim(kill.engine).disturb(kill, self.rng, self.typical_s)
        if not is_killed and kill.engine == "local":  # how long a run takes changes with what else the machine does
            self.typical_s = time.monotonic() - begun_s
        return is_killed, code, changes

    def _pause(self, kill: Kill) -> tuple[bool, int]:
        """Pause a process; next to a driver the same command runs, without Ray."""
        was_there, code, second, faults = self._victim(kill.engine).pause(kill, self.rng, self.typical_s)
        if second is not None:
            print(f"     next to it: exit {second}", flush=True)
            self.tally["refused_meanwhile"] += second == REFUSAL_CODE
            self.tally["overtaken"] += code == LOST_CODE
        self.faults += faults
        return was_there, code

    def _victim(self, engine: str) -> Victim:
        world = self.world
        config, second = (world.config_file("disturbed", each, **self.settings) for each in (engine, "local"))
        return Victim(world.store("disturbed"), config, world.root / "victims.log", self.trace, second)

    def _to_the_end(self) -> None:
        code = self._victim("local").start().wait()
        self.tally["reruns"] += 1
        if code != 0:
            self.faults.append(f"a rerun ended with exit code {code}; see victims.log")

    def _refresh_undisturbed(self) -> None:
        embedder.refresh(embedder.load_config(self.world.config_file("undisturbed", "local")))
        self.poller.allowed.append(state_of(self.world.store("undisturbed")))

    def _compare(self, after: str) -> None:
        num_rows, difference = compare(self.world.store("disturbed"), self.world.store("undisturbed"))
        self.tally["comparisons"] += 1
        self.tally["rows_compared"] += num_rows
        for what, found in difference.items():
            self.tally[f"rows_{what}"] += len(found)
            if found:
                self.faults.append(f"after {after}: {what}: {sorted(map(str, found))[:5]}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill runs, and see whether the store survives.")
    parser.add_argument("num_kills", nargs="?", type=int, default=30)
    parser.add_argument("seed", nargs="?", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="an empty folder to work in, which is kept")
    parser.add_argument("--models", type=int, default=1, choices=(1, 2), help="models that the runs compute")
    parser.add_argument("--step", action="store_true", help="make two rows of each image by a step of one's own")
    parser.add_argument("--pauses", type=int, default=0, help="further disturbances: processes stopped for a while")
    parser.add_argument("--deletion-vectors", action="store_true", help="mark the rows that leave")
    parser.add_argument("--bucket", action="store_true", help="have the disturbed store in a bucket on this machine")
    options = parser.parse_args()
    root = options.keep or Path(tempfile.mkdtemp(prefix="chaos-"))
    begun_s, rng = time.monotonic(), Random(options.seed)
    try:
        with bucket() if options.bucket else nullcontext() as place:
            chaos = Chaos(root, place, options)
            chaos.run(plan_kills(options.num_kills, rng, has_step=options.step, num_pauses=options.pauses))
            checked = check(chaos.trace, chaos.world.store("disturbed"))
            code = report(chaos, checked, time.monotonic() - begun_s, options.seed)
    finally:
        if options.keep is None:
            shutil.rmtree(root, ignore_errors=True)
    sys.exit(code)


@contextmanager
def bucket() -> Iterator[str]:
    """Start the tests' bucket server and make a bucket; gives its URI, and has this process and its runs reach it."""
    sys.path.append(str(SCRIPTS.parent / "tests" / "support"))
    from bucket_server import KEY, SECRET, make_bucket, running_server

    with running_server() as (url, _):
        make_bucket(url, BUCKET)
        for variable in [each for each in os.environ if each.startswith("AWS_")]:
            del os.environ[variable]
        settings = {"ENDPOINT_URL": url, "REGION": "us-east-1", "ACCESS_KEY_ID": KEY, "SECRET_ACCESS_KEY": SECRET}
        os.environ.update({f"AWS_{name}": value for name, value in settings.items()})
        yield f"s3://{BUCKET}"


def report(chaos: Chaos, checked: Checked, seconds: float, seed: int) -> int:
    tally, poller = chaos.tally, chaos.poller
    for kill, num in sorted(chaos.by_kill.items()):
        print(f"{num:5}  {kill}")
    for fault in [*chaos.faults, *poller.faults[:20], *checked.deviations[:20]]:
        print(f"FAULT {fault}")
    figures = {name: tally[name] for name in FIGURES} | {
        "half_published_states": len(poller.faults), "states_seen": len(poller.seen), "polls": poller.num_polls,
        "effects": checked.num_effects, "deviations": len(checked.deviations), "seconds": round(seconds, 1),
        "seed": seed,
    }  # fmt: skip
    for name, value in figures.items():
        print(f"{name:22} {value}")
    faults = [*chaos.faults, *poller.faults, *checked.deviations]
    print(json.dumps(figures | {"kills_by": dict(chaos.by_kill), "faults": faults[:50]}))
    return 1 if faults else 0


if __name__ == "__main__":
    main()
