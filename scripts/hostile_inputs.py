"""Hostile inputs, made by a seeded mutator from good files of every format, through the real decode step.

    python scripts/hostile_inputs.py [NUM] [SEED] [--keep DIR] [--show NAME]

Half are crafted by hand (decompression bombs, absurd sizes, endless videos, playlists, tars that climb, odd names and
captions; NUM permitting, all of them), the others are good files damaged at random: flipped bits, truncations, swapped
headers and the like. Each must be embedded or rejected with a reason, without a crash, a hang over 30 s, or more
memory than the decoding child is allowed. Prints what happened and, as its last line, one JSON object; exit 1 where an
input broke that promise. The same NUM and SEED make the same inputs.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

from hostile.files import Make, good_files, media_cases
from hostile.inputs import MEMORY_BYTES, Outcome, Trials, mutate, source_cases

MAX_FILE_S = 30.0
STATES = ("embedded", "embedded_in_part", "rejected")
SLOW_S = 10.0  # inputs that take longer are shown
MAX_OWN_BYTES = 1 << 30  # of the process that lists and asks, libraries included


def main() -> None:
    parser = argparse.ArgumentParser(description="Hostile inputs through the decode step.")
    parser.add_argument("num", nargs="?", type=int, default=1000)
    parser.add_argument("seed", nargs="?", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="keep the inputs there")
    parser.add_argument("--show", help="print all about the inputs with this in their name")
    options = parser.parse_args()
    root = options.keep or Path(tempfile.mkdtemp(prefix="hostile-"))
    trials = Trials()
    try:
        outcomes = []
        for name, make in cases(options.num, options.seed):
            if options.show is None or options.show in name:
                outcomes.append(try_one(trials, name, make, root))
                if options.show is not None or outcomes[-1].faults or outcomes[-1].seconds > SLOW_S:
                    print(outcomes[-1], flush=True)
    finally:
        trials.close()
        if options.keep is None:
            remove(root)
    sys.exit(report(outcomes, options.seed))


def cases(num: int, seed: int) -> Iterator[tuple[str, Make]]:
    """Crafted and damaged inputs by turns, until there are `num`."""
    rng = Random(seed)
    good = good_files()
    crafted = [*media_cases(good), *source_cases(good)]
    rng.shuffle(crafted)
    for number in range(num):
        if number % 2 == 0 and crafted:
            yield crafted.pop()
        else:
            yield damaged(Random(f"{seed} {number}"), number, good)


def damaged(rng: Random, number: int, good: dict[str, bytes]) -> tuple[str, Make]:
    """A good file, damaged; media often have a caption beside them, which must survive."""
    name = rng.choice(sorted(good))
    content, what = mutate(rng, good[name], good[rng.choice(sorted(good))])
    with_caption = rng.random() < 0.3

    def make(folder: Path) -> None:
        (folder / name).write_bytes(content)
        if with_caption and Path(name).suffix not in (".tar", ".csv", ".jsonl", ".parquet", ".txt", ".json"):
            (folder / name).with_suffix(".txt").write_text("a red car")

    return f"{number}: {what} of {name}", make


def try_one(trials: Trials, name: str, make: Make, root: Path) -> Outcome:
    folder = Path(tempfile.mkdtemp(dir=root))
    try:
        make(folder)
        outcome = trials.run(name, folder)
    finally:
        remove(folder)
    num_files = max(1, outcome.num_items)
    if outcome.seconds > MAX_FILE_S * num_files:
        outcome.faults.append(f"took {outcome.seconds:.1f} s for {num_files} item(s)")
    if outcome.child_peak_bytes > MEMORY_BYTES:
        outcome.faults.append(f"a decoder took {outcome.child_peak_bytes / 2**20:,.0f} MiB")
    if outcome.peak_bytes > MAX_OWN_BYTES:
        outcome.faults.append(f"the reader took {outcome.peak_bytes / 2**20:,.0f} MiB")
    return outcome


def remove(folder: Path) -> None:
    """Delete a folder whose names may be no text."""
    shutil.rmtree(os.fsencode(folder))


def report(outcomes: list[Outcome], seed: int) -> int:
    faults = [(outcome.name, fault) for outcome in outcomes for fault in outcome.faults]
    slowest = max(outcomes, key=lambda outcome: outcome.seconds / max(1, outcome.num_items))
    reasons = Counter(reason for outcome in outcomes for reason in outcome.reasons)
    tally = {
        "inputs": len(outcomes), "items": sum(outcome.num_items for outcome in outcomes),
        **{state: sum(outcome.states[state] for outcome in outcomes) for state in STATES},
        "sources_refused": sum(outcome.refused is not None for outcome in outcomes),
        "crashes": sum("crashed" in fault for _, fault in faults),
        "hangs": sum("hung" in fault or " s for " in fault for _, fault in faults),
        "other_faults": sum(not any(text in fault for text in ("crashed", "hung", " s for ")) for _, fault in faults),
        "slowest_s": round(slowest.seconds / max(1, slowest.num_items), 2), "slowest": slowest.name,
        "decoder_peak_mib": max(outcome.child_peak_bytes for outcome in outcomes) >> 20,
        "reader_peak_mib": max(outcome.peak_bytes for outcome in outcomes) >> 20, "seed": seed,
    }  # fmt: skip
    for name, fault in faults:
        print(f"FAULT {name}: {fault}")
    for reason, num in reasons.most_common():
        print(f"{num:7,}  {reason}")
    for key, value in tally.items():
        print(f"{key:18} {value}")
    print(json.dumps(tally | {"reasons": dict(reasons), "faults": faults}))
    return 1 if faults else 0


if __name__ == "__main__":
    main()
