"""The commands that look after a store: its history, going back, and what may be deleted."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from embedder.cli import purge_command, store_commands
from embedder.cli.options import AsJson, ConfigFile, Settings, StoreUri, print_result
from embedder.cli.terminal import Terminal
from embedder.config import IndexConfig, load_config
from embedder.errors import ConfigError
from embedder.store.files import StoreFiles

RunId = Annotated[str | None, typer.Argument(metavar="[RUN_ID]", help="Of `embedder history`; the one before else.")]


def history(
    store: StoreUri = None, config: ConfigFile = None, settings: Settings = None, as_json: AsJson = False
) -> None:
    """List what was published, and what of it can still be read."""
    print_result(as_json, store_commands.history(_opened(config, store, settings)[0]))


def rollback(
    run_id: RunId = None,
    release: Annotated[bool, typer.Option("--release", help="Let `embed` and `refresh` publish again.")] = False,
    store: StoreUri = None,
    config: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Publish again what an earlier run published, with its model and its index, and hold it until --release."""
    if release and run_id is not None:
        raise ConfigError(f"rollback {run_id} --release: one or the other; a release changes nothing that is published")
    opened = _opened(config, store, settings)
    print_result(as_json, store_commands.release(*opened) if release else store_commands.rollback(*opened, run_id))


def vacuum(
    store: StoreUri = None,
    keep_days: Annotated[float, typer.Option(min=0, help="Keep what was published until then.")] = 7.0,
    keep_versions: Annotated[int, typer.Option(min=1, help="Keep so many of the newest publications.")] = 2,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted, and delete nothing.")] = False,
    config: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Delete files that no publication worth keeping and no unfinished run needs."""
    opened = _opened(config, store, settings)
    print_result(as_json, store_commands.vacuum(*opened, keep_days, keep_versions, dry_run=dry_run))


def compact(
    store: StoreUri = None,
    target_rows: Annotated[int | None, typer.Option(min=1, help="Rows of a part file.")] = None,
    target_mib: Annotated[float | None, typer.Option(min=0.001, help="MiB of a part file.")] = None,
    config: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Put small part files together; no row changes, and the index stays."""
    print_result(as_json, store_commands.compact(*_opened(config, store, settings), target_rows, target_mib))


def purge(
    item_ids: Annotated[list[str] | None, typer.Argument(metavar="ID...", help="The items.")] = None,
    from_file: Annotated[Path | None, typer.Option("--from-file", help="A file with one id a line.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask; needed where there is no terminal.")] = False,
    allow_again: Annotated[bool, typer.Option("--allow-again", help="Forget that these were purged.")] = False,
    store: StoreUri = None,
    config: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Remove items for good, from older versions and indexes too, and prove it; all of them or none."""
    ids = [*(item_ids or []), *_ids_in(from_file)]
    if not ids:
        raise ConfigError("purge: no items; give their ids, or --from-file FILE with one a line")
    if allow_again:
        if dry_run:
            raise ConfigError("purge: --allow-again changes one small file and has no --dry-run; leave one of them out")
        print_result(as_json, store_commands.allow_again(*_opened(config, store, settings), ids))
        return
    if not (dry_run or yes or sys.stdin.isatty()):
        raise ConfigError(
            "purge: there is no terminal to ask on whether to remove the items for good; --yes says so beforehand, "
            "--dry-run says what would be done"
        )
    opened, confirm = _opened(config, store, settings), None if yes else _confirm
    print_result(as_json, purge_command.purge(*opened, ids, dry_run=dry_run, confirm=confirm))


def _confirm(lines: list[str]) -> None:
    """Ask on the terminal, apart from the result on standard output.

    Raises:
        typer.Abort: the answer is not yes.
    """
    terminal = Terminal(stderr=True)
    for line in lines:
        terminal.print(line, soft_wrap=True)
    sys.stderr.write("Remove them for good? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        sys.stderr.write("nothing was changed\n")
        raise typer.Abort


def migrate(
    store: StoreUri = None, config: ConfigFile = None, settings: Settings = None, as_json: AsJson = False
) -> None:
    """Bring a store of an older format up to this one."""
    print_result(as_json, store_commands.migrate(*_opened(config, store, settings)))


def add_to(app: typer.Typer) -> None:
    """Make these commands of the application."""
    for command in (history, rollback, vacuum, compact, purge, migrate):
        app.command()(command)


def _opened(config: Path | None, store: str | None, settings: list[str] | None) -> tuple[StoreFiles, IndexConfig]:
    """The store that is meant, and what its index shall be."""
    from embedder.cli.commands import open_files

    run = load_config(config, {"store": store}, settings or ())
    return open_files(run), run.index


def _ids_in(path: Path | None) -> list[str]:
    """One id a line; spaces belong to an id, empty lines do not count."""
    if path is None:
        return []
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # an id may hold what else ends lines
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--from-file {path}: can't be read ({error}); give a text file with one id a line") from None
    return [line.removesuffix("\r") for line in lines if line.removesuffix("\r")]
