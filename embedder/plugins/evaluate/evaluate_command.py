"""`embedder evaluate`: an evaluation of what a store has published, shown and saved."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.table import Table

from embedder.cli.options import AllowStoreCode, PublishedBy, ReadConfig, SearchedModel, StoreUri, command
from embedder.cli.results import Result, new_table
from embedder.cli.search_command import RerankOptions
from embedder.quantities import MIB, plural

if TYPE_CHECKING:
    from embedder.plugins.evaluate.evaluate_report import ConfidenceInterval, Evaluation, IndexFigures, RerankFigures

FILE_HELP = "Parquet, CSV or JSON Lines with the columns query and item_id; by default, the store's captions."
GROUP_HELP = "Column to split the figures by, of FILE or of the embeddings table."
NUM_HELP = "Most queries to ask; by default all of FILE, or 2,000 captions."
MAX_GROUPS_SHOWN = 30
MAX_HARD_SHOWN = 5


@command
def evaluate(
    read: ReadConfig,
    store: StoreUri = None,
    queries: Annotated[str | None, typer.Option(metavar="FILE", help=FILE_HELP)] = None,
    k: Annotated[int, typer.Option("-k", min=1, help="A depth to report, besides 1, 5 and 10.")] = 10,
    group: Annotated[str | None, typer.Option(metavar="COLUMN", help=GROUP_HELP)] = None,
    num_queries: Annotated[int | None, typer.Option(min=1, help=NUM_HELP)] = None,
    *,
    rerank: RerankOptions,
    out: Annotated[Path | None, typer.Option(help="Folder for evaluation.json and recall_latency.png.")] = None,
    version: PublishedBy = None,
    model: SearchedModel = None,
    allow_store_code: AllowStoreCode = False,
) -> Result:
    """Measure R@k, recall of the index, latency and memory, with confidence intervals."""
    run = read({"store": store})

    from embedder.plugins.evaluate.evaluate import EvaluationOptions, evaluate_tracked
    from embedder.plugins.evaluate.evaluate_outputs import save_files
    from embedder.retrieval.store_api import open_store

    options = EvaluationOptions(
        queries, k, group, num_queries, rerank.rerank or None, rerank.load(), rerank_timeout_s=rerank.rerank_timeout_s
    )
    opened = open_store(
        run.required_store,
        model=model or run.main_model,
        version=version,
        servables=run.model_sections,
        allow_store_code=allow_store_code,
    )
    if out is not None:
        save_files(out, {})  # else minutes of work would be lost at the end
    found = evaluate_tracked(opened, run, options, out)
    saved = save_evaluation(found, out) if out is not None else []
    return Result(found.model_dump(mode="json"), [*evaluation_parts(found), *saved])


def save_evaluation(found: "Evaluation", out: Path) -> list[RenderableType]:
    """Write the report and, if there is an index, the plot, each whole or not at all; return lines that name them.

    Raises:
        ConfigError: the folder can't be made or written.
    """
    from embedder.plugins.evaluate.evaluate_outputs import PLOT_NAME, evaluation_files, save_files

    files = evaluation_files(found)
    save_files(out, files)
    return [f"{'plot' if name == PLOT_NAME else 'report'}: {out / name}" for name in files]


def evaluation_parts(found: "Evaluation") -> list[RenderableType]:
    """Tables and notes, for the terminal."""
    asked = found.queries
    head = (
        f"{plural(asked.num_queries, 'query', 'queries')} ({asked.source}) with "
        f"{plural(asked.num_answers, 'right item')}; {plural(found.num_pictures, 'image')} of "
        f"{plural(found.num_items, 'item')}; in brackets, 95 % confidence intervals"
    )
    parts: list[RenderableType] = [head, "", _quality(found)]
    if found.groups:
        parts += ["", _groups(found)]
        if len(found.groups) > MAX_GROUPS_SHOWN:
            parts.append(f"and {plural(len(found.groups) - MAX_GROUPS_SHOWN, 'smaller group')}: see --json or --out")
    if found.index is not None:
        parts += ["", _speed(found.index), *_curve(found.index)]
    if found.rerank is not None:
        parts += ["", _rerank(found.rerank)]
    if found.hard:
        rows = [(each.query, f"{each.rank:,}") for each in found.hard[:MAX_HARD_SHOWN]]
        parts += ["", new_table("hard queries", "place of the right image", left=("hard queries",), rows=rows)]
    if found.encoding is not None:
        parts.append(f"encoding a text: p50 {found.encoding.p50_ms:.2f} ms, p99 {found.encoding.p99_ms:.2f} ms")
    return [*parts, *found.notes]


def _estimate(figure: "ConfidenceInterval") -> str:
    return f"{figure.value:.3f} ({figure.low:.3f}-{figure.high:.3f})"


def _quality(found: "Evaluation") -> Table:
    ks = list(found.model.r_at)
    table = _figure_table("text -> image", *(f"R@{k}" for k in ks), "MRR")
    table.add_row("model, exact search", *(_estimate(found.model.r_at[k]) for k in ks), _estimate(found.model.mrr))
    if found.model.ndcg_at_10 is not None:
        table.add_row("nDCG@10 of the grades", *("" for _ in ks), _estimate(found.model.ndcg_at_10))
    if found.index is not None:
        index = found.index
        table.add_row(f"through index {index.number}", *(_estimate(index.r_at[k]) for k in ks), "")
        cells = (_estimate(index.recall_at[k]) if k in index.recall_at else "" for k in ks)
        table.add_row("recall@k, index / exact", *cells, "")
    return table


def _rerank(found: "RerankFigures") -> Table:
    ks = list(found.r_at)
    late = f", {found.num_late:,} late" if found.num_late else ""
    refused = f", {found.num_refused:,} refused" if found.num_refused else ""
    table = _figure_table(
        f"re-ranker of {found.num_hits} hits{late}{refused}", *(f"R@{k}" for k in ks), "MRR", "p50, s", "p99, s"
    )
    table.add_row("before", *(_estimate(found.r_at_before[k]) for k in ks), _estimate(found.mrr_before), "", "")
    seconds = (f"{each / 1e3:.3f}" for each in (found.seconds.p50_ms, found.seconds.p99_ms))
    table.add_row("after", *(_estimate(found.r_at[k]) for k in ks), _estimate(found.mrr), *seconds)
    return table


def _groups(found: "Evaluation") -> Table:
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


def _speed(index: "IndexFigures") -> Table:
    figures = ("vectors", "files, MiB", "resident, MiB", "p50, ms", "p99, ms", "queries/s")
    table = _figure_table(f"index {index.number}: {index.design}", *figures)
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
        threads = plural(each.num_threads, "thread")
        if each.num_threads > 1:
            table.add_row(f"one query at a time, {threads}", "", "", "", "", "", f"{each.single_queries_per_s:,.0f}")
        table.add_row(f"all in one batch, {threads}", "", "", "", "", "", f"{each.batch_queries_per_s:,.0f}")
    return table


def _curve(index: "IndexFigures") -> list[RenderableType]:
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
    return new_table(*columns, left=columns[:1])
