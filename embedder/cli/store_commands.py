"""What the commands of store_cli do: a store in, a result out, for a person to read and as plain data."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from rich.console import RenderableType
from rich.table import Table

from embedder.cli.commands import Result
from embedder.config import IndexConfig
from embedder.store.files import StoreFiles
from embedder.store.layout import describe_hold

MIB = 1 << 20


def history(files: StoreFiles) -> Result:
    """List the publications."""
    from embedder.store.history import PastRun, past_runs
    from embedder.store.layout import read_current
    from embedder.store.store_info import read_store_info

    read_store_info(files)
    current = read_current(files)
    hold = current.hold if current is not None and current.is_held else None
    runs = past_runs(files)
    table = new_table("run", "published", "kind", "model", "items", "vectors", "rejects", "index", "")

    def state(run: PastRun) -> str:
        gone = "can't be read" if run.record else "no record"
        if run.is_current:
            return f"current, held since {hold.since:%Y-%m-%d %H:%M}" if hold else "current"
        return "" if run.can_be_read else gone

    for run in runs:
        record = run.record
        if record is None:
            started = f"started {run.started_at:%Y-%m-%d %H:%M}" if run.started_at else ""
            table.add_row(run.run_id, started, "", "", "", "", "", "", state(run))
            continue
        table.add_row(
            run.run_id,
            f"{record.published_at:%Y-%m-%d %H:%M}",
            f"{record.kind} to {record.restores}" if record.restores else record.kind,
            _model_name(record.model, record.model_fingerprint),
            f"{record.num_items:,}",
            f"{record.num_vectors:,}",
            f"{record.num_rejected:,}",
            "" if record.index is None else str(record.index),
            state(run),
        )
    data = [
        {
            "run_id": run.run_id,
            "started_at": run.started_at,
            "current": run.is_current,
            "can_be_read": run.can_be_read,
            **(run.record.model_dump(exclude={"format_version", "hold"}) if run.record else {}),
        }
        for run in runs
    ]
    lines: list[RenderableType] = [table if runs else "nothing is published yet"]
    if hold is not None:
        lines.append(describe_hold(files.address, hold))
    return Result({"publications": data, "hold": hold.model_dump() if hold else None}, lines)


def _model_name(model: str | None, fingerprint: str | None) -> str:
    name = (model or "").rstrip("/").rpartition("/")[2]
    return " ".join(part for part in (name, (fingerprint or "")[:8]) if part)


def rollback(files: StoreFiles, wishes: IndexConfig, run_id: str | None) -> Result:
    """Publish an earlier state again."""
    from embedder.store.rollback import rollback as run_rollback
    from embedder.store.store_info import published
    from embedder.store_index.keep_index import kept_or_built

    with writing(files, wishes) as say:
        new = run_rollback(files, run_id, kept_or_built(files, say, wishes), say)
        hold = published(files).hold
    index = "no index, search is exact" if new.index is None else f"index {new.index}"
    text = (
        f"published again what run {new.restores} published: {new.num_items:,} items, {new.num_vectors:,} vectors, "
        f"{index}, model {_model_name(new.model, new.model_fingerprint)}; this is run {new.run_id}"
    )
    lines: list[RenderableType] = [text]
    if hold is not None:
        lines.append(describe_hold(files.address, hold))
    return Result(new.model_dump() | {"hold": hold.model_dump() if hold else None}, lines)


def release(files: StoreFiles, wishes: IndexConfig) -> Result:
    """Let runs publish again after a rollback."""
    from embedder.store.rollback import release as run_release

    with writing(files, wishes):
        released = run_release(files)
    if released is None:
        return Result({"released": False, "hold": None}, ["no rollback holds the store: there is nothing to release"])
    text = (
        f"released: it was held at run {released.to_run} since {released.since:%Y-%m-%d %H:%M}; the next refresh or "
        f"embed brings what has changed, and takes over what run {released.from_run} still holds"
    )
    return Result({"released": True, "hold": released.model_dump()}, [text])


def vacuum(files: StoreFiles, wishes: IndexConfig, keep_days: float, keep_versions: int, *, dry_run: bool) -> Result:
    """Delete what nobody needs."""
    from embedder.store.vacuum import vacuum as run_vacuum

    with writing(files, wishes):
        done = run_vacuum(files, keep_days=keep_days, keep_versions=keep_versions, dry_run=dry_run)
    did = "would delete" if dry_run else "deleted"
    count = f"{did} {len(done.deleted):,} files, {size_text(done.size_bytes)}"
    kept = f"{_publications(len(done.kept))} readable: {', '.join(done.kept)}"
    if done.needed:
        kept += (
            f"; of these {len(done.needed):,} only because what is kept needs all their files: {', '.join(done.needed)}"
        )
    data = {
        "dry_run": dry_run,
        "num_files": len(done.deleted),
        "size_bytes": done.size_bytes,
        "kept": done.kept,
        "needed": done.needed,
        "files": [info.path for info in done.deleted],
    }
    return Result(data, [*((info.path for info in done.deleted) if dry_run else ()), count, kept])


def _publications(number: int) -> str:
    return "1 publication stays" if number == 1 else f"{number:,} publications stay"


def compact(files: StoreFiles, wishes: IndexConfig, target_rows: int | None, target_mib: float | None) -> Result:
    """Put small part files together."""
    from embedder.store.compact import PartTarget
    from embedder.store.compact import compact as run_compact

    default = PartTarget()
    target = PartTarget(
        num_rows=target_rows or default.num_rows,
        size_bytes=int(target_mib * MIB) if target_mib else default.size_bytes,
    )
    with writing(files, wishes) as say:
        new, tables = run_compact(files, target, say)
    lines = [
        f"{each.table}: {each.num_files_before:,} part files -> {each.num_files_after:,}, "
        f"{size_text(each.bytes_rewritten)} written anew"
        for each in tables
    ]
    lines.append("nothing to compact" if new is None else f"published as run {new.run_id}; no row changed")
    data = {"published": new.model_dump() if new else None, "tables": [asdict(each) for each in tables]}
    return Result(data, list(lines))


def allow_again(files: StoreFiles, wishes: IndexConfig, item_ids: list[str]) -> Result:
    """Forget that items were purged."""
    from embedder.store.purge.tombstones import allow_again as forget

    with writing(files, wishes):
        num_forgotten = forget(files, item_ids)
    return Result(
        {"num_forgotten": num_forgotten},
        [f"{num_forgotten:,} of {len(set(item_ids)):,} items were purged, and may come back with the next run"],
    )


def migrate(files: StoreFiles, wishes: IndexConfig) -> Result:
    """Bring a store up to this format."""
    from embedder.store.layout import FORMAT_VERSION
    from embedder.store.migrate import migrate as run_migrate

    with writing(files, wishes) as say:
        migrated = run_migrate(files, say)
    text = f"store {files.address}: format version {FORMAT_VERSION}"
    if not migrated.was_older:
        text += " already; nothing to do"
    elif migrated.published is not None:
        text += f", published as run {migrated.published.run_id}; no vector changed"
    data = {
        "format_version": FORMAT_VERSION,
        "was_older": migrated.was_older,
        "published": migrated.published.model_dump() if migrated.published else None,
    }
    return Result(data, [text])


@contextmanager
def writing(files: StoreFiles, wishes: IndexConfig) -> Iterator[Callable[[str], None]]:
    """Hold the store for writing, a publication that was cut off brought to its end; yields who is told.

    Args:
        files: the store.
        wishes: what the index of that publication shall be.

    Raises:
        StoreError: there is no store (none is made), its format is unknown, or another process holds it.
    """
    from embedder.cli.render import TerminalWatcher
    from embedder.store.lock import write_lock
    from embedder.store.publish import finish_publication
    from embedder.store.store_info import read_store_info
    from embedder.store_index.keep_index import keep_index

    read_store_info(files)
    say = TerminalWatcher().say
    with write_lock(files, say):
        if finish_publication(files, lambda version, info: keep_index(files, version, info, say, wishes)):
            say("the last publication was cut off; now it is whole")
        yield say


def size_text(size_bytes: int) -> str:
    """Bytes as a person reads them."""
    return f"{size_bytes / MIB:,.1f} MiB" if size_bytes >= MIB else f"{size_bytes / 1024:,.0f} KiB"


def new_table(*columns: str) -> Table:
    """A table as commands print them."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        table.add_column(name, overflow="fold")
    return table
