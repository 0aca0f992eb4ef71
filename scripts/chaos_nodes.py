"""Kill, partition, drain and add nodes under a run; it must end by itself, with the rows of an undisturbed one.

    python scripts/chaos_nodes.py [--rounds 3] [--seed 0] [--only kill,cut20] [--state rounds.jsonl] [--keep DIR]

Each round makes a cluster of three nodes of one logical CPU, and a head without (`scripts/cluster/nodes.py`; root),
runs `embedder embed` on it, and lets the fault happen once stages compute: docs/cluster.md describes each. `own-disks`:
nodes that don't share the store, which has to be refused. What processes change is held to the protocol of the store
(`scripts/check_store_trace.py`). With `--state` the rounds that the file names are left out, and finished ones are
added; with `--keep` source and undisturbed store are made once. A round takes one to four minutes. The last line is one
JSON object; exit 1 where anything was wrong.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from chaos import REFUSAL_CODE
from chaos_world import World, compare
from check_store_trace import Checked, check

import embedder
from cluster.nodes import NodeCluster
from embedder.compat import STORE_TRACE_VARIABLE
from harness import EMBEDDER, descendants, environment, show

NUM_NODES = 3  # that compute; the driver is on a head without CPUs
NODE_CPUS = 1.0
DRIVER, SPARE = 0, NUM_NODES + 1
STAGE_TITLE = "MapWorker(MapBatches(Stage"
AT_WORK = f"{STAGE_TITLE}Actor)).submit"
RUN_S = 480.0
NUM_IMAGES = 1000
FAULT_AFTER_S = (0.5, 8.0)  # of work on so many images; of fewer, in proportion
# Large enough that stages compute for a while.
VISION = {"image_size": 64, "patch_size": 8, "width": 256, "depth": 10, "num_heads": 4}
SETTINGS = {
    "num_stages": 2, "rows_per_part": 32, "batch_size": 16, "decode.items_per_task": 32, "no_progress_timeout_s": 300,
}  # fmt: skip
ONE_REPLICA = "[[stage]]\nreplicas = { min = 1, max = 1 }\n" * 2

HAPPENED = {"kill": "killed", "cut": "partitioned", "pause": "paused", "drain": "drained"}
Happens = Callable[["NodeRound"], None]


@dataclass(frozen=True)
class Outcome:
    """One round."""

    kind: str  # of the fault
    number: int  # of the round among those of its kind
    seed: int  # of all rounds
    what: str  # that happened
    code: int | None  # exit code of the run itself
    code_again: int | None  # of the same command, where the first run can't end
    num_rows: int  # compared
    faults: list[str]  # what is wrong
    stall_s: float  # longest time without a finished part after the fault
    wall_s: float  # of the run
    events: list[str] = field(default_factory=list)  # lines of the report
    effects: int = 0  # changes of the store
    deviations: int = 0  # from the store's protocol


@dataclass
class NodeRound:
    """A run on its own nodes, and its fault."""

    world: World
    cluster: NodeCluster
    rng: Random
    store: str
    what: str = "nothing happened"
    process: "subprocess.Popen[bytes] | None" = None
    second: Callable[[], int] = lambda: REFUSAL_CODE
    refusal: str = ""

    @property
    def trace(self) -> Path:
        """File of what the run's processes change in the store."""
        return self.world.root / f"{self.store}.trace.jsonl"

    def node_with_stage(self) -> int:
        titles = {number: list(self.cluster.titles(number)) for number in range(1, NUM_NODES + 1)}
        return self.rng.choice([number for number, found in titles.items() if STAGE_TITLE in " ".join(found)])

    def is_at_work(self) -> bool:
        """Whether a stage has begun to compute; a short call can be missed, what it led to can't."""
        titles = (title for number in range(1, NUM_NODES + 1) for title in self.cluster.titles(number))
        return any(AT_WORK in title for title in titles) or bool(self.entries())

    def disturb(self, how: str, number: int, *seconds: float) -> None:
        self.what = " ".join([f"node {number} {HAPPENED[how]}", *(f"for {each:g} s" for each in seconds)])
        getattr(self.cluster, how)(number, *seconds)

    def pause_driver(self, seconds: float) -> None:
        """Stop the driver for a while, in which the same command has to be refused."""
        own = [] if self.process is None else [self.process.pid, *(each.pid for each in descendants(self.process.pid))]
        until_s = time.monotonic() + seconds
        self.what = f"the driver paused for {seconds:g} s"
        for pid in own[1:]:  # the first one waits for the others
            os.kill(pid, signal.SIGSTOP)
        code = self.second()
        self.refusal = "" if code == REFUSAL_CODE else f"the same command next to a paused driver ended with {code}"
        time.sleep(max(0.0, until_s - time.monotonic()))
        for pid in own:
            os.kill(pid, signal.SIGCONT)

    def drain(self, number: int, seconds: float) -> None:
        self.disturb("drain", number, seconds)
        time.sleep(seconds)
        self.cluster.kill(number)

    def add(self) -> None:
        self.what = f"node {SPARE} added"
        self.cluster.add(SPARE, NODE_CPUS)

    def entries(self) -> list[float]:
        """Return the times at which write tasks ended, in order."""
        return sorted(path.stat().st_mtime for path in self.world.store(self.store).glob("runs/*/journal/*.json"))

    def report(self) -> dict[str, Any]:
        found = sorted(self.world.store(self.store).glob("runs/*/report.json"))
        return json.loads(found[-1].read_text()) if found else {}


FAULTS: dict[str, Happens] = {
    "kill": lambda each: each.disturb("kill", each.rng.randint(1, NUM_NODES)),
    "kill-only": lambda each: each.disturb("kill", each.node_with_stage()),
    "cut20": lambda each: each.disturb("cut", each.node_with_stage(), 20),
    "cut120": lambda each: each.disturb("cut", each.node_with_stage(), 120),
    "pause10": lambda each: each.disturb("pause", each.node_with_stage(), 10),
    "pause90": lambda each: each.disturb("pause", each.node_with_stage(), 90),
    "pause-driver": lambda each: each.pause_driver(15),
    "drain": lambda each: each.drain(each.node_with_stage(), 30),
    "add": lambda each: each.add(),
    "head": lambda each: each.disturb("kill", 0),
    "own-disks": lambda each: None,  # from the start
}
"""By kind; `kill-only` ends the node of a stage's only replica, `own-disks` is a store that nodes don't share."""


def run_round(world: World, cluster: NodeCluster, kind: str, number: int, seed: int) -> Outcome:
    """Make a cluster, run on it, disturb it, and compare with the undisturbed store."""
    each = NodeRound(world, cluster, Random(f"{seed} {kind} {number}"), f"{kind}-{number}")
    config = world.config_file(each.store, "ray", ray_address=cluster.address, **SETTINGS)
    if kind != "add":  # a new node can be used where the number of replicas is open
        config.write_text(config.read_text() + ONE_REPLICA)
    log = world.root / f"{each.store}.log"
    private = [str(world.store(each.store))] if kind == "own-disks" else []
    for folder in private:
        Path(folder).mkdir()
        each.what = "a store that the nodes don't share"
    start = partial(cluster.start, NUM_NODES + 1, NODE_CPUS, head_cpus=0, private=private)
    start()
    begun_s, again = time.time(), None
    try:
        code, happened_s = _disturbed(each, kind, config, log)
        if kind == "head":
            start()
            again = _embed(each, kind, config, log).wait(RUN_S)
    except subprocess.TimeoutExpired:
        code, happened_s = None, begun_s
    finally:
        cluster.stop()
    wall_s = time.time() - begun_s
    events = [event["text"] for event in each.report().get("events", [])]
    num_rows, faults = (0, _refusal(each, code, log)) if kind == "own-disks" else _faults(each, kind, code, again)
    checked = Checked(0, ["nothing was recorded"])
    if each.trace.exists():
        checked = check(each.trace, None if private else world.store(each.store))
    faults += checked.deviations[:3] + ([each.refusal] if each.refusal else [])
    times = [happened_s, *(at_s for at_s in each.entries() if at_s > happened_s)]
    stall_s = max((after - before for before, after in pairwise(times)), default=0.0)
    changes = {"effects": checked.num_effects, "deviations": len(checked.deviations)}
    return Outcome(kind, number, seed, each.what, code, again, num_rows, faults, stall_s, wall_s, events, **changes)


def _embed(each: NodeRound, kind: str, config: Path, log: Path) -> "subprocess.Popen[bytes]":
    node = 1 if kind == "head" else DRIVER  # a driver that outlives the head needs its own node
    command = each.cluster.command(node, [*EMBEDDER, "embed", "--config", str(config)])
    with log.open("ab") as output:
        variables = environment() | {STORE_TRACE_VARIABLE: str(each.trace)}
        return subprocess.Popen(command, stdout=output, stderr=output, env=variables)


def _disturbed(each: NodeRound, kind: str, config: Path, log: Path) -> tuple[int | None, float]:
    """Run, and let the fault happen once stages compute; gives the exit code, and the time of the fault."""
    process = each.process = _embed(each, kind, config, log)
    each.second = lambda: _embed(each, kind, config, log.with_suffix(".second.log")).wait(RUN_S)
    happened_s = time.time()
    try:
        if kind != "own-disks":
            while not each.is_at_work() and process.poll() is None and time.time() < happened_s + RUN_S:
                time.sleep(0.1)
            num_images = len(list(each.world.source.glob("*.png")))
            time.sleep(each.rng.uniform(*FAULT_AFTER_S) * num_images / NUM_IMAGES)
            happened_s = time.time()
            if process.poll() is None:
                with suppress(LookupError):
                    FAULTS[kind](each)
        return process.wait(RUN_S), happened_s
    finally:
        if process.poll() is None:
            process.kill()


def _faults(each: NodeRound, kind: str, code: int | None, again: int | None) -> tuple[int, list[str]]:
    """Compare with the undisturbed store; gives the rows, and what is wrong."""
    faults = [] if each.what != NodeRound.what else [f"the run ended with exit code {code} before it was disturbed"]
    if kind == "head":
        if code in (0, None) or again != 0:
            faults.append(f"exit code {code}, and of the same command afterwards {again}")
    elif code != 0:
        return 0, ["the run did not end in time" if code is None else f"exit code {code}"]
    if not (each.world.store(each.store) / "CURRENT.json").exists():
        return 0, [*faults, "nothing is published"]
    num_rows, other = compare(each.world.store(each.store), each.world.store("undisturbed"))
    faults += [f"{len(found)} rows {what}: {sorted(map(str, found))[:3]}" for what, found in other.items() if found]
    return num_rows, faults


def _refusal(each: NodeRound, code: int | None, log: Path) -> list[str]:
    said = log.read_text(errors="replace")
    faults = [] if code == REFUSAL_CODE else [f"exit code {code} instead of {REFUSAL_CODE}"]
    faults += [] if "Traceback" not in said else ["a traceback"]
    return faults + (["items were embedded"] if each.entries() else [])


COLUMNS = {
    "kind": "{kind}", "round": "{number}", "what": "{what}", "exit": "{code}", "again": "{code_again}",
    "rows": "{num_rows}", "stall s": "{stall_s:.1f}", "run s": "{wall_s:.0f}", "events": "{num_events}",
    "effects": "{effects}", "deviations": "{deviations}", "wrong": "{wrong}",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Disturb the nodes of a cluster, and see whether a run survives.")
    parser.add_argument("--rounds", type=int, default=3, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(FAULTS), metavar="KIND,KIND")
    parser.add_argument("--state", type=Path, help="file of finished rounds, one JSON object a line")
    parser.add_argument("--keep", type=Path, help="folder to work in; source and undisturbed store are used again")
    parser.add_argument("--name", default="chaosnode", help="of the cluster, where several are up")
    parser.add_argument("--images", type=int, default=NUM_IMAGES)
    options = parser.parse_args()
    if unknown := set(options.only) - FAULTS.keys():
        parser.error(f"--only: no such kind: {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")
    if os.geteuid() != 0:
        parser.error("namespaces need root")
    root = options.keep or Path(tempfile.mkdtemp(prefix="chaos-nodes-"))
    known = read_state(options.state)
    try:
        plan = [(kind, number) for number in range(options.rounds) for kind in options.only]
        outcomes = run_rounds(World(root, Random(options.seed)), NodeCluster(options.name), plan, known, options)
    finally:
        if options.keep is None:
            shutil.rmtree(root, ignore_errors=True)
    sys.exit(report(outcomes))


def read_state(path: Path | None) -> list[Outcome]:
    if path is None or not path.exists():
        return []
    return [Outcome(**json.loads(line)) for line in path.read_text().splitlines()]


def run_rounds(
    world: World, cluster: NodeCluster, plan: Sequence[tuple[str, int]], known: Sequence[Outcome],
    options: argparse.Namespace,
) -> list[Outcome]:  # fmt: skip
    done = {(each.kind, each.number): each for each in known if each.seed == options.seed}
    left = [key for key in plan if key not in done]
    if left and not (world.store("undisturbed") / "CURRENT.json").exists():
        world.build(options.images, VISION)
        embedder.embed(embedder.load_config(world.config_file("undisturbed", "local", **SETTINGS)))
    for kind, number in left:
        outcome = done[kind, number] = run_round(world, cluster, kind, number, options.seed)
        print(f"{kind} {number}: {outcome.what}: {'; '.join(outcome.faults) or 'as it should be'}", flush=True)
        for event in outcome.events:
            print(f"    {event}", flush=True)
        if options.state is not None:
            with options.state.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
        if not outcome.faults:
            shutil.rmtree(world.store(f"{kind}-{number}"))
            (world.root / f"{kind}-{number}.trace.jsonl").unlink()
    return [done[key] for key in plan]


def report(outcomes: Sequence[Outcome]) -> int:
    extra = [vars(each) | {"num_events": len(each.events), "wrong": "; ".join(each.faults)} for each in outcomes]
    show(extra, COLUMNS)
    by_kind = {}
    for kind in dict.fromkeys(each.kind for each in outcomes):
        own = [each for each in outcomes if each.kind == kind]
        counts = {"rounds": len(own), "wrong": sum(bool(each.faults) for each in own)}
        counts["rows_compared"] = sum(each.num_rows for each in own)
        by_kind[kind] = counts | {"longest_stall_s": round(max(each.stall_s for each in own), 1)}
    faults = [f"{each.kind} {each.number}: {fault}" for each in outcomes for fault in each.faults]
    figures = {name: sum(getattr(each, name) for each in outcomes) for name in ("effects", "deviations")}
    print(json.dumps({"kinds": by_kind, **figures, "faults": faults}))
    return 1 if faults else 0


if __name__ == "__main__":
    main()
