"""`embedder purge`: items are removed for good, after a plan was shown and confirmed."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from embedder.cli.options import ReadConfig, StoreUri, command
from embedder.cli.results import Result
from embedder.cli.store_access import write_access
from embedder.cli.terminal import Terminal
from embedder.config import RunConfig
from embedder.errors import ConfigError, StoreError
from embedder.quantities import agree, plural, size_text
from embedder.storage.printable import is_text, readable
from embedder.store.files import StoreFiles

if TYPE_CHECKING:
    from embedder.plugins.maintain.purge.purge import Purge
    from embedder.plugins.maintain.purge.purge_plan import PurgePlan

MAX_LISTED = 20
"""Most items, and most versions, that a plan lists individually."""


@command
def purge(
    read: ReadConfig,
    item_ids: Annotated[list[str] | None, typer.Argument(metavar="ID...", help="The items.")] = None,
    from_file: Annotated[Path | None, typer.Option("--from-file", help="A file with one id per line.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask; needed where there is no terminal.")] = False,
    allow_again: Annotated[bool, typer.Option("--allow-again", help="Forget that these were purged.")] = False,
    store: StoreUri = None,
) -> Result:
    """Remove items for good, from older versions and indexes too, and prove it; all of them or none."""
    ids = [*(item_ids or []), *_ids_in(from_file)]
    if not ids:
        raise ConfigError("purge: no items; give their ids, or --from-file FILE with one per line")
    if (bad := next((item_id for item_id in ids if not is_text(item_id)), None)) is not None:
        raise ConfigError(
            f"purge: '{readable(bad)}' is not UTF-8, as every id is; `embedder rejects` lists the ids of files that "
            "are named so"
        )
    if allow_again and dry_run:
        raise ConfigError("purge: --allow-again changes one small file and has no --dry-run; leave one of them out")
    run = read({"store": store})
    if not (allow_again or dry_run or yes or sys.stdin.isatty()):
        _purge_plan(StoreFiles(run.required_store), ids, reads_alone=True)  # refuses unknown items
        raise ConfigError(
            "purge: there is no terminal to ask on whether to remove the items for good; --yes says so beforehand, "
            "--dry-run says what would be done"
        )
    if allow_again:
        return _allow_again(run, ids)
    if dry_run:
        plan = _purge_plan(StoreFiles(run.required_store), ids, reads_alone=True)
        return Result({"dry_run": True, **_plan_data(plan)}, [*_plan_lines(plan), "nothing was changed"])
    return _purge(run, ids, confirm=not yes)


def _ids_in(path: Path | None) -> list[str]:
    """Read one id per line; spaces belong to an id, empty lines are skipped."""
    if path is None:
        return []
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # an id may hold other line separators
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror.lower() if isinstance(error, OSError) and error.strerror else "it is not UTF-8"
        raise ConfigError(f"--from-file {path}: can't be read ({reason}); give a text file, an id per line") from None
    return [line.removesuffix("\r") for line in lines if line.removesuffix("\r")]


def _confirm(lines: list[str]) -> None:
    """Ask on the terminal, so that standard output holds only the result; raise `typer.Abort` unless confirmed."""
    terminal = Terminal(stderr=True)
    for line in lines:
        terminal.print(line, soft_wrap=True)
    sys.stderr.write("Remove them for good? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        sys.stderr.write("nothing was changed\n")
        raise typer.Abort


def _allow_again(config: RunConfig, item_ids: list[str]) -> Result:
    from embedder.store.publish.tombstones import allow_again

    with write_access(config) as files:
        num_forgotten = allow_again(files, item_ids)
    return Result(
        {"num_forgotten": num_forgotten},
        [
            f"of {plural(len(set(item_ids)), 'item')}, {num_forgotten:,} had been purged, and may come back with the "
            "next run"
        ],
    )


def _purge(config: RunConfig, item_ids: list[str], *, confirm: bool) -> Result:
    """Remove items for good, after showing the plan and asking if `confirm`.

    The configuration also constrains the index of the new publication.
    """
    from embedder.plugins.maintain.purge.purge import purge as run_purge
    from embedder.store.layout import read_current
    from embedder.store.tables.models import views
    from embedder.store_index.index_versions import drop_copies
    from embedder.store_index.keep_index import index_choice
    from embedder.store_index.keep_words import ensure_words

    if confirm:
        plan = _purge_plan(StoreFiles(config.required_store), item_ids)
        if not plan.finds_nothing:
            _confirm(_plan_lines(plan))  # without the lock: an answer may take hours
    try:
        with write_access(config, commits="embedder purge") as files:
            done = run_purge(files, item_ids, index_choice(files, config.index, reuse=False))
            if (current := read_current(files)) is not None:
                for name, view in views(files, current).items():
                    version = current.models[name].embeddings if name else current.embeddings
                    ensure_words(view, version, config.index, may_update=False)
    finally:
        drop_copies()
    published = done.published.model_dump() if done.published else None
    data = _plan_data(done.plan) | {"published": published, "unreadable": done.unreadable, "scan": asdict(done.scan)}
    return Result({"dry_run": False, **data}, _describe_purge(files, done))


def _purge_plan(files: StoreFiles, item_ids: list[str], *, reads_alone: bool = False) -> "PurgePlan":
    """Plan a purge; with `reads_alone` without a lock, a file in the store, so a concurrent run may make it fail."""
    from embedder.plugins.maintain.purge.purge_plan import plan_purge
    from embedder.store.lock import write_lock
    from embedder.store.store_info import read_store_info

    read_store_info(files)
    with nullcontext() if reads_alone else write_lock(files):  # no other process changes files while they are read
        try:
            return plan_purge(files, item_ids)
        except FileNotFoundError as error:
            raise StoreError(
                f"{error}: gone while the store was searched, as a run is writing to it; purge when that has ended"
            ) from None


def _plan_data(plan: "PurgePlan") -> dict[str, Any]:
    return {
        "items": [asdict(item) for item in plan.items],
        "num_asked": len(plan.items),
        "num_published": plan.num_published,
        "num_vectors": plan.num_vectors,
        "bytes_rewritten": plan.bytes_rewritten,
        "versions": plan.versions,
        "given_up": plan.given_up,
        "indexes": sorted(plan.indexes),
        "num_files_deleted": len(plan.deleted),
        "num_files_changed": len(plan.changed),
        "rewritten": [info.path for info in plan.rewritten],
        "deleted": [info.path for info in plan.deleted],
        "changed": [info.path for info in plan.changed],
    }


def _plan_lines(plan: "PurgePlan") -> list[str]:
    listed = [item for item in plan.items if not (plan.finds_nothing and item.was_purged)][:MAX_LISTED]
    lines = [
        f"{item.item_id!r}: "
        + (f"{plural(item.num_vectors, 'vector')} published" if item.is_published else "not published now")
        for item in listed
    ]
    if len(plan.items) > len(listed) > 0:
        lines.append(f"and {len(plan.items) - len(listed):,} more")
    if plan.finds_nothing:
        return [*lines, "purged before: nothing of them is left"]
    lines += [
        f"to remove for good: {plural(len(plan.items), 'item')}, {plan.num_published:,} of them published, with "
        f"{plural(plan.num_vectors, 'vector')}",
        f"{plural(len(plan.rewritten), 'part file')} rewritten without them, {size_text(plan.bytes_rewritten)}; "
        f"{plural(len(plan.deleted), 'file')} deleted (part files, journal entries, "
        f"{plural(len(plan.indexes), 'index version')}), {_describe_changes(plan)}",
        "versions that hold them and stay readable, without them: "
        f"{len(plan.versions):,}{_join_run_ids(plan.versions)}",
    ]
    if plan.given_up:
        lines.append(f"not finished, and given up: {', '.join(plan.given_up)}; the next run embeds its items again")
    return lines


def _describe_changes(plan: "PurgePlan") -> str:
    return f"{plural(len(plan.changed), 'text or log file', 'texts and log files')} changed"


def _join_run_ids(run_ids: Sequence[str]) -> str:
    more = f" and {len(run_ids) - MAX_LISTED:,} more" if len(run_ids) > MAX_LISTED else ""
    return f": {', '.join(run_ids[:MAX_LISTED])}{more}" if run_ids else ""


def _describe_purge(files: StoreFiles, done: "Purge") -> list[RenderableType]:
    plan, scan = done.plan, done.scan
    lines = [
        f"of {plural(len(plan.items), 'item')}, {plan.num_published:,} had been published, with "
        f"{plural(plan.num_vectors, 'vector')}; {plural(len(plan.rewritten), 'part file')} rewritten "
        f"({size_text(plan.bytes_rewritten)}), {plural(len(plan.deleted), 'file')} deleted, {_describe_changes(plan)}",
        f"searched {plural(scan.num_files, 'file')} ({scan.num_parquet:,} Parquet, {size_text(scan.size_bytes)} in "
        "all): none holds or names them",
    ]
    before = sum(item.was_purged for item in plan.items)
    if before:
        left = "nothing of them was left" if plan.finds_nothing else "what was left of them is gone now"
        lines.append(f"purged before: {before:,}; {left}")
    if plan.versions:
        stays = agree(len(plan.versions), "stays", "stay")
        lines.append(
            f"{plural(len(plan.versions), 'earlier version')} {stays} readable, without "
            f"them{_join_run_ids(plan.versions)}"
        )
    if done.unreadable:
        lines.append(f"can't be read any more: {', '.join(done.unreadable)}")
    if done.published is not None:
        lines.append(f"published without them as run {done.published.run_id}")
    if files.folder is None:
        lines.append(
            "copies of indexes on this machine are deleted; other machines keep theirs until they fetch newer ones, "
            "and a bucket with versioning keeps what was deleted until its rules expire it"
        )
    return [*lines, "later runs leave them out; `embedder purge --allow-again ID` lets them come back"]
