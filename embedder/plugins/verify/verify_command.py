"""`embedder verify`: the stages against the unsplit towers, and against what a store has published."""

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table

from embedder.cli.options import Dtype, ModelUri, NumStages, PlanFile, ReadConfig, command, source_override
from embedder.cli.results import Result, new_table
from embedder.quantities import MIB, plural

if TYPE_CHECKING:
    from embedder.plugins.verify.verify import Verification


@command
def verify(
    read: ReadConfig,
    source: Annotated[str | None, typer.Argument(help="What to verify with; the shipped images otherwise.")] = None,
    store: Annotated[str | None, typer.Option(help="Compare with what this store has published, too.")] = None,
    model: ModelUri = None,
    plan: PlanFile = None,
    num_stages: NumStages = None,
    dtype: Dtype = None,
    num_items: Annotated[int, typer.Option("--items", min=1, help="Items to take, evenly spaced.")] = 64,
    tolerance: Annotated[float | None, typer.Option(min=0, help="Largest absolute difference allowed.")] = None,
    min_cosine: Annotated[float | None, typer.Option(max=1, help="Least cosine allowed.")] = None,
    device: Annotated[str, typer.Option(help="torch device: cpu, cuda.")] = "cpu",
) -> Result:
    """Compare the stages' output with the unsplit towers', and a store's; exit 1 where they are too far apart."""
    sources = source_override(source)
    overrides = {"model": model, "source": sources, "plan": plan, "num_stages": num_stages, "dtype": dtype}
    run = read(overrides)

    from embedder.plugins.verify.verify import verify as run_verify

    found = run_verify(
        run, num_items=num_items, store=store, max_difference=tolerance, min_cosine=min_cosine, device=device
    )
    failure = f"verify: {'; '.join(found.failures)}" if found.failures else ""
    return Result(_verification_data(found), _verification_parts(found), failure)


def _verification_data(found: "Verification") -> dict[str, Any]:
    """Return data for `--json`; a NaN difference is null."""
    data = asdict(found)
    for comparison in data["comparisons"]:
        if not math.isfinite(comparison["max_difference"]):
            comparison["max_difference"] = None
    return data | {"passed": not found.failures, "failures": found.failures}


def _verification_parts(found: "Verification") -> list[RenderableType]:
    cut = ", ".join(
        f"[{spec.vision.start}, {spec.vision.stop}) + [{spec.text.start}, {spec.text.stop})" for spec in found.plan
    )
    summary = (
        f"{plural(len(found.plan), 'stage')} (image + text layers {cut}) in {found.dtype} on {found.device}; "
        f"{plural(found.num_rows, 'row')}, {plural(found.num_rejected, 'reject')} among them; "
        f"model {found.model_fingerprint}"
    )
    parts: list[RenderableType] = [summary, "", _comparisons(found)]
    if found.precisions:
        parts += ["", _precisions(found)]
    return [*parts, "", "FAILED" if found.failures else "passed"]


def _comparisons(found: "Verification") -> Table:
    table = new_table(
        "side", "against", "vectors", "equal bits", "largest difference", "least cosine", "asked for", "passed"
    )
    for each in found.comparisons:
        verdict = {True: "yes", False: "NO", None: "no such items"}[each.passed]
        figures = (f"{each.num_equal:,}", f"{each.max_difference:.3g}", f"{each.least_cosine:.7f}")
        table.add_row(each.side, each.reference, f"{each.num_vectors:,}", *figures, each.limit.describe(), verdict)
    return table


def _precisions(found: "Verification") -> Table:
    table = new_table("dtype", "weights, MiB", "stages, ms/row", "least cosine", "mean cosine", "R@10, text to image")
    for each in found.precisions:
        least, mean = (
            ", ".join(f"{side} {value:.5f}" for side, value in values.items())
            for values in (each.least_cosine, each.mean_cosine)
        )
        recall = "too few pairs" if each.recall_at_10 is None else f"{each.recall_at_10:.3f} of {found.num_pairs:,}"
        table.add_row(each.dtype, f"{each.weight_bytes / MIB:.1f}", f"{1000 * each.row_s:.2f}", least, mean, recall)
    return table
