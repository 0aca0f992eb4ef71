"""Commands that bring a store into order: `vacuum`, `migrate`."""

from contextlib import nullcontext
from typing import Annotated

import typer

from embedder.cli.options import DryRun, ReadConfig, StoreUri, command
from embedder.cli.results import Result
from embedder.cli.store_access import read_access, write_access
from embedder.config import RunConfig
from embedder.errors import ConfigError
from embedder.quantities import agree, plural, size_text


@command
def vacuum(
    read: ReadConfig,
    store: StoreUri = None,
    keep_days: Annotated[float, typer.Option(min=0, help="Keep what was published until then.")] = 7.0,
    keep_versions: Annotated[int, typer.Option(min=1, help="Keep this number of the newest publications.")] = 2,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted, and delete nothing.")] = False,
) -> Result:
    """Delete files that no publication worth keeping and no unfinished run needs."""
    run = read({"store": store})

    from embedder.plugins.maintain.vacuum import vacuum as run_vacuum

    with nullcontext(read_access(run)) if dry_run else write_access(run) as files:
        done = run_vacuum(files, keep_days=keep_days, keep_versions=keep_versions, dry_run=dry_run)
    paths = [info.path for info in done.deleted]
    count = f"{'would delete' if dry_run else 'deleted'} {plural(len(paths), 'file')}, {size_text(done.size_bytes)}"
    stays = agree(len(done.kept), "stays", "stay")
    kept = f"{plural(len(done.kept), 'publication')} {stays} readable: {', '.join(done.kept)}"
    if done.needed:
        needed = ", ".join(done.needed)
        kept += f"; of these {len(done.needed):,} only because what is kept needs all their files: {needed}"
    data = {
        "dry_run": dry_run,
        "num_files": len(paths),
        "size_bytes": done.size_bytes,
        "kept": done.kept,
        "needed": done.needed,
        "files": paths,
    }
    return Result(data, [*(paths if dry_run else ()), count, kept])


@command
def migrate(
    read: ReadConfig,
    store: StoreUri = None,
    metadata: Annotated[
        bool, typer.Option("--metadata", help="Fill the columns of the medium in older rows, only from headers.")
    ] = False,
    dry_run: DryRun = False,
) -> Result:
    """Bring a store of an older format up to this one."""
    run = read({"store": store})
    if metadata:
        return _fill_metadata(run, dry_run=dry_run)
    if dry_run:
        raise ConfigError("migrate --dry-run: it shows what --metadata would read; give both")

    from embedder.plugins.maintain.migrate import migrate as run_migrate
    from embedder.store.schema import FORMAT_VERSION

    with write_access(run, commits="embedder migrate") as files:
        was_older, new = run_migrate(files)
    text = f"store {files.address}: format version {FORMAT_VERSION}"
    if not was_older:
        text += " already; nothing to do"
    elif new is not None:
        text += f", published as run {new.run_id}; no vector changed"
    data = {"format_version": FORMAT_VERSION, "was_older": was_older, "published": new.model_dump() if new else None}
    return Result(data, [text])


def _fill_metadata(run: RunConfig, *, dry_run: bool) -> Result:
    from embedder.executors.job import decode_limits
    from embedder.plugins.maintain.fill_metadata import fill_metadata
    from embedder.store_index.keep_index import same_index_and_words

    with write_access(run, commits="embedder migrate --metadata") as files:
        choose_index = same_index_and_words(files, run.index)
        limits = decode_limits(run.decode)
        new, filled = fill_metadata(files, run.metadata.columns, choose_index, limits, dry_run=dry_run)
    lack = f"{plural(filled.num_rows, 'row')} of {plural(filled.num_files, 'item')} lack columns of the medium"
    lines = [lack if filled.num_rows else "no row lacks columns of the medium"]
    if filled.emptied:
        lines.append(f"left out by [metadata], so emptied: {', '.join(filled.emptied)}")
    if new is not None:
        read = f"{plural(filled.num_read, 'header')} read, {size_text(filled.bytes_read)}"
        lines.append(f"{read}; published as run {new.run_id}; no vector changed")
    return Result(filled._asdict() | {"published": new.model_dump() if new else None}, lines)
