"""Times of runs on this machine: kept in the user's cache when a run ends, and read before the next one."""

from embedder.executors.choose_engine import RunTimes
from embedder.placement import hardware
from embedder.report.report_schema import Report
from embedder.storage.cost_cache import keep, read_kept

MIN_ITEMS = 8
"""Runs with fewer items say little about the rate, so they only correct what a longer one has said."""
WEIGHT = 0.5
"""Weight of the newest run in the stored means: they adapt to another load of the machine after a few runs."""


def measured_times(ray_address: str | None, fingerprint: str) -> dict[str, RunTimes]:
    """Return the times of earlier runs of a model on this machine, by engine; none for a cluster (`ray_address`)."""
    if ray_address is not None:  # a cluster is another machine
        return {}
    found = {engine: read_kept(RunTimes, _key(engine, fingerprint)) for engine in ("local", "ray")}
    return {engine: times for engine, times in found.items() if times is not None}


def keep_times(ray_address: str | None, fingerprint: str, report: Report, num_here: int, publish_s: float) -> None:
    """Store the times of a run that has ended; not for a cluster (`ray_address`).

    `num_here` is the number of items that its session embedded, `publish_s` the seconds that its publication took.
    """
    if ray_address is not None or not num_here or not report.items_per_s or report.models:
        return
    key = _key(report.engine or "", fingerprint)
    before = read_kept(RunTimes, key)
    if before is None and num_here < MIN_ITEMS:
        return
    new = RunTimes(report.startup_s, report.items_per_s, num_here, publish_s)
    keep(new if before is None else _mean(before, new), key)


def _mean(before: RunTimes, new: RunTimes) -> RunTimes:
    """Average starts, ends, and the seconds per item, for which a run of few items has less weight."""
    share = WEIGHT * min(1.0, new.num_items / before.num_items)
    item_s = (1 - share) / before.items_per_s + share / new.items_per_s
    startup_s, publish_s = (
        (1 - WEIGHT) * earlier_s + WEIGHT * now_s
        for earlier_s, now_s in ((before.startup_s, new.startup_s), (before.publish_s, new.publish_s))
    )
    num_items = round((1 - share) * before.num_items + share * new.num_items)
    return RunTimes(startup_s, 1 / item_s, num_items, publish_s)


def _key(engine: str, fingerprint: str) -> dict[str, object]:
    return {"engine": engine, "model": fingerprint, "cpus": hardware.num_cpus(), "gpus": list(hardware.gpu_names())}
