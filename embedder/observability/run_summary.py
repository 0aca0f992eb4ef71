"""Summary of a run in one flat record, for machines: its end, its counts, the time of each step. Pure."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from embedder.redaction import mask
from embedder.storage.printable import printable

FIGURES = ("items_per_s", "peak_memory_bytes", "startup_s")  # of a report, besides all its counts
STEP_FIGURES = ("num_rows", "wall_s", "cpu_s", "bytes_out")


def summarise(
    kind: str,
    store: str,
    exit_code: int,
    message: str,
    times: tuple[datetime, datetime],
    wall_s: float,
    report: Mapping[str, Any] | None = None,
    published_at: datetime | None = None,
) -> dict[str, Any]:
    """Describe a run that has ended.

    `exit_code` is 0 for done, 2 for the user's mistake, 1 for anything else; `message` says how it ended, in one line;
    `times` are begin and end, and `wall_s` the seconds between them by a clock that nobody sets; `report` is plain
    data, None if the run ended before it; `published_at` is the time of the current publication.
    """
    report = report or {}
    return {
        "kind": kind,
        "store": printable(mask(store)),
        "run_id": report.get("run_id"),
        "engine": report.get("engine"),
        "exit_code": exit_code,
        "published": bool(report.get("published", False)),
        "held": bool(report.get("held", False)),
        "message": printable(mask(message)),
        **_times(*times, wall_s, published_at),
        **{key: value for key, value in report.items() if key.startswith("num_") or key in FIGURES},
        "steps": {step["step"]: {key: step[key] for key in STEP_FIGURES} for step in report.get("steps", ())},
        "metrics": report.get("metrics", {}),
        "guards": [dict(verdict) for verdict in report.get("guards", ())],
    }


def _times(started_at: datetime, ended_at: datetime, wall_s: float, published_at: datetime | None) -> dict[str, Any]:
    age_s = round((ended_at - published_at).total_seconds(), 3) if published_at else None
    return {
        "started_at": started_at.isoformat(timespec="seconds"),
        "ended_at": ended_at.isoformat(timespec="seconds"),
        "wall_s": round(wall_s, 3),
        "published_at": published_at.isoformat(timespec="seconds") if published_at else None,
        "published_age_s": age_s,
    }
