"""Simulate writers and readers of one store that are interrupted anywhere, and check what must hold after every change.

    python scripts/simulate_store.py [--schedules N] [--seed S] [--processes 2] [--plant FAULT]
    python scripts/simulate_store.py --deletion-vectors           # rows that leave are marked, not rewritten
    python scripts/simulate_store.py --all-faults                 # plant each fault: how many schedules find it?
    python scripts/simulate_store.py --list-faults
    python scripts/simulate_store.py --replay '{"operations": ...}'

The store's own code runs on a simulated bucket, or a disk with a volatile half. A schedule says which commands
run and where each is paused, killed, cut off from power, refused, or left without its answer. What must hold is in
`docs/store-protocol.md`. A failing schedule is printed with its seed, and again without what it fails without. The last
line is one JSON document; exit 1 where there is a violation (with --all-faults: where a fault is not found).
"""

import argparse
import gc
import json
import logging
import multiprocessing
import sys
import time
from random import Random

from store_simulation import patches, schedules
from store_simulation.patches import FAULTS, plant
from store_simulation.schedules import draw, run_schedule

MAX_SHOWN = 5
BATCH = 250


def prepare(fault: str | None = None, *, marks: bool = False) -> None:
    """Make this process a simulator's; the stores that schedules begin with are made before a fault is planted."""
    logging.disable(logging.CRITICAL)
    patches.install(marks=marks)
    for on_disk in (False, True):
        schedules.base(on_disk)
        for name in schedules.WEIGHTS | schedules.OTHERS:
            schedules.typical(name, on_disk)
    if fault is not None:
        plant(fault)
    gc.collect()
    gc.freeze()
    gc.disable()


def find(seeds: range) -> tuple[int, list[tuple[int, tuple[str, ...]]]]:
    """Run schedules; number of those that ran, and the failing seeds with what did not hold."""
    found = [(seed, run_schedule(draw(Random(seed))).violations) for seed in seeds]
    gc.collect(0)  # what is remembered is older
    return len(seeds), [each for each in found if each[1]]


def simulate(options: argparse.Namespace) -> int:
    began_s = time.monotonic()
    prepare(options.plant, marks=options.deletion_vectors)
    num_run, failing = 0, list[tuple[int, tuple[str, ...]]]()
    seeds = range(options.seed, options.seed + options.schedules)
    with multiprocessing.get_context("fork").Pool(options.processes) as pool:
        for number, found in pool.imap(find, (seeds[at : at + BATCH] for at in range(0, len(seeds), BATCH))):
            num_run += number
            failing += found
            if found and options.plant:
                break
        pool.terminate()
    for seed, violations in failing[:MAX_SHOWN]:
        show(seed, violations)
    seconds = round(time.monotonic() - began_s, 2)
    print(json.dumps({"schedules": num_run, "violations": len(failing), "seconds": seconds}))
    return 1 if failing else 0


def show(seed: int, violations: tuple[str, ...]) -> None:
    print(f"seed {seed}: {'; '.join(violations[:3])}")
    print(f"    {schedules.to_json(draw(Random(seed)))}")
    smaller = schedules.shrink(draw(Random(seed)))
    print(f"    shrunk to {schedules.to_json(smaller)}: {'; '.join(run_schedule(smaller).violations[:3])}")


def find_fault(asked: tuple[str, int, int]) -> tuple[int | None, float]:
    (name, seed, num_schedules), began_s = asked, time.monotonic()
    plant(name)
    for number in range(num_schedules):
        if run_schedule(draw(Random(seed + number))).violations:
            return number + 1, time.monotonic() - began_s
    return None, time.monotonic() - began_s


def find_all_faults(options: argparse.Namespace) -> int:
    began_s = time.monotonic()
    prepare()
    survivors, num_run = [], 0
    with multiprocessing.get_context("fork").Pool(options.processes, maxtasksperchild=1) as pool:
        asked = [(each.name, options.seed + options.skip.get(each.name, 0), options.schedules) for each in FAULTS]
        print("| fault | what the store does wrong | schedules until found | s |\n|---|---|---|---|")
        for fault, (number, seconds) in zip(FAULTS, pool.imap(find_fault, asked), strict=True):
            survivors += [fault.name] if number is None else []
            num_run += number or options.schedules
            found = "NOT FOUND" if number is None else f"{number:,}"
            print(f"| {fault.name} | {fault.description} | {found} | {seconds:.1f} |", flush=True)
    result = {"faults": len(FAULTS), "survivors": survivors, "seconds": round(time.monotonic() - began_s, 2)}
    print(json.dumps(result | {"schedules": num_run}))
    return 1 if survivors else 0


def replay(text: str) -> int:
    outcome = run_schedule(schedules.from_json(text))
    for violation in outcome.violations:
        print(violation)
    result = {"schedules": 1, "violations": len(outcome.violations), "results": outcome.results, "items": outcome.items}
    print(json.dumps(result))
    return 1 if outcome.violations else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--deletion-vectors", action="store_true", help="mark the rows that leave")
    parser.add_argument("--plant", metavar="FAULT", choices=[each.name for each in FAULTS])
    parser.add_argument("--all-faults", action="store_true")
    parser.add_argument("--skip", type=json.loads, default={}, help="JSON: by fault, so many don't find it")
    parser.add_argument("--list-faults", action="store_true")
    parser.add_argument("--replay", metavar="SCHEDULE")
    options = parser.parse_args()
    if options.list_faults:
        for each in FAULTS:
            print(f"{each.name}: {each.description}")
        print(json.dumps({"faults": [each.name for each in FAULTS]}))
        return 0
    if options.replay is not None:
        prepare(options.plant, marks=options.deletion_vectors)
        return replay(options.replay)
    return find_all_faults(options) if options.all_faults else simulate(options)


if __name__ == "__main__":
    sys.exit(main())
