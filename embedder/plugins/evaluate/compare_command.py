"""`embedder compare`: two models on the same queries, shown and saved, with a verdict."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.table import Table

from embedder.cli.options import AllowStoreCode, ReadConfig, command
from embedder.cli.results import Result, new_table
from embedder.quantities import money, percent, plural, rate, size_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from embedder.plugins.evaluate.comparison_report import ComparedQuery, ComparedSide, Comparison, FigureDifference

SIDE_HELP = "A store, a publication STORE@RUN_ID, or a further model STORE#NAME."
FILE_HELP = "Table with query and item_id, relevance if graded, or position and clicked; by default, own captions."
GROUP_HELP = "Column to compare by, of FILE or of the embeddings table; else compare.group."
NUM_HELP = "Most queries to ask; by default all of FILE, or 2,000 captions."
MAX_GROUPS_SHOWN = 30
MAX_HARD_SHOWN = 5
REPORT_NAME = "comparison.json"
PAGE_NAME = "comparison.html"


@command
def compare(
    read: ReadConfig,
    before: Annotated[str, typer.Argument(metavar="A", help=SIDE_HELP)],
    after: Annotated[str, typer.Argument(metavar="B", help="The other, which may take the place of A.")],
    queries: Annotated[str | None, typer.Option(metavar="FILE", help=FILE_HELP)] = None,
    group: Annotated[str | None, typer.Option(metavar="COLUMN", help=GROUP_HELP)] = None,
    num_queries: Annotated[int | None, typer.Option(min=1, help=NUM_HELP)] = None,
    num_shown: Annotated[int, typer.Option(min=0, help="Most wins, losses and hard queries to show.")] = 12,
    out: Annotated[Path | None, typer.Option(help="Folder for comparison.json and comparison.html.")] = None,
    allow_store_code: AllowStoreCode = False,
) -> Result:
    """Compare two models on the same queries; exit 1 where a group lost more than the section `compare` allows."""
    run = read()

    from embedder.plugins.evaluate.compare import CompareOptions
    from embedder.plugins.evaluate.compare import compare as run_comparison
    from embedder.plugins.evaluate.evaluate_outputs import save_files

    options = CompareOptions(
        queries, group, num_queries, num_shown, run.compare, run.model_sections, allow_store_code=allow_store_code
    )
    if out is not None:
        save_files(out, {})  # else minutes of work would be lost at the end
    found = run_comparison(before, after, options)
    saved = save_comparison(found, out) if out is not None else []
    failure = "" if found.passed else f"compare: {found.verdict}"
    return Result(found.model_dump(mode="json"), [*comparison_parts(found), *saved], failure)


def save_comparison(found: "Comparison", out: Path) -> list[RenderableType]:
    """Write the report and the page, each whole or not at all; return lines that name them.

    Raises:
        ConfigError: the folder can't be made or written.
    """
    from embedder.plugins.evaluate.comparison_page import page_content
    from embedder.plugins.evaluate.evaluate_outputs import save_files

    save_files(out, {REPORT_NAME: found.model_dump_json(indent=2).encode(), PAGE_NAME: page_content(found)})
    return [f"report: {out / REPORT_NAME}", f"page: {out / PAGE_NAME}"]


def comparison_parts(found: "Comparison") -> list[RenderableType]:
    """Tables and notes, for the terminal."""
    head = (
        f"{plural(found.num_queries, 'query', 'queries')} ({found.queries}) with "
        f"{plural(found.num_answers, 'right item')}, over {plural(found.num_items, 'item')} that both have; "
        f"intervals of {found.confidence:.0%}"
    )
    parts: list[RenderableType] = [head, "", _differences(found.metrics, "metric")]
    if len(found.groups) > 1:
        parts += ["", _differences(found.groups[:MAX_GROUPS_SHOWN], f"group, {found.metric}")]
        if len(found.groups) > MAX_GROUPS_SHOWN:
            parts.append(f"and {plural(len(found.groups) - MAX_GROUPS_SHOWN, 'smaller group')}: see --json or --out")
    kept = f"{found.kept_of_top_ten:.1%} of the best ten stay, the first one is the same for {found.same_first:.1%}"
    parts += ["", kept, "", _sides(found.before, found.after)]
    if found.hard:
        parts += ["", _hard(found.hard[:MAX_HARD_SHOWN])]
    return [*parts, "", *found.notes, f"{'passed' if found.passed else 'REFUSED'}: {found.verdict}"]


def _differences(rows: "Sequence[FigureDifference]", what: str) -> Table:
    table = new_table(
        what, "queries", "first", "second", "difference", "interval", "verdict", "power", left=(what, "verdict")
    )
    for row in rows:
        table.add_row(
            row.name,
            f"{row.num_queries:,}",
            f"{row.before:.3f}",
            f"{row.after:.3f}",
            f"{row.difference:+.3f}",
            f"{row.low:+.3f} to {row.high:+.3f}",
            f"{row.verdict}{', breaks the rule' if row.fails else ''}",
            f"{row.power:.0%}",
        )
    return table


def _sides(before: "ComparedSide", after: "ComparedSide") -> Table:
    table = new_table("side", "model", "publication", "items/s", "cost of a million", "memory", "index recall@10")
    for side in (before, after):
        table.add_row(
            side.name,
            side.model,
            side.run_id,
            "" if side.items_per_s is None else rate(side.items_per_s),
            "" if side.cost_per_million is None else money(side.cost_per_million, side.currency),
            "" if side.peak_memory_bytes is None else size_text(side.peak_memory_bytes),
            "exact search" if side.index_recall_at_10 is None else percent(side.index_recall_at_10),
        )
    return table


def _hard(queries: "Sequence[ComparedQuery]") -> Table:
    rows = [(each.query, f"{each.rank_before:,}", f"{each.rank_after:,}") for each in queries]
    return new_table("hard for both", "place by the first", "by the second", left=("hard for both",), rows=rows)
