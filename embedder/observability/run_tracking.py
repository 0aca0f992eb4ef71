"""Tracking of an `embed` or `refresh` run: settings, counts after each part, and figures and files at its end."""

import json
import logging
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel

from embedder.config import ObserveSettings
from embedder.config_toml.values import without_secrets
from embedder.observability.log import UNWRITABLE
from embedder.observability.trackers import Tracker
from embedder.redaction import mask
from embedder.storage.printable import printable
from embedder.store.files import StoreFiles
from embedder.store.journal.hash_sample import hash_of
from embedder.store.journal.journal import JournalEntry
from embedder.store.journal.runs import REPORT_FILE, Run
from embedder.store.layout import run_file
from embedder.store.row_metrics import METRICS_FILE

LOG = logging.getLogger(__name__)
TRACKER_FILE = "tracker.json"
LOG_EVERY_S = 2.0  # between two points of a curve
FILES = (REPORT_FILE, METRICS_FILE)
"""Files of a run's folder that are added to the tracker's run, if present."""
CARDS = ("config.json", "MODEL_CARD.md", "README.md")
"""Files in which a model folder describes its model."""
MAX_CARD_BYTES = 1 << 20
SHEET_FILE = "contact_sheet.png"
NUM_SHEET_PARTS, NUM_SHEET_IMAGES, SHEET_ROW = 4, 20, 5
SHEET_S = 10.0  # after which a contact sheet is made without the remaining images


class RunTracking:
    """Tracking of one run."""

    def __init__(self, tracker: Tracker, settings: ObserveSettings, kind: str) -> None:
        """Start without a run; `settings` are the tracker's section and all that the configuration sets."""
        self._tracker, self._settings, self._kind = tracker, settings, kind
        self._run: Run | None = None
        self._counts = dict.fromkeys(("items", "rejects", "vectors", "part_bytes"), 0)
        self._parts: dict[str, bytes] = {}  # a few part files of the session, and the hashes of their names
        self._described: dict[str, bytes] = {}
        self._has_begun = False
        self._began_s = self._next_s = 0.0

    def on_run(self, run: Run) -> None:
        """Record the run; the tracker gets it with its first part, so a run that is refused before leaves no trace."""
        self._run = run

    def on_plan(self, plan: str, model_folder: Path) -> None:
        """Record the executed plan, as JSON, and the model folder's description of the model."""
        self._described = {"plan.json": plan.encode()}
        self._described |= cards_of(model_folder)

    def _begin(self, run: Run) -> None:
        """Begin the tracker's run, one per session of a run. Both record the other's id."""
        if self._has_begun:
            return
        self._has_begun, self._began_s = True, time.monotonic()
        tags = {
            "embedder.run_id": run.run_id,
            "embedder.session": run.session,
            "embedder.store": printable(mask(run.files.address)),
            "embedder.kind": self._kind,
        }
        known = (
            self._settings.tracker.model_dump(include={"kind", "uri", "experiment"}) if self._settings.tracker else {}
        )
        record = {key: mask(str(value)) for key, value in known.items()} | {"session": run.session}

        def log_once(tracker_id: str) -> None:
            text = json.dumps(record | {"id": tracker_id}, indent=2)
            run.files.write(run_file(run.run_id, TRACKER_FILE), text.encode())

        self._tracker.begin(f"{self._kind} {run.run_id}", mask_settings(self._settings.given), tags, log_once)

    def on_entry(self, entry: JournalEntry) -> None:
        """Count what a write task has finished, and add a point to the curves from time to time."""
        if self._run is not None:
            self._begin(self._run)
        self._counts["items"] += entry.num_items
        self._counts["rejects"] += entry.num_rejects
        self._counts["vectors"] += sum(part.num_rows for part in entry.parts if part.table == "embeddings")
        self._counts["part_bytes"] += sum(part.size_bytes for part in entry.parts)
        for part in (part for part in entry.parts if part.table == "embeddings"):
            self._parts[part.path] = hash_of(part.path)
        self._parts = dict(sorted(self._parts.items(), key=lambda each: each[1])[:NUM_SHEET_PARTS])
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + LOG_EVERY_S
            rate = self._counts["items"] / max(now_s - self._began_s, 1e-9)
            self._tracker.log({**self._counts, "items_per_s": rate}, step=self._counts["items"])

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Add the figures of a run's summary, and the files of its folder."""
        if self._run is None or not (self._has_begun or summary["run_id"]):
            return
        self._begin(self._run)
        self._tracker.log({**dict(figures_of(summary)), **self._counts}, step=self._counts["items"])
        files = self._run.files
        self._tracker.attach(lambda: self._described | files_of(files, summary["run_id"] or ""))
        if self._settings.tracker is not None and self._settings.tracker.pictures:
            self._tracker.attach(lambda: contact_sheet(files, list(self._parts)))
        self._tracker.end(succeeded=summary["exit_code"] == 0)


def parameters_of(config: BaseModel) -> dict[str, str]:
    """Return settings of a configuration that differ from their defaults, by dotted keys, without secrets."""
    return mask_settings(config.model_dump(mode="json", exclude_unset=True, exclude_none=True, exclude={"tracker"}))


def mask_settings(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of a tree of settings by dotted keys, without secrets."""
    return {key: printable(mask(str(value))) for key, value in _flat(without_secrets((), tree))}


def _flat(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict | list):
        for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _flat(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, tree


def figures_of(summary: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a run's summary: its counts, its time, seconds of its steps, figures of its metrics."""
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


def cards_of(folder: Path) -> dict[str, bytes]:
    """Read the configuration and the card of a model folder; names begin with `model/`."""
    found = [folder / name for name in CARDS]
    is_card = [path.is_file() and path.stat().st_size <= MAX_CARD_BYTES for path in found]
    return {f"model/{path.name}": path.read_bytes() for path, is_one in zip(found, is_card, strict=True) if is_one}


def contact_sheet(files: StoreFiles, parts: Collection[str]) -> dict[str, bytes]:
    """Draw the items of part files with the lowest hashes; empty if that isn't possible."""
    try:
        return {SHEET_FILE: _draw_sheet(files, parts)} if parts else {}
    except Exception as error:  # noqa: BLE001 - whatever is wrong with an image, the run is reported without the sheet
        LOG.info(f"tracker: no {SHEET_FILE} ({type(error).__name__}: {' '.join(str(error).split())[:200]})")
        return {}


def _draw_sheet(files: StoreFiles, parts: Collection[str]) -> bytes:
    from embedder.media.contact_sheet import Block, Cell, save_sheet
    from embedder.retrieval.hit import Hit
    from embedder.retrieval.hits import Hits

    names = ["item_id", "segment", "modality", "uri", "caption", "start_s", "end_s"]
    rows = pa.concat_tables([files.read_table(f"embeddings/{path}", names) for path in parts])
    rows = rows.filter(pc.and_(pc.equal(rows["segment"], 0), pc.not_equal(rows["modality"], "text")))
    chosen = sorted(rows.to_pylist(), key=lambda row: hash_of(row["item_id"]))[:NUM_SHEET_IMAGES]
    hits = [Hit(0.0, **row, carryover={}) for row in chosen]
    cells: list[Cell] = []
    stop_s = time.monotonic() + SHEET_S
    for first in range(0, len(hits), SHEET_ROW):
        some = hits[first : first + SHEET_ROW]
        images = Hits(some).thumbnails() if time.monotonic() < stop_s else [None] * len(some)
        cells += [Cell(pixels, [hit.caption or hit.item_id]) for pixels, hit in zip(images, some, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / SHEET_FILE
        save_sheet(path, [Block(cells, title="", note="no image in these parts")])
        return path.read_bytes()
