"""The table of a contest, and what bounds each number."""

from collections.abc import Mapping

from pipeline_bench.contest import Standing
from pipeline_bench.contestants import DAFT, LIMIT, LIMIT_PROCESSES, LOCAL, LOOP, RAY_DATA, RAY_FP32, STAGES
from retrieval_bench.measures import table

BUSY = 0.9  # of all cores: then they are the bound
MIB = 1 << 20
LIMITS = (LIMIT, LIMIT_PROCESSES)

RATIOS = {
    "three stages over the loop": (STAGES[3], LOOP),
    "three stages over the limit": (STAGES[3], LIMIT),
    "three stages over one": (STAGES[3], STAGES[1]),
    "local over the loop": (LOCAL, LOOP),
    "three stages over Ray Data in fp32": (STAGES[3], RAY_FP32),
    "three stages over Ray Data": (STAGES[3], RAY_DATA),
    "three stages over Daft": (STAGES[3], DAFT),
}
"""Of steady rates."""

HEADING = ["", "items/s", "of limit", "of loop", "CPU ms/item", "cores", "first s", "whole s", "peak MiB", "cosine"]


def show_standings(title: str, standings: Mapping[str, Standing], num_cores: int, item_flops: int) -> None:
    """Print the table, then a line for each contestant.

    Args:
        title: of the workload.
        standings: by name.
        num_cores: of this machine.
        item_flops: floating-point operations of both towers for one pair.
    """
    print(f"\n{title}\n")
    limit, loop = (rate_of(standings, name) for name in (LIMIT, LOOP))
    table([HEADING, *(_row(name, standing, limit, loop) for name, standing in standings.items())])
    print("\nwhat bounds them")
    for name in standings:
        print(f"  {name}: {bound(name, standings, num_cores, item_flops)}", flush=True)


def rate_of(standings: Mapping[str, Standing], name: str) -> float | None:
    """Steady items a second of a contestant; None where it took no part or ran too briefly."""
    return standings[name].median("items_per_s") if name in standings else None


def ratios(standings: Mapping[str, Standing]) -> dict[str, float]:
    """The ratios of steady rates that can be made."""
    pairs = {what: (rate_of(standings, a), rate_of(standings, b)) for what, (a, b) in RATIOS.items()}
    return {what: a / b for what, (a, b) in pairs.items() if a and b}


def bound(name: str, standings: Mapping[str, Standing], num_cores: int, item_flops: int) -> str:
    """What the steady rate of a contestant is limited by, with the figures that show it."""
    standing = standings[name]
    rate, cpu_ms, cores = (standing.median(number) for number in ("items_per_s", "cpu_ms", "cores"))
    if rate is None or cpu_ms is None or cores is None:
        return "too short to tell"
    parts = [_by_cores(cores, cpu_ms, num_cores)]
    forward_ms = _forward_ms(standings)
    if name in LIMITS:
        parts.append(f"{item_flops * rate / 1e9:,.0f} GFLOP/s at {item_flops / 1e9:.2f} GFLOP an item")
    elif forward_ms:
        parts.append(f"{cpu_ms - forward_ms:+.1f} ms beside the limit's {forward_ms:.1f}")
    if standing.shares():
        parts.append("inside " + ", ".join(_share(step, *shares) for step, shares in standing.shares().items()))
    return "; ".join(parts)


def _forward_ms(standings: Mapping[str, Standing]) -> float | None:
    """CPU milliseconds of the forward passes of an item, by whichever limit wastes less in waiting for its threads."""
    found = (standings[name].median("cpu_ms") for name in LIMITS if name in standings)
    return min((cpu_ms for cpu_ms in found if cpu_ms), default=None)


def _by_cores(cores: float, cpu_ms: float, num_cores: int) -> str:
    if cores >= BUSY * num_cores:
        return f"the cores, {cores:.2f} of {num_cores} busy, {cpu_ms:.1f} ms of CPU an item"
    return f"waiting: {cores:.2f} of {num_cores} cores busy, {cpu_ms:.1f} ms of CPU an item"


def _share(step: str, wall: float, cpu: float) -> str:
    return f"{step} {wall:.0%} of the time (CPU {cpu:.2f})"


def _row(name: str, standing: Standing, limit: float | None, loop: float | None) -> list[str]:
    rate = standing.median("items_per_s")
    return [
        name,
        _number(rate, 1),
        _ratio(rate, limit),
        _ratio(rate, loop),
        _number(standing.median("cpu_ms"), 1),
        _number(standing.median("cores"), 2),
        _number(standing.median("first_s"), 1),
        _number(standing.median("whole_s"), 1),
        _number((standing.median("peak_bytes") or 0) / MIB, 0),
        f"{standing.least_cosine:.5f}",
    ]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _ratio(rate: float | None, other: float | None) -> str:
    return f"{rate / other:.2f}" if rate and other else "-"
