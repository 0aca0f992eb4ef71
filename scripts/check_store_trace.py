"""Check what real processes changed in a store against the rules of its protocol and the simulator's invariants.

    EMBEDDER_STORE_TRACE=trace.jsonl embedder embed ...
    python scripts/check_store_trace.py trace.jsonl [--store FOLDER]

Each process that has the variable appends its changes to the file (`embedder/store/trace.py`); processes of several
machines need a file each, as their clocks differ. The rules are in `docs/store-protocol.md`. With `--store` the files
that the trace leaves are compared with those that are there, and a trace that begins in a store's midlife can be read.
The last line is one JSON document: `effects`, `deviations`; exit 1 where there is a deviation.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedder.store.files import StoreFiles
from store_simulation.checker import Change, TraceChecker

MAX_SHOWN = 30


@dataclass(frozen=True)
class Checked:
    """Result of a check."""

    num_effects: int  # changes that were made, each deleted file for itself
    deviations: list[str]  # what did not hold


def read_changes(lines: Iterable[str]) -> tuple[dict[str, list[Change]], list[str]]:
    """Read a trace: changes of each store, in the order in which they began, and what can't be read."""
    begun: dict[tuple[str, int, int], Change] = {}
    stores: dict[str, list[Change]] = {}
    faults = []
    for number, line in enumerate(lines, 1):
        try:
            found = json.loads(line)
            key = (found["host"], found["pid"], found["id"])
            if "what" in found:
                begun[key] = change = _change(found)
                stores.setdefault(found["store"], []).append(change)
            else:
                change = begun[key]
                change.end_ns, change.outcome, change.tag = found["at_ns"], found["outcome"], found.get("tag") or None
        except (ValueError, LookupError, TypeError) as error:
            faults.append(f"line {number} of the trace is damaged: {type(error).__name__}: {error}")
    return stores, faults


def _change(found: dict[str, Any]) -> Change:
    content = found.get("content")
    return Change(
        writer=(found["host"], found["pid"]), begin_ns=found["at_ns"], end_ns=None, what=found["what"],
        paths=tuple(found["paths"]) if found["what"] == "delete" else (found["path"],),
        condition=found.get("condition"), content=None if content is None else content.encode(),
        size=found.get("size", 0),
    )  # fmt: skip


def judge(changes: Sequence[Change], address: str, files: StoreFiles | None = None) -> Checked:
    firsts = [each for each in changes if each.what == "put" and each.path in ("store.json", "CURRENT.json")]
    is_whole = bool(firsts) and firsts[0].condition == "absent"
    earlier = None if files is None else lambda path: files.read(path) if files.exists(path) else None
    will_go = frozenset(path for each in changes if each.what == "delete" for path in each.paths)
    checker = TraceChecker(is_whole, "://" not in address, earlier, will_go)
    events = [(change.begin_ns, 0, number, change) for number, change in enumerate(changes)]
    events += [(each.end_ns, 1, number, each) for number, each in enumerate(changes) if each.end_ns is not None]
    for _, is_end, _, change in sorted(events, key=lambda event: event[:3]):
        (checker.end if is_end else checker.begin)(change)
    checker.close()
    if files is not None:
        checker.compare(files.list(""))
    return Checked(checker.num_effects, checker.deviations)


def check(trace: Path, store: str | Path | None = None) -> Checked:
    files = None if store is None else StoreFiles(store)
    with trace.open(encoding="utf-8") as lines:
        stores, deviations = read_changes(lines)
    if files is not None and files.address not in stores:
        deviations.append(f"the trace has no change of {files.address}; it is of {', '.join(sorted(stores)) or 'none'}")
    num_effects = 0
    for address, changes in sorted(stores.items()):
        found = judge(changes, address, files if files is not None and files.address == address else None)
        num_effects += found.num_effects
        deviations += found.deviations
    return Checked(num_effects, deviations)


def main() -> None:
    parser = argparse.ArgumentParser(description="Check what real processes changed in a store.")
    parser.add_argument("trace", type=Path, metavar="FILE")
    parser.add_argument("--store", metavar="FOLDER", help="folder or URI, whose files are compared")
    options = parser.parse_args()
    if not options.trace.is_file():
        parser.error(f"{options.trace}: no such file; processes with EMBEDDER_STORE_TRACE={options.trace} write it")
    found = check(options.trace, options.store)
    for deviation in found.deviations[:MAX_SHOWN]:
        print(f"DEVIATION {deviation}")
    print(json.dumps({"effects": found.num_effects, "deviations": len(found.deviations)}))
    sys.exit(1 if found.deviations else 0)


if __name__ == "__main__":
    main()
