"""What `refresh` and `rejects` do: a configuration in, a result out."""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict
from shlex import quote
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from embedder.cli.commands import Result, open_files
from embedder.cli.render import TerminalWatcher, report_parts
from embedder.config import RunConfig
from embedder.errors import ConfigError
from embedder.ingest.work import IngestOptions
from embedder.store.rejects import find_rejects
from embedder.store.runs import unfinished_runs


def refresh(config: RunConfig, options: IngestOptions) -> Result:
    """Bring the store to what the sources hold."""
    from embedder.ingest.flow import refresh as run_refresh

    report = run_refresh(config, TerminalWatcher(), options)
    return Result(json.loads(report.model_dump_json()), report_parts(report))


def dry_run(config: RunConfig, options: IngestOptions) -> Result:
    """Say what a refresh would do."""
    from embedder.ingest.dry_run import forecast, forecast_parts

    found = forecast(config, options)
    return Result(json.loads(found.model_dump_json()), forecast_parts(found))


def rejects(config: RunConfig, run_id: str | None, wanted: Mapping[str, str | bool]) -> Result:
    """List rejects: of what is published, of the newest run where nothing is, or of one run."""
    files = open_files(config)
    found = find_rejects(files, run_id, wanted)
    items = found.items.to_pylist()
    shown: list[RenderableType] = [_rejects_table(items) if items else "no rejects"]
    if num_left_out := sum(row["state"] == "left_out" for row in items):
        shown.append(f"{len(items) - num_left_out:,} rejected; {num_left_out:,} left out, which counts as no reject")
    if not found.is_published:
        shown.append(f"of run {found.run_id}, which is not published; the command that began it goes on with it")
    if found.pending is not None:
        shown.append(
            f"run {found.pending.run_id} is newer, is not published and has {found.pending.num_rejects:,} rejects: "
            f"`embedder rejects --store {quote(files.address)} --run {found.pending.run_id}` lists them"
        )
    pending = asdict(found.pending) if found.pending else None
    data = {"rejects": items, "run_id": found.run_id, "published": found.is_published, "unpublished_run": pending}
    return Result(data, shown)


def _rejects_table(items: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("item", "step", "error", "transient", "stale", "attempts"):
        table.add_column(name, overflow="fold")
    for row in items:
        error = f"{row['error_type']}: {row['error']}"
        marks = ("yes" if row[name] else "" for name in ("transient", "stale"))
        table.add_row(row["item_id"], row["step"], error, *marks, str(row["attempts"]))
    return table


def retry(
    config: RunConfig, wanted: Mapping[str, str | bool], *, run_id: str | None = None, forced: Collection[str] = ()
) -> Result:
    """Embed rejects again, and nothing else: published ones, or those of the newest run that is not.

    Args:
        config: the run, with the model and the sources.
        wanted: values that columns of `items` must have.
        run_id: of which run; what is published, or the newest run where nothing is.
        forced: names of guards that are overridden.

    Raises:
        ConfigError: the configuration names no source or no model, or the run is over.
    """
    if config.model is None or not config.source:
        raise ConfigError("rejects --retry: embedding needs the model and the sources; give --config FILE.toml")
    files = open_files(config)
    found = find_rejects(files, run_id, wanted)
    if not found.is_published and found.run_id != unfinished_runs(files)[-1].run_id:
        raise ConfigError(
            f"rejects --retry --run {found.run_id}: a later run took its place, so nothing goes on with it; leave out "
            "--run for what is published, or name the newest run"
        )
    if not found.items.num_rows:
        return Result({"rejects": [], "retried": 0}, ["no rejects"])
    only = found.items["item_id"].combine_chunks()
    return refresh(config, IngestOptions(kind="refresh", retry_rejects=True, only=only, forced=tuple(forced)))
