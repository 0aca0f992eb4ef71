"""Kill and pause runs at every step, in every kind of process; the store must not lose, double or half-publish a row.

    python scripts/chaos.py [NUM_KILLS] [SEED] [--pauses N] [--bucket] [--keep DIR] [--publish-every SECONDS]
                            [--models 2] [--step]

Before most kills the source changes (items added, changed, touched, deleted), and an undisturbed store is refreshed
beside the disturbed one. A refresh of that is then killed with SIGKILL: at a random time, or at the very moment a
part file, the order to publish, the commit of a table, an index, the run's record or CURRENT.json appears (watched
from outside); on Ray, it is a stage actor, a worker, a decoding child, the raylet or the driver that dies. After some
kills the run is killed again, after the others the same command runs to its end, and both stores are compared: keys,
versions, fingerprints, and vectors by cosine >= 0.9999. All the while a reader opens what is published, and checks
that it is a state that the source was in, whole. With `--publish-every`, runs publish while they go on, kills meet
those publications too, and each item for itself must be as it was in some state. With `--models 2`, runs compute
two models, and both must be whole and of one state. With `--step`, a step of one's own makes two rows of each image,
and its process is killed, too.

With `--pauses`, so many processes more are stopped (SIGSTOP) and go on later (SIGCONT). Beside a driver that is stopped
the same command runs: it has to be refused, and the paused run has to go on well. With `--bucket`, the disturbed store
is in a bucket of a server on this machine (the tests' own, by moto), where it takes the store over: the paused run
wakes in the midst of its work, or later. What all processes change in the store is recorded, and held to the store's
protocol (`scripts/check_store_trace.py`). The last line is one JSON object; exit 1 where anything was lost, doubled,
different or half published, or deviates from the protocol.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from random import Random

from check_store_trace import Checked, check

import embedder
from chaos_run.kills import LOST_CODE, REFUSAL_CODE, Kill, Victim, plan_kills
from chaos_run.states import Poller, compare, state_of
from chaos_run.world import World
from harness import SCRIPTS

CHANGE_SHARE = 0.7  # of kills before which the source changes
MAX_ATTEMPTS = 3  # to be there when the moment comes
FAULTS = ("rows_lost", "rows_duplicated", "rows_differing")
PAUSES = ("pauses", "refused_meanwhile", "overtaken", "ended_well")
FIGURES = ("kills", "missed", "survived_in_place", "reruns", "comparisons", "rows_compared", *PAUSES, *FAULTS)
BUCKET = "chaos"
AGAIN_SHARE = 0.3  # of kills after which the next one follows before a run has come to its end


class Chaos:
    """A disturbed store beside an undisturbed one."""

    def __init__(
        self, root: Path, seed: int, publish_every_s: float | None = None, place: str | None = None, **world: int
    ) -> None:
        self.rng = Random(seed)
        self.world = World(root, Random(seed + 1), **world)
        self.world.build()
        if place is not None:
            self.world.in_bucket["disturbed"] = f"{place}/disturbed"
        self.settings = {} if publish_every_s is None else {"publish_every_s": publish_every_s}
        self.poller = Poller(self.world.store("disturbed"), may_mix=bool(self.settings))
        self.tally: Counter[str] = Counter()
        self.by_kill: Counter[str] = Counter()
        self.faults: list[str] = []
        self.typical_s = 0.0  # seconds of a run

    def run(self, plan: list[Kill]) -> None:
        self._refresh_undisturbed()
        self.poller.start()
        try:
            begun_s = time.monotonic()
            self._to_the_end()  # the first publication, with an index that later ones keep
            self.typical_s = time.monotonic() - begun_s
            for number, kill in enumerate(plan):
                self._one(number, kill, is_last=number == len(plan) - 1)
        finally:
            self.poller.stop()

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
        """Pause a process; beside a driver the same command runs, without Ray."""
        paused = self._victim(kill.engine).pause(kill, self.rng, self.typical_s)
        if paused.second is not None:
            print(f"     beside it: exit {paused.second}", flush=True)
            self.tally["refused_meanwhile"] += paused.second == REFUSAL_CODE
            self.tally["overtaken"] += paused.code == LOST_CODE
        self.faults += paused.faults
        return paused.was_there, paused.code

    @property
    def trace(self) -> Path:
        """File of what is changed in the disturbed store."""
        return self.world.root / "trace.jsonl"

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
    parser.add_argument("--publish-every", type=float, help="seconds between two publications of a run")
    parser.add_argument("--models", type=int, default=1, choices=(1, 2), help="models that the runs compute")
    parser.add_argument("--step", action="store_true", help="make two rows of each image by a step of one's own")
    parser.add_argument("--pauses", type=int, default=0, help="further disturbances: processes stopped for a while")
    parser.add_argument("--bucket", action="store_true", help="have the disturbed store in a bucket on this machine")
    options = parser.parse_args()
    root = options.keep or Path(tempfile.mkdtemp(prefix="chaos-"))
    begun_s = time.monotonic()
    world = {"num_models": options.models, "has_step": options.step}
    try:
        with bucket() if options.bucket else nullcontext() as place:
            chaos = Chaos(root, options.seed, options.publish_every, place, **world)
            rng = Random(options.seed)
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
    """Print what happened; gives the exit code."""
    tally, poller = chaos.tally, chaos.poller
    for kill, num in sorted(chaos.by_kill.items()):
        print(f"{num:5}  {kill}")
    for fault in [*chaos.faults, *poller.faults[:20], *checked.deviations[:20]]:
        print(f"FAULT {fault}")
    figures = {name: tally[name] for name in FIGURES} | {
        "half_published_states": len(poller.faults),
        "states_seen": len(poller.seen),
        "polls": poller.num_polls,
        "effects": checked.num_effects,
        "deviations": len(checked.deviations),
        "seconds": round(seconds, 1),
        "seed": seed,
    }
    for name, value in figures.items():
        print(f"{name:22} {value}")
    faults = [*chaos.faults, *poller.faults, *checked.deviations]
    print(json.dumps(figures | {"kills_by": dict(chaos.by_kill), "faults": faults[:50]}))
    return 1 if faults else 0


if __name__ == "__main__":
    main()
