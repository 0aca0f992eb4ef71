"""The contest: every contestant embeds the same items in a process of its own, in turns; medians of the rounds.

Then the table, and what bounds each number.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import embedder
from harness import MIB, number, run_watched, table
from pipeline_bench.contestants import NAMES, Contestant
from pipeline_bench.steady import last_stage_events, read_calls, steady_window, step_shares
from pipeline_bench.task import read_finished
from pipeline_bench.vectors import Vectors, check_equal, from_table, read_files

BUSY = 0.9  # of all cores: then they are the bound
LIMITS = (NAMES["limit"], NAMES["processes"])
RATIOS = {
    "three stages over the loop": ("ray3", "loop"),
    "three stages over the limit": ("ray3", "limit"),
    "three stages over the library's loop": ("ray3", "library"),
    "three stages over one": ("ray3", "ray1"),
    "local over the loop": ("local", "loop"),
    "three stages over Ray Data in fp32": ("ray3", "raydata32"),
    "three stages over Ray Data": ("ray3", "raydata"),
    "three stages over Daft": ("ray3", "daft"),
}
"""Of steady rates."""

HEADING = ["", "items/s", "of limit", "of loop", "CPU ms/item", "cores", "first s", "whole s", "peak MiB", "cosine"]


@dataclass(frozen=True)
class Turn:
    """One run of one contestant."""

    items_per_s: float | None  # in the steady window; None where the run was too short for one
    cpu_ms: float | None  # CPU milliseconds of an item in that window, of all processes
    cores: float | None  # CPU seconds a second in it
    first_s: float  # from the command to the first finished items
    whole_s: float  # from the command to the end of its process
    peak_bytes: int  # memory of all processes (PSS)
    shares: Mapping[str, tuple[float, float]]  # of each step, its share of the window's time and CPU seconds a second


NUMBERS = ("items_per_s", "cpu_ms", "cores", "first_s", "whole_s", "peak_bytes")


@dataclass(frozen=True)
class Standing:
    """What the rounds of one contestant come to: medians, and how far its vectors are from the first contestant's."""

    turns: tuple[Turn, ...]
    least_cosine: float

    def median(self, name: str) -> float | None:
        """The median of one of `NUMBERS`; None where a round has none."""
        values = [getattr(turn, name) for turn in self.turns]
        return None if None in values else float(median(values))

    def shares(self) -> dict[str, tuple[float, ...]]:
        """Of each step, medians of its share of the time and of its CPU."""
        found = [turn.shares for turn in self.turns]
        steps = [step for step in found[0] if all(step in shares for shares in found)]
        return {step: tuple(float(median(each[step][k] for each in found)) for k in (0, 1)) for step in steps}

    def to_json(self) -> dict[str, Any]:
        numbers = {name: self.median(name) for name in NUMBERS}
        rounds = [{name: getattr(turn, name) for name in NUMBERS} for turn in self.turns]
        return numbers | {"least_cosine": self.least_cosine, "shares": self.shares(), "rounds": rounds}


def hold(
    contestants: Sequence[Contestant], folder: Path, num_rounds: int, timeout_s: float, *, centred: bool = False
) -> dict[str, Standing]:
    """Run all rounds, and print a line about each run.

    Each round begins with another contestant, so that none always follows the same one.
    """
    turns: dict[str, list[Turn]] = {contestant.name: [] for contestant in contestants}
    cosines = dict.fromkeys(turns, 1.0)
    for round_ in range(num_rounds):
        vectors: dict[str, Vectors] = {}
        first = round_ % len(contestants)
        for contestant in [*contestants[first:], *contestants[:first]]:
            turn, vectors[contestant.name] = take_turn(contestant, folder / f"{round_}-{contestant.name}", timeout_s)
            turns[contestant.name].append(turn)
            rate = "too short" if turn.items_per_s is None else f"{turn.items_per_s:,.1f} items/s"
            print(
                f"  round {round_ + 1} of {num_rounds}: {contestant.name}: {rate}, {turn.whole_s:.1f} s in all",
                flush=True,
            )
        least = check_equal({name: vectors[name] for name in turns}, centred=centred)
        cosines = {name: min(cosines[name], least[name]) for name in turns}
    return {name: Standing(tuple(each), cosines[name]) for name, each in turns.items()}


def take_turn(contestant: Contestant, out: Path, timeout_s: float) -> tuple[Turn, Vectors]:
    """Run one contestant once; its files are deleted."""
    out.mkdir(parents=True)
    watched = run_watched(contestant.command(out), out, timeout_s, checkout=contestant.checkout)
    calls = []
    if contestant.has_store:
        calls = read_calls(out / "store")
        finished, vectors = last_stage_events(calls), from_table(embedder.open_store(out / "store").to_arrow())
    else:
        finished, vectors = read_finished(out), read_files(out)
    shutil.rmtree(out)
    window = steady_window(finished)
    cpu_s = watched.cpu_use.between(window.start_s, window.stop_s) if window else 0.0
    turn = Turn(
        items_per_s=window.items_per_s if window else None,
        cpu_ms=1e3 * cpu_s / window.num_items if window else None,
        cores=cpu_s / window.wall_s if window else None,
        first_s=finished[0][0] - watched.started_s,
        whole_s=watched.wall_s,
        peak_bytes=watched.peak_bytes,
        shares=step_shares((call for call in calls if "load" not in call["step"]), window) if window else {},
    )
    return turn, vectors


def show_standings(title: str, standings: Mapping[str, Standing], num_cores: int, item_flops: int) -> None:
    """Print the table, then a line for each contestant."""
    print(f"\n{title}\n")
    limit, loop = _rate_of(standings, "limit"), _rate_of(standings, "loop") or _rate_of(standings, "library")
    table([HEADING, *(_row(name, standing, limit, loop) for name, standing in standings.items())])
    print("\nwhat bounds them")
    for name in standings:
        print(f"  {name}: {bound(name, standings, num_cores, item_flops)}", flush=True)


def ratios(standings: Mapping[str, Standing]) -> dict[str, float]:
    """The ratios of steady rates that can be made."""
    pairs = {what: (_rate_of(standings, a), _rate_of(standings, b)) for what, (a, b) in RATIOS.items()}
    return {what: a / b for what, (a, b) in pairs.items() if a and b}


def paired_ratios(
    standings: Mapping[str, Standing], contestants: Sequence[Contestant]
) -> dict[str, dict[str, tuple[float, ...]]]:
    """Compare this checkout's pipelines with another checkout's and with a library's loop, round by round.

    Prints what it finds.

    Returns:
        By the name of the pair and by figure: the median of this one's value over the other's in the same round, the
        least and the largest; the window's rate, CPU of an item, seconds to the first item. A pair has the name of the
        other checkout's, or of both: `local over library loop`.
    """
    pairs = {
        other.name: (other.name.removesuffix(f" of {other.checkout.name}"), other.name)
        for other in contestants
        if other.checkout is not None
    }
    if (library := NAMES["library"]) in standings:
        own = [each.name for each in contestants if each.has_store and each.checkout is None]
        pairs |= {f"{name} over {library}": (name, library) for name in own}
    found: dict[str, dict[str, tuple[float, ...]]] = {}
    for title, (name, other_name) in pairs.items():
        turns = list(zip(standings[name].turns, standings[other_name].turns, strict=True))
        found[title] = {}
        for figure in ("items_per_s", "cpu_ms", "first_s"):
            values = [(getattr(one, figure), getattr(two, figure)) for one, two in turns]
            if all(one and two for one, two in values):
                rounds = [one / two for one, two in values]
                found[title][figure] = float(median(rounds)), min(rounds), max(rounds)
        shown = (f"{figure} {mid:.2f} [{low:.2f}, {high:.2f}]" for figure, (mid, low, high) in found[title].items())
        what = title if " over " in title else f"over {title}"
        print(f"  {what}, {len(turns)} rounds: {', '.join(shown)}", flush=True)
    return found


def _rate_of(standings: Mapping[str, Standing], key: str) -> float | None:
    """Steady items a second of a contestant; None where it took no part or ran too briefly."""
    return standings[NAMES[key]].median("items_per_s") if NAMES[key] in standings else None


def bound(name: str, standings: Mapping[str, Standing], num_cores: int, item_flops: int) -> str:
    """What the steady rate of a contestant is limited by, with the figures that show it."""
    standing = standings[name]
    rate, cpu_ms, cores = (standing.median(figure) for figure in ("items_per_s", "cpu_ms", "cores"))
    if rate is None or cpu_ms is None or cores is None:
        return "too short to tell"
    if cores >= BUSY * num_cores:
        parts = [f"the cores, {cores:.2f} of {num_cores} busy, {cpu_ms:.1f} ms of CPU an item"]
    else:
        parts = [f"waiting: {cores:.2f} of {num_cores} cores busy, {cpu_ms:.1f} ms of CPU an item"]
    # Of the two limits, the one that wastes less in waiting for its threads.
    forward = [standings[limit].median("cpu_ms") for limit in LIMITS if limit in standings]
    forward_ms = min((each for each in forward if each), default=None)
    if name in LIMITS:
        parts.append(f"{item_flops * rate / 1e9:,.0f} GFLOP/s at {item_flops / 1e9:.2f} GFLOP an item")
    elif forward_ms:
        parts.append(f"{cpu_ms - forward_ms:+.1f} ms beside the limit's {forward_ms:.1f}")
    shares = [f"{step} {wall:.0%} of the time (CPU {cpu:.2f})" for step, (wall, cpu) in standing.shares().items()]
    return "; ".join([*parts, *(["inside " + ", ".join(shares)] if shares else [])])


def _row(name: str, standing: Standing, limit: float | None, loop: float | None) -> list[str]:
    rate = standing.median("items_per_s")
    over = [f"{rate / other:.2f}" if rate and other else "-" for other in (limit, loop)]
    figures = (("cpu_ms", 1), ("cores", 2), ("first_s", 1), ("whole_s", 1))
    shown = [number(standing.median(figure), digits) for figure, digits in figures]
    peak = number((standing.median("peak_bytes") or 0) / MIB, 0)
    return [name, number(rate, 1), *over, *shown, peak, f"{standing.least_cosine:.5f}"]
