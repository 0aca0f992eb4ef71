"""What `refresh` and `rejects` do: a configuration in, a result out."""

import json
from collections.abc import Mapping

from rich.console import RenderableType
from rich.table import Table

from embedder.commands import Result, open_files
from embedder.config import RunConfig
from embedder.display import TerminalWatcher, report_parts
from embedder.errors import ConfigError
from embedder.refresh.work import Options
from embedder.store.rejects import rejected_items


def refresh(config: RunConfig, options: Options) -> Result:
    """Bring the store to what the sources hold."""
    from embedder.refresh.flow import refresh as run_refresh

    report = run_refresh(config, TerminalWatcher(), options)
    return Result(json.loads(report.model_dump_json()), report_parts(report))


def dry_run(config: RunConfig, options: Options) -> Result:
    """Say what a refresh would do."""
    from embedder.refresh.dry_run import forecast, forecast_parts

    found = forecast(config, options)
    return Result(json.loads(found.model_dump_json()), forecast_parts(found))


def rejects(config: RunConfig, run_id: str | None, wanted: Mapping[str, str | bool]) -> Result:
    """List rejects: of what is published, or of a run that was not."""
    found = rejected_items(open_files(config), run_id, wanted).to_pylist()
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("item", "step", "error", "transient", "stale", "attempts"):
        table.add_column(name, overflow="fold")
    for row in found:
        error = f"{row['error_type']}: {row['error']}"
        marks = ("yes" if row[name] else "" for name in ("transient", "stale"))
        table.add_row(row["item_id"], row["step"], error, *marks, str(row["attempts"]))
    shown: RenderableType = table if found else "no rejects"
    return Result({"rejects": found}, [shown])


def retry(config: RunConfig, wanted: Mapping[str, str | bool]) -> Result:
    """Embed published rejects again, and nothing else.

    Raises:
        ConfigError: the configuration names no source or no model.
    """
    if config.model is None or not config.source:
        raise ConfigError("rejects --retry: embedding needs the model and the sources; give --config FILE.toml")
    items = rejected_items(open_files(config), None, wanted)
    if not items.num_rows:
        return Result({"rejects": [], "retried": 0}, ["no rejects"])
    return refresh(config, Options(kind="refresh", retry_rejects=True, only=items["item_id"].combine_chunks()))
