"""Ours beside others' indexes, each in a process and a group of its own, in rounds in which they take turns."""

import json
import os
from pathlib import Path
from statistics import median

from large_index_bench.cgroups import run_limited
from large_index_bench.rivals import LIMITED, UNLIMITED

NUM_ROUNDS = 3
SCRIPT = Path(__file__).with_name("rivals.py")


def compare(
    folder: Path, settings: dict, limits: dict[str, int], parent: Path | None, pythons: dict[str, str]
) -> dict[str, dict]:
    """Build each rival, and serve all in turns; one that fails, as for want of memory, says so instead."""
    found: dict[str, dict] = {}
    for name, python in pythons.items():
        path = folder / f"rival-{name}.json"
        if not path.exists():
            path.write_text(json.dumps(run_rival("build", name, folder, settings, parent, limits["build"], python)))
        found[name] = {"build": json.loads(path.read_text()), "rounds": []}
    ours: list[dict] = []
    for _ in range(NUM_ROUNDS):
        command = ["-m", "large_index_bench.steps", "serve", str(folder), json.dumps(settings | {"filters": False})]
        line, _ = run_limited(command, parent, limits["serve"])
        ours.append(json.loads(line) | {"load": os.getloadavg()[0]})
        for name, python in pythons.items():
            if "failed" not in found[name]["build"]:
                each = settings | {"effort": (found[name]["rounds"] or [{}])[0].get("effort")}
                served = run_rival("serve", name, folder, each, parent, limits["serve"], python)
                found[name]["rounds"].append(served | {"load": os.getloadavg()[0]})
    return {"ours": _medians(ours), **{name: each | _medians(each["rounds"]) for name, each in found.items()}}


def names(parent: Path | None) -> tuple[str, ...]:
    """Rivals that take part: with a limit of memory those that may fit."""
    return LIMITED if parent is not None else (*LIMITED, *UNLIMITED)


def rows(found: dict[str, dict]) -> list[str]:
    """Write what was found as lines for people."""
    lines = []
    for name, each in found.items():
        build = each.get("build", {})
        failed = each.get("failed") or build.get("failed")
        built = ""
        if "design" in build:
            built = f" ({build['design']}, built in {build['build_s']:.0f} s, {build['build_cpu_s']:.0f} of CPU)"
        said = failed or (
            f"recall {each['recall_at_10']:.3f}, p50 {each['p50_ms']:.2f} ms, p99 {each['p99_ms']:.2f} ms, "
            f"{each['queries_per_s']:.0f} queries/s, {each['own_bytes'] / 2**20:,.0f} MiB of its own, load "
            f"{each['load']:.1f}"
        )
        lines.append(f"  {name}{built}: {said}")
    return lines


def run_rival(
    step: str, name: str, folder: Path, settings: dict, parent: Path | None, limit_bytes: int, python: str
) -> dict:
    """Run a step of a rival; returns what it measured, or how it failed."""
    command = ["-P", str(SCRIPT), step, name, str(folder), json.dumps(settings)]
    try:
        line, group_bytes = run_limited(command, parent, limit_bytes, python)
    except SystemExit as failure:
        return {"failed": str(failure).rsplit("] ", maxsplit=1)[-1]}
    return json.loads(line) | {"group_bytes": group_bytes}


def _medians(rounds: list[dict]) -> dict:
    kept = [each for each in rounds if "failed" not in each]
    if not kept:
        return rounds[0] if rounds else {}
    keys = ("recall_at_10", "p50_ms", "p99_ms", "queries_per_s", "own_bytes", "load")
    effort = {"effort": kept[0]["effort"]} if "effort" in kept[0] else {}
    return effort | {key: median(each[key] for each in kept) for key in keys}
