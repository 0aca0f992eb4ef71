"""`embedder refresh` and `embedder rejects`: the store is brought up to its sources; rejects are listed or retried."""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table

from embedder.cli.options import (
    AsJson,
    DryRun,
    Force,
    ModelName,
    ReadConfig,
    Repair,
    RetryRejects,
    Settings,
    StoreUri,
    command,
)
from embedder.cli.results import Result, new_table, print_result
from embedder.cli.terminal import item_bar
from embedder.config import RunConfig, load_config, with_fast_start
from embedder.errors import ConfigError
from embedder.quantities import MIB, plural, size_text
from embedder.storage.web_address import shown_uri
from embedder.store.files import StoreFiles

if TYPE_CHECKING:
    from embedder.ingest.dry_run import Forecast
    from embedder.ingest.work import IngestOptions

CONFIG_HELP = "TOML file that describes the run: model, store, sources."


def refresh(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help=CONFIG_HELP)],
    dry_run: DryRun = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Embed this many items at most; the next continues.")] = None,
    max_hours: Annotated[
        float | None, typer.Option(min=0, help="Begin no item later than that after the start.")
    ] = None,
    retry_rejects: RetryRejects = False,
    repair: Repair = False,
    force: Force = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Embed what is new or changed, retire what is gone, update the index, publish; another model embeds all again."""
    run = load_config(config, settings=settings or ())

    from embedder.ingest.work import IngestOptions

    options = IngestOptions(
        kind="refresh",
        retry_rejects=retry_rejects,
        repair=repair,
        limit=limit,
        max_hours=max_hours,
        forced=tuple(force or ()),
    )
    print_result(as_json, run_ingest(run, options, dry_run=dry_run))


def run_ingest(config: RunConfig, options: "IngestOptions", *, dry_run: bool = False) -> Result:
    """Embed or refresh, or describe what such a run would do, and why, which changes nothing."""
    if dry_run:
        from embedder.ingest.dry_run import forecast

        found = forecast(config, options)
        return Result(json.loads(found.model_dump_json()), _forecast_parts(found))
    from embedder.cli.render_report import report_parts
    from embedder.ingest.embed import ingest

    report = with_fast_start(ingest)(config, options, item_bar)
    return Result(json.loads(report.model_dump_json()), report_parts(report))


def _forecast_parts(found: "Forecast") -> list[RenderableType]:
    from embedder.ingest.diff import CHECKED, CONTENT_CHANGED

    compared = {CHECKED, CONTENT_CHANGED}
    table = new_table("what", "items", "MiB to read", "why", left=("what", "why"))
    for each in found.reasons:
        action = "compare, then embed" if each.reason in compared else "embed"
        table.add_row(action, f"{each.num_items:,}", f"{each.size_bytes / MIB:,.1f}", each.reason)
    if found.num_taken_over:
        table.add_row("take over", f"{found.num_taken_over:,}", "", "held by a publication that was rolled back")
    for num, what in ((found.num_moved, "moved"), (found.num_copied, "copies")):
        if num:
            table.add_row("of them", f"{num:,}", "", f"probably {what} of published items, whose vectors they keep")
    if found.num_new_copies:
        why = "probably copies of others that are embedded now, whose vectors they take"
        table.add_row("of them", f"{found.num_new_copies:,}", "", why)
    for source, num in found.retired_by_source.items():
        table.add_row("retire", f"{num:,}", "", f"gone from source {source}" if source else "gone from the source")
    table.add_row("leave alone", f"{found.num_unchanged:,}", "", "unchanged, or finished before")
    shown: list[RenderableType] = [table] if found.held is None else [found.held, "then:", table]
    if found.replaces_all:
        shown.append("nothing is published until all items are done under the new model or preprocessing")
    shown.append(
        f"{plural(found.num_to_embed, 'item')} now, {found.num_left:,} left for later; "
        f"at most {size_text(found.rewrite_bytes)} of part files rewritten; {found.estimate.text()}"
        + (
            "; less where contents turn out equal"
            if compared.intersection(each.reason for each in found.reasons)
            else ""
        )
    )
    shown += _model_lines(found)
    shown += (*found.left_out, *found.damage)
    if not found.retire_guard.passed:
        word = "overridden" if found.retire_guard.forced else "would refuse this"
        shown.append(f"guard retire {word}: {found.retire_guard.message}; --force retire does it all the same")
    return shown


def _model_lines(found: "Forecast") -> list[RenderableType]:
    lines: list[RenderableType] = []
    for name, each in found.models.items():
        parts = [f"{reason.num_items:,} {reason.reason}" for reason in each.reasons]
        parts += [f"{each.num_retired:,} gone"] if each.num_retired else []
        whole = "; its old rows are served until all are done" if each.replaces_all else ""
        lines.append(f"model {name}: {', '.join([*parts, f'{each.num_unchanged:,} unchanged'])}{whole}")
    lines += [f"model {name}: leaves the store, as the configuration has it no more" for name in found.removed_models]
    return lines


@command
def rejects(
    read: ReadConfig,
    store: StoreUri = None,
    model: ModelName = None,
    run_id: Annotated[str | None, typer.Option("--run", help="Of this run, published or not.")] = None,
    transient: Annotated[bool | None, typer.Option(help="Only temporary failures, or only lasting ones.")] = None,
    stale: Annotated[bool | None, typer.Option(help="Only what keeps old vectors, or only what has none.")] = None,
    step: Annotated[str | None, typer.Option(help="Only of this step: read, decode, tokenise, embed.")] = None,
    error_type: Annotated[str | None, typer.Option(help="Only of this type, as FileNotFound.")] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Embed these again; needs --config with the sources.")] = False,
    force: Force = None,
) -> Result:
    """List what could not be embedded, and why; of the newest run where nothing is published. Or try it again."""
    run = read({"store": store})
    asked = {"transient": transient, "stale": stale, "step": step, "error_type": error_type}
    filters = {name: value for name, value in asked.items() if value is not None}
    if not retry and force:
        raise ConfigError("rejects --force: only what is embedded again can be published; give --retry too")
    if retry:
        return retry_rejects(run, filters, run_id=run_id, forced=force or (), model=model or "")
    return list_rejects(run, run_id, filters, model or "")


def list_rejects(config: RunConfig, run_id: str | None, filters: Mapping[str, str | bool], model: str = "") -> Result:
    """List rejects of one run, or those of what is published (before any publication, of the newest run).

    `filters` are values that columns of `items` must have; `model` names a further model, empty for the main one.
    """
    from embedder.store.publish.reject_codes import group_rejects, reject_code
    from embedder.store.publish.rejects import find_rejects, rejecting_model

    files = rejecting_model(StoreFiles(config.required_store), model)
    found = find_rejects(files, run_id, filters)
    items = [row | {"uri": shown_uri(row["uri"]), "code": reject_code(row)} for row in found.items.to_pylist()]
    groups = group_rejects(items)
    shown: list[RenderableType] = [_rejects_table(items) if items else "0 rejected"]
    shown += [group.describe() for group in groups]
    if num_left_out := sum(row["state"] == "left_out" for row in items):
        shown.append(f"{len(items) - num_left_out:,} rejected; {num_left_out:,} left out, which counts as no reject")
    if not found.is_published:
        shown.append(f"of run {found.run_id}, which is not published; the command that began it continues it")
    if found.pending is not None:
        shown.append(
            f"run {found.pending.run_id} is newer, is not published and has "
            f"{plural(found.pending.num_rejects, 'reject')}: `embedder rejects {files.option} --run "
            f"{found.pending.run_id}` lists them"
        )
    pending = asdict(found.pending) if found.pending else None
    kinds = [group.to_dict() for group in groups]
    data = {
        "rejects": items,
        "kinds": kinds,
        "run_id": found.run_id,
        "published": found.is_published,
        "unpublished_run": pending,
    }
    return Result(data, shown)


def _rejects_table(items: list[dict[str, Any]]) -> Table:
    table = new_table("item", "step", "error", "transient", "stale", "attempts")
    for row in items:
        error = f"{row['error_type']}: {row['error']}"
        marks = ("yes" if row[name] else "" for name in ("transient", "stale"))
        attempts = "" if row["attempts"] is None else str(row["attempts"])  # missing in an older format
        table.add_row(row["item_id"], row["step"], error, *marks, attempts)
    return table


def retry_rejects(
    config: RunConfig,
    filters: Mapping[str, str | bool],
    *,
    run_id: str | None = None,
    forced: Collection[str] = (),
    model: str = "",
) -> Result:
    """Embed only rejects again: those of one run, or published ones (before any publication, of the newest run).

    `filters` are values that columns of `items` must have, `forced` names overridden guards, and `model` names a
    further model, empty for the main one.

    Raises:
        ConfigError: the configuration names no source or no model, or the run is over.
    """
    from embedder.ingest.work import IngestOptions
    from embedder.store.journal.runs import unfinished_runs
    from embedder.store.publish.rejects import find_rejects, rejecting_model

    if config.main_model is None or not config.source:
        raise ConfigError("rejects --retry: embedding needs the model and the sources; give --config FILE.toml")
    files = rejecting_model(StoreFiles(config.required_store), model)
    found = find_rejects(files, run_id, filters)
    if not found.is_published and found.run_id not in [run.run_id for run in unfinished_runs(files)[-1:]]:
        raise ConfigError(
            f"rejects --retry --run {found.run_id}: a later run took its place, or it embeds nothing, so nothing "
            "continues it; leave out --run for what is published, or name the newest run"
        )
    if not found.items.num_rows:
        return Result({"rejects": [], "retried": 0}, ["0 rejected"])
    only = found.items["item_id"].combine_chunks()
    return run_ingest(config, IngestOptions(kind="refresh", retry_rejects=True, only=only, forced=tuple(forced)))
