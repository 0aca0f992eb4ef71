"""A run of `embed` or `refresh` as its tracker sees it: settings, counts at each part, figures and files at its end."""

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from embedder.config import RunConfig
from embedder.observability.log import UNWRITABLE
from embedder.observability.trackers import Tracker
from embedder.redaction import mask
from embedder.storage.printable import printable
from embedder.store.accumulators.run_states import METRICS_FILE
from embedder.store.files import StoreFiles
from embedder.store.journal import JournalEntry
from embedder.store.layout import run_file
from embedder.store.runs import REPORT_FILE, Run

TRACKER_FILE = "tracker.json"
LOG_EVERY_S = 2.0  # between two points of a curve
FILES = (REPORT_FILE, METRICS_FILE)
"""Files of a run's folder that are added to the tracker's run, where they are."""


class RunTracking:
    """Tracking of one run."""

    def __init__(self, tracker: Tracker, config: RunConfig, kind: str) -> None:
        """Begin without a run.

        Args:
            tracker: that is told.
            config: of the run.
            kind: `embed` or `refresh`.
        """
        self._tracker, self._config, self._kind = tracker, config, kind
        self._run: Run | None = None
        self._counts = dict.fromkeys(("items", "rejects", "vectors", "part_bytes"), 0)
        self._has_begun = False
        self._began_s = self._next_s = 0.0

    def begun(self, run: Run) -> None:
        """Take the run; the tracker hears of it with its first part, as what is refused before that leaves no trace."""
        self._run = run

    def _begin(self, run: Run) -> None:
        """Begin the tracker's run; each session of a run has one. Each knows the other's id."""
        if self._has_begun:
            return
        self._has_begun, self._began_s = True, time.monotonic()
        tags = {
            "embedder.run_id": run.run_id,
            "embedder.session": run.session,
            "embedder.store": printable(mask(run.files.address)),
            "embedder.kind": self._kind,
        }
        known = self._config.tracker.model_dump(include={"kind", "uri", "experiment"}) if self._config.tracker else {}
        record = {key: mask(str(value)) for key, value in known.items()} | {"session": run.session}

        def told(tracker_id: str) -> None:
            text = json.dumps(record | {"id": tracker_id}, indent=2)
            run.files.write(run_file(run.run_id, TRACKER_FILE), text.encode())

        self._tracker.begin(f"{self._kind} {run.run_id}", parameters_of(self._config), tags, told)

    def finished(self, entry: JournalEntry) -> None:
        """Count what a write task has finished, and add a point to the curves from time to time."""
        if self._run is not None:
            self._begin(self._run)
        self._counts["items"] += entry.num_items
        self._counts["rejects"] += entry.num_rejects
        self._counts["vectors"] += sum(part.num_rows for part in entry.parts if part.table == "embeddings")
        self._counts["part_bytes"] += sum(part.size_bytes for part in entry.parts)
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + LOG_EVERY_S
            rate = self._counts["items"] / max(now_s - self._began_s, 1e-9)
            self._tracker.log({**self._counts, "items_per_s": rate}, step=self._counts["items"])

    def ended(self, summary: Mapping[str, Any]) -> None:
        """Add the figures of a run's summary, and the files of its folder."""
        if self._run is None or not (self._has_begun or summary["run_id"]):
            return
        self._begin(self._run)
        self._tracker.log({**dict(figures_of(summary)), **self._counts}, step=self._counts["items"])
        self._tracker.end(succeeded=summary["exit_code"] == 0, files=files_of(self._run.files, self._run.run_id))


def parameters_of(config: BaseModel) -> dict[str, str]:
    """Settings of a configuration that differ from their defaults, by dotted keys, without secrets."""
    tree = config.model_dump(mode="json", exclude_unset=True, exclude_none=True, exclude={"tracker"})
    return {key: printable(mask(str(value))) for key, value in _flat(tree)}


def _flat(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of a tree of tables and lists, by dotted keys."""
    if isinstance(tree, dict | list):
        for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _flat(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, tree


def figures_of(summary: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Numbers of a run's summary: its counts, its time, seconds of its steps, figures of its metrics."""
    for key, value in summary.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and key != "exit_code":
            yield f"run/{key}", value
    for step, values in summary["steps"].items():
        yield f"run/seconds of {step}", values["wall_s"]
    for name, figures in summary.get("metrics", {}).items():
        for key, value in figures.items():
            if isinstance(value, int | float):
                yield f"metric/{name}.{key}", value


def files_of(files: StoreFiles, run_id: str) -> dict[str, bytes]:
    """Read the files of a run's folder that a tracker gets."""
    found: dict[str, bytes] = {}
    for name in FILES:
        try:
            found[name] = files.read(run_file(run_id, name))
        except (FileNotFoundError, *UNWRITABLE):
            continue
    return found
