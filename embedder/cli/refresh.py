"""The commands of the nightly refresh: `refresh`, and `rejects`."""

from pathlib import Path
from typing import Annotated

import typer

from embedder.cli.options import AsJson, ConfigFile, Force, Settings, StoreUri, print_result
from embedder.config import load_config
from embedder.errors import ConfigError

CONFIG_HELP = "TOML file that describes the run: model, store, sources."


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command()(refresh)
    app.command()(rejects)


def refresh(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help=CONFIG_HELP)],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done, and why; change nothing.")
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Embed at most so many items; the next run goes on.")] = None,
    max_hours: Annotated[
        float | None, typer.Option(min=0, help="Begin no item later than that after the start.")
    ] = None,
    retry_rejects: Annotated[bool, typer.Option(help="Embed again what was rejected before.")] = False,
    force: Force = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Embed what is new or changed, retire what is gone, update the index, publish; another model embeds all anew."""
    from embedder.cli import refresh_commands
    from embedder.ingest.work import IngestOptions

    run = load_config(config, settings=settings or ())
    options = IngestOptions(
        kind="refresh", retry_rejects=retry_rejects, limit=limit, max_hours=max_hours, forced=tuple(force or ())
    )
    print_result(as_json, refresh_commands.dry_run(run, options) if dry_run else refresh_commands.refresh(run, options))


def rejects(
    store: StoreUri = None,
    run_id: Annotated[str | None, typer.Option("--run", help="Of this run, published or not.")] = None,
    transient: Annotated[bool | None, typer.Option(help="Only what failed in passing, or only what did not.")] = None,
    stale: Annotated[bool | None, typer.Option(help="Only what keeps old vectors, or only what has none.")] = None,
    step: Annotated[str | None, typer.Option(help="Only of this step: read, decode, tokenise, embed.")] = None,
    error_type: Annotated[str | None, typer.Option(help="Only of this type, as FileNotFound.")] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Embed these again; needs --config with the sources.")] = False,
    force: Force = None,
    config: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """List what could not be embedded, and why; of the newest run where nothing is published. Or try it again."""
    from embedder.cli import refresh_commands

    run = load_config(config, {"store": store}, settings or ())
    wanted = {"transient": transient, "stale": stale, "step": step, "error_type": error_type}
    chosen = {name: value for name, value in wanted.items() if value is not None}
    if not retry and force:
        raise ConfigError("rejects --force: only what is embedded again can be published; give --retry too")
    if retry:
        result = refresh_commands.retry(run, chosen, run_id=run_id, forced=force or ())
    else:
        result = refresh_commands.rejects(run, run_id, chosen)
    print_result(as_json, result)
