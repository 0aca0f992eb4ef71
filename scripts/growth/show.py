"""The tables of growth."""

from collections.abc import Mapping, Sequence

from growth.embedding import Embedding
from growth.nights import Taken
from retrieval_bench.measures import table

MIB = 1 << 20
COSTS = ["items", "whole ms/item", "CPU", "steady ms/item", "CPU", "peak MiB"]
KINDS = ["kind of process", "number", "early MiB", "late MiB", "late - early", "peak MiB"]
NAMES = ["names", "what", "wall s", "CPU s", "CPU us/name", "peak MiB"]


def show_costs(runs: Sequence[Embedding]) -> None:
    """One line for each number of items."""
    table([COSTS, *(_costs(run) for run in runs)])


def _costs(run: Embedding) -> list[str]:
    times = (run.whole_ms, run.whole_cpu_ms, run.steady_ms, run.steady_cpu_ms)
    return [f"{run.num_items:,}", *("-" if ms is None else f"{ms:.1f}" for ms in times), _mib(run.peak_bytes)]


def show_kinds(run: Embedding) -> None:
    """One line for each kind of process of a run."""
    print(f"\n{run.num_items:,} items: medians of the second and of the last quarter of the time")
    rows = [KINDS]
    for kind, found in run.by_kind.items():
        grown = None if found.early is None or found.late is None else found.late - found.early
        sizes = (found.early, found.late, grown, found.peak)
        rows.append([kind, str(found.num_processes), *map(_mib, sizes)])
    table(rows)


def show_names(found: Mapping[int, Mapping[str, Taken]]) -> None:
    """One line for each command over each number of names."""
    rows = [NAMES]
    for num_names, taken in found.items():
        for what, each in taken.items():
            us = 1e6 * each.cpu_s / num_names
            rows.append(
                [f"{num_names:,}", what, f"{each.wall_s:.1f}", f"{each.cpu_s:.1f}", f"{us:.1f}", _mib(each.peak_bytes)]
            )
    table(rows)


def _mib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / MIB:,.0f}"
