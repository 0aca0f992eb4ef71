"""Kill, partition, drain and add nodes under a run; it must end by itself, with the rows of an undisturbed one.

    python scripts/chaos_nodes.py [--rounds 3] [--seed 0] [--only kill,cut20] [--state rounds.jsonl] [--keep DIR]

Each round makes a cluster of three nodes of one logical CPU, and a head without (`scripts/cluster/nodes.py`; root),
runs `embedder embed` on it, and lets the fault happen once stages compute: `kill` (any node), `kill-only` (the node
of a stage's only replica), `cut20` and `cut120` (a partition of so many seconds), `pause10` and `pause90` (all that
runs on a node is stopped for so many seconds; Ray gives a node up after 65, and this one's tasks go on all the same),
`pause-driver` (the driver is stopped, and the same command has to be refused meanwhile), `drain` (notice, and the end
30 s later), `add` (one more node), `head` (the head dies, and the same command runs on a new one), `own-disks` (the
nodes don't share the store, which has to be refused before anything is decoded). The run itself has to end with 0
(with 2 where it is refused; not with 0 where the head dies, but then the second one), and all rows must equal those of
a run in one process. What all processes change in the store is recorded, and held to the store's protocol
(`scripts/check_store_trace.py`). With `--state` the rounds that the file names are left out, and finished ones are
added, so that the same command goes on where it stopped; with `--keep` it makes source and undisturbed store once. A
round takes one to four minutes. The last line is one JSON object; exit 1 where anything was wrong.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

import embedder
from chaos_run.node_faults import FAULTS, NUM_IMAGES, SETTINGS, VISION, Outcome, as_line, run_round
from chaos_run.world import World
from cluster.nodes import NodeCluster
from harness import show

COLUMNS = {
    "kind": "{kind}",
    "round": "{number}",
    "what": "{what}",
    "exit": "{code}",
    "again": "{code_again}",
    "rows": "{num_rows}",
    "stall s": "{stall_s:.1f}",
    "run s": "{wall_s:.0f}",
    "events": "{num_events}",
    "effects": "{effects}",
    "deviations": "{deviations}",
    "wrong": "{wrong}",
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Disturb the nodes of a cluster, and see whether a run survives.")
    parser.add_argument("--rounds", type=int, default=3, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(FAULTS), metavar="KIND,KIND")
    parser.add_argument("--state", type=Path, help="file of finished rounds, one JSON object a line")
    parser.add_argument(
        "--keep", type=Path, help="folder to work in, which is kept; source and undisturbed store are used again"
    )
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
    """Read the rounds that have been made."""
    if path is None or not path.exists():
        return []
    return [Outcome(**json.loads(line)) for line in path.read_text().splitlines()]


def run_rounds(
    world: World,
    cluster: NodeCluster,
    plan: Sequence[tuple[str, int]],
    known: Sequence[Outcome],
    options: argparse.Namespace,
) -> list[Outcome]:
    """Make the rounds that are left; gives all that were planned."""
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
                file.write(as_line(outcome) + "\n")
        if not outcome.faults:
            shutil.rmtree(world.store(f"{kind}-{number}"))
            (world.root / f"{kind}-{number}.trace.jsonl").unlink()
    return [done[key] for key in plan]


def report(outcomes: Sequence[Outcome]) -> int:
    """Print the table and the summary; gives the exit code."""
    extra = [vars(each) | {"num_events": len(each.events), "wrong": "; ".join(each.faults)} for each in outcomes]
    show(extra, COLUMNS)
    by_kind = {
        kind: {
            "rounds": len(of_kind := [each for each in outcomes if each.kind == kind]),
            "wrong": sum(bool(each.faults) for each in of_kind),
            "rows_compared": sum(each.num_rows for each in of_kind),
            "longest_stall_s": round(max(each.stall_s for each in of_kind), 1),
        }
        for kind in dict.fromkeys(each.kind for each in outcomes)
    }
    faults = [f"{each.kind} {each.number}: {fault}" for each in outcomes for fault in each.faults]
    figures = {name: sum(getattr(each, name) for each in outcomes) for name in ("effects", "deviations")}
    print(json.dumps({"kinds": by_kind, **figures, "faults": faults}))
    return 1 if faults else 0


if __name__ == "__main__":
    main()
