"""How long embedding will take, from what the last runs of the same model needed."""

import json
import statistics
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict

from embedder.store.files import StoreFiles
from embedder.store.layout import run_file
from embedder.store.runs import REPORT_FILE, all_runs

NUM_RUNS = 5


class RunEstimate(BaseModel):
    """Seconds that a run will take, and what says so."""

    model_config = ConfigDict(frozen=True)

    wall_s: float | None
    """None where no run of this model has been measured in this store."""
    items_per_s: float | None = None
    startup_s: float | None = None
    num_runs: int = 0

    def text(self) -> str:
        """One clause."""
        if self.wall_s is None:
            return "no time is known: no run of this model has been measured in this store"
        if not self.num_runs:
            return "about no time"
        return (
            f"about {duration(self.wall_s)}, as the last {self.num_runs} measured run(s) made {self.items_per_s:.3g} "
            f"items/s after {self.startup_s:.0f} s of start-up"
        )


def estimate_s(files: StoreFiles, model_fingerprint: str, num_items: int) -> RunEstimate:
    """Estimate the time for so many items.

    Args:
        files: the store.
        model_fingerprint: only runs of this model count.
        num_items: to embed.
    """
    if num_items == 0:
        return RunEstimate(wall_s=0.0)
    newest_first = reversed([run.run_id for run in all_runs(files) if run.model_fingerprint == model_fingerprint])
    return from_reports(_reports(files, newest_first), num_items)


def from_reports(reports: Iterable[dict[str, Any]], num_items: int) -> RunEstimate:
    """The medians of the first few reports that measured anything."""
    rates, startups = [], []
    for report in reports:
        if report.get("items_per_s", 0) > 0:
            rates.append(report["items_per_s"])
            startups.append(report["startup_s"])
        if len(rates) == NUM_RUNS:
            break
    if not rates:
        return RunEstimate(wall_s=None)
    rate, startup_s = statistics.median(rates), statistics.median(startups)
    return RunEstimate(wall_s=startup_s + num_items / rate, items_per_s=rate, startup_s=startup_s, num_runs=len(rates))


def _reports(files: StoreFiles, run_ids: Iterable[str]) -> Iterable[dict[str, Any]]:
    for run_id in run_ids:
        path = run_file(run_id, REPORT_FILE)
        if files.exists(path):
            yield json.loads(files.read(path))


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, whichever reads best."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
