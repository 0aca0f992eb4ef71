"""The contest: every contestant embeds the same items in a process of its own, in turns; medians of the rounds."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pipeline_bench.steady import steady_window, step_shares
from pipeline_bench.task import Event
from pipeline_bench.vectors import Vectors, check_equal
from pipeline_bench.watch import run_watched


@dataclass(frozen=True)
class Result:
    """What a contestant left behind.

    Attributes:
        finished: when its items were finished.
        vectors: of all items.
        calls: measurements of its steps, where it has any.
    """

    finished: list[Event]
    vectors: Vectors
    calls: Sequence[dict[str, Any]] = ()


@dataclass(frozen=True)
class Contestant:
    """Who takes part.

    Attributes:
        name: for the table.
        command: the command line that embeds all items and leaves its results in a folder.
        read: reads them.
    """

    name: str
    command: Callable[[Path], Sequence[str]]
    read: Callable[[Path], Result]


@dataclass(frozen=True)
class Turn:
    """One run of one contestant.

    Attributes:
        items_per_s: in the steady window; None where the run was too short for one.
        cpu_ms: CPU milliseconds of an item in that window, of all processes.
        cores: CPU seconds a second in it.
        first_s: from the command to the first finished items.
        whole_s: from the command to the end of its process.
        peak_bytes: memory of all processes (PSS).
        shares: of each step, its share of the window's time and CPU seconds a second.
    """

    items_per_s: float | None
    cpu_ms: float | None
    cores: float | None
    first_s: float
    whole_s: float
    peak_bytes: int
    shares: Mapping[str, tuple[float, float]]


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

    def shares(self) -> dict[str, tuple[float, float]]:
        """Of each step, medians of its share of the time and of its CPU."""
        found = [turn.shares for turn in self.turns]
        steps = [step for step in found[0] if all(step in shares for shares in found)]
        return {step: tuple(float(median(each[step][k] for each in found)) for k in (0, 1)) for step in steps}  # type: ignore[misc]

    def to_json(self) -> dict[str, Any]:
        """Medians, and every round."""
        numbers = {name: self.median(name) for name in NUMBERS}
        rounds = [{name: getattr(turn, name) for name in NUMBERS} for turn in self.turns]
        return numbers | {"least_cosine": self.least_cosine, "shares": self.shares(), "rounds": rounds}


def hold(
    contestants: Sequence[Contestant],
    folder: Path,
    num_rounds: int,
    timeout_s: float,
    say: Callable[[str], None],
) -> dict[str, Standing]:
    """Run all rounds.

    Each round begins with another contestant, so that none always follows the same one.

    Raises:
        ContestantFailed: one of them did.
        UnequalVectors: they did not compute the same.
    """
    turns: dict[str, list[Turn]] = {contestant.name: [] for contestant in contestants}
    cosines = dict.fromkeys(turns, 1.0)
    for number in range(num_rounds):
        vectors: dict[str, Vectors] = {}
        first = number % len(contestants)
        for contestant in [*contestants[first:], *contestants[:first]]:
            turn, vectors[contestant.name] = take_turn(contestant, folder / f"{number}-{contestant.name}", timeout_s)
            turns[contestant.name].append(turn)
            rate = "too short" if turn.items_per_s is None else f"{turn.items_per_s:,.1f} items/s"
            say(f"  round {number + 1} of {num_rounds}: {contestant.name}: {rate}, {turn.whole_s:.1f} s in all")
        least = check_equal({name: vectors[name] for name in turns})
        cosines = {name: min(cosines[name], least[name]) for name in turns}
    return {name: Standing(tuple(each), cosines[name]) for name, each in turns.items()}


def take_turn(contestant: Contestant, out: Path, timeout_s: float) -> tuple[Turn, Vectors]:
    """Run one contestant once; its files are deleted."""
    out.mkdir(parents=True)
    watched = run_watched(contestant.command(out), out, timeout_s)
    result = contestant.read(out)
    shutil.rmtree(out)
    window = steady_window(result.finished)
    cpu_s = watched.cpu_use.between(window.start_s, window.stop_s) if window else 0.0
    turn = Turn(
        items_per_s=window.items_per_s if window else None,
        cpu_ms=1e3 * cpu_s / window.num_items if window else None,
        cores=cpu_s / window.wall_s if window else None,
        first_s=result.finished[0][0] - watched.started_s,
        whole_s=watched.wall_s,
        peak_bytes=watched.peak_bytes,
        shares=step_shares(result.calls, window) if window else {},
    )
    return turn, result.vectors
