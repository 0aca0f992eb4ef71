"""An evaluation as a person reads it."""

from rich.console import RenderableType
from rich.table import Table

from embedder.cli.tables import MIB, new_table
from embedder.evaluation.intervals import ConfidenceInterval
from embedder.evaluation.report import Evaluation, IndexFigures

MAX_GROUPS_SHOWN = 30


def evaluation_parts(found: Evaluation) -> list[RenderableType]:
    """Tables and notes, for the terminal."""
    asked = found.queries
    head = (
        f"{asked.num_queries:,} queries ({asked.source}) with {asked.num_answers:,} right items; "
        f"{found.num_pictures:,} pictures of {found.num_items:,} items; in brackets, 95 % confidence intervals"
    )
    parts: list[RenderableType] = [head, "", _quality(found)]
    if found.groups:
        parts += ["", _groups(found)]
        if len(found.groups) > MAX_GROUPS_SHOWN:
            parts.append(f"and {len(found.groups) - MAX_GROUPS_SHOWN:,} smaller groups: see --json or --out")
    if found.index is not None:
        parts += ["", _speed(found.index), *_curve(found.index)]
    if found.encoding is not None:
        parts.append(f"encoding a text: p50 {found.encoding.p50_ms:.2f} ms, p99 {found.encoding.p99_ms:.2f} ms")
    return [*parts, *found.notes]


def _estimate(figure: ConfidenceInterval) -> str:
    """A figure with its interval."""
    return f"{figure.value:.3f} ({figure.low:.3f}-{figure.high:.3f})"


def _quality(found: Evaluation) -> Table:
    ks = list(found.model.r_at)
    table = _figure_table("text -> picture", *(f"R@{k}" for k in ks), "MRR")
    table.add_row("model, exact search", *(_estimate(found.model.r_at[k]) for k in ks), _estimate(found.model.mrr))
    if found.index is not None:
        index = found.index
        table.add_row(f"through index {index.number}", *(_estimate(index.r_at[k]) for k in ks), "")
        cells = (_estimate(index.recall_at[k]) if k in index.recall_at else "" for k in ks)
        table.add_row("recall@k, index / exact", *cells, "")
    return table


def _groups(found: Evaluation) -> Table:
    ks = list(found.model.r_at)
    has_index = found.index is not None
    table = _figure_table(
        "group", "queries", *(f"R@{k}" for k in ks), "MRR", *([f"R@{ks[-1]}, index"] if has_index else [])
    )
    for group in found.groups[:MAX_GROUPS_SHOWN]:
        through = group.r_at_through_index
        table.add_row(
            group.name,
            f"{group.num_queries:,}{' (few)' if group.is_small else ''}",
            *(_estimate(group.r_at[k]) for k in ks),
            _estimate(group.mrr),
            *([] if through is None else [_estimate(through[ks[-1]])]),
        )
    return table


def _speed(index: IndexFigures) -> Table:
    table = _figure_table(
        f"index {index.number}: {index.design}",
        "vectors",
        "files, MiB",
        "resident, MiB",
        "p50, ms",
        "p99, ms",
        "queries/s",
    )
    latency = index.one_thread
    table.add_row(
        "one query at a time, 1 thread",
        f"{index.num_vectors:,}",
        f"{index.size_bytes / MIB:.1f}",
        f"{index.resident_bytes / MIB:.1f}",
        f"{latency.p50_ms:.3f}",
        f"{latency.p99_ms:.3f}",
        f"{latency.queries_per_s:,.0f}",
    )
    for each in index.throughput:
        threads = f"{each.num_threads} thread{'s' if each.num_threads > 1 else ''}"
        if each.num_threads > 1:
            table.add_row(f"one query at a time, {threads}", "", "", "", "", "", f"{each.single_queries_per_s:,.0f}")
        table.add_row(f"all in one batch, {threads}", "", "", "", "", "", f"{each.batch_queries_per_s:,.0f}")
    return table


def _curve(index: IndexFigures) -> list[RenderableType]:
    if len(index.curve) < 2:
        return []
    table = _figure_table("setting", "recall@10", "p50, ms", "p99, ms", "queries/s, 1 thread")
    for point in index.curve:
        name = ", ".join(f"{key} {value}" for key, value in point.parameters.items())
        table.add_row(
            f"{name}{' (published)' if point.is_published else ''}",
            _estimate(point.recall_at_10),
            f"{point.p50_ms:.3f}",
            f"{point.p99_ms:.3f}",
            f"{point.queries_per_s:,.0f}",
        )
    return ["", table]


def _figure_table(*columns: str) -> Table:
    """An empty table of a column of names and columns of figures."""
    return new_table(*columns, left=columns[:1])
