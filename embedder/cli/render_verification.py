"""A verification as a person reads it, and as plain data."""

import math
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from embedder.verification.verify import Verification


def verification_data(found: Verification) -> dict[str, Any]:
    """What `--json` prints; a difference that is no number is null."""
    data = asdict(found)
    for comparison in data["comparisons"]:
        if not math.isfinite(comparison["max_difference"]):
            comparison["max_difference"] = None
    return data | {"passed": not found.failures, "failures": found.failures}


def verification_parts(found: Verification) -> list[RenderableType]:
    """Tables and a summary."""
    cut = ", ".join(
        f"[{spec.vision.start}, {spec.vision.stop}) + [{spec.text.start}, {spec.text.stop})" for spec in found.plan
    )
    summary = (
        f"{len(found.plan)} stages (ViT + ALBERT layers {cut}) in {found.dtype} on {found.device}; "
        f"{found.num_rows:,} rows, {found.num_rejected:,} of them rejects; model {found.model_fingerprint}"
    )
    parts: list[RenderableType] = [summary, "", _comparisons(found)]
    if found.precisions:
        parts += ["", _precisions(found)]
    return [*parts, "", "FAILED" if found.failures else "passed"]


def _comparisons(found: Verification) -> Table:
    table = _table(
        "side", "against", "vectors", "equal bits", "largest difference", "least cosine", "asked for", "passed"
    )
    for each in found.comparisons:
        verdict = {True: "yes", False: "NO", None: "no such items"}[each.passed]
        figures = (f"{each.num_equal:,}", f"{each.max_difference:.3g}", f"{each.least_cosine:.7f}")
        table.add_row(each.side, each.reference, f"{each.num_vectors:,}", *figures, each.limit.describe(), verdict)
    return table


def _precisions(found: Verification) -> Table:
    """Each dtype's costs, and beside them what it loses."""
    table = _table("dtype", "weights, MiB", "stages, ms/row", "least cosine", "mean cosine", "R@10, text to picture")
    for each in found.precisions:
        least, mean = (
            ", ".join(f"{side} {value:.5f}" for side, value in values.items())
            for values in (each.least_cosine, each.mean_cosine)
        )
        recall = "too few pairs" if each.recall_at_10 is None else f"{each.recall_at_10:.3f} of {found.num_pairs:,}"
        table.add_row(each.dtype, f"{each.weight_bytes / 2**20:.1f}", f"{1000 * each.row_s:.2f}", least, mean, recall)
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        table.add_column(name, overflow="fold")
    return table
