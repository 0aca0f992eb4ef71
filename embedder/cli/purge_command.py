"""`embedder purge`: what it will do, told before it is done, and what it did."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from embedder.cli.commands import Result
from embedder.cli.store_commands import size_text, writing
from embedder.config import IndexConfig
from embedder.store.files import StoreFiles

if TYPE_CHECKING:
    from embedder.store.purge.plan import PurgePlan
    from embedder.store.purge.purge import Purge

MAX_TOLD = 20
"""Items that a plan names one by one."""

Confirm = Callable[[list[str]], None]


def purge(
    files: StoreFiles,
    wishes: IndexConfig,
    item_ids: list[str],
    *,
    dry_run: bool = False,
    confirm: Confirm | None = None,
) -> Result:
    """Remove items for good.

    Args:
        files: the store.
        wishes: what the index of the new publication shall be.
        item_ids: the items.
        dry_run: say what would be done, and do nothing.
        confirm: asks whether to go on, told what will be done; raises where not.
    """
    from embedder.store.purge.purge import purge as run_purge
    from embedder.store_index.keep_index import built_without
    from embedder.store_index.versions import drop_copies

    if dry_run or confirm is not None:
        plan = _purge_plan(files, item_ids)
        if dry_run:
            return Result({"dry_run": True, **_purge_data(plan)}, [*_planned_purge(plan), "nothing was changed"])
        if confirm is not None and not plan.finds_nothing:
            confirm(_planned_purge(plan))  # the store is not held meanwhile: a person may take hours
    with writing(files, wishes) as say:
        done = run_purge(files, item_ids, built_without(files, say, wishes), say)
    drop_copies()
    published = done.published.model_dump() if done.published else None
    data = _purge_data(done.plan) | {"published": published, "unreadable": done.unreadable, "scan": asdict(done.scan)}
    return Result({"dry_run": False, **data}, _purged(files, done))


def _purge_plan(files: StoreFiles, item_ids: list[str]) -> "PurgePlan":
    from embedder.cli.render import TerminalWatcher
    from embedder.store.lock import write_lock
    from embedder.store.purge.plan import plan_purge
    from embedder.store.store_info import read_store_info

    read_store_info(files)
    with write_lock(files, TerminalWatcher().say):  # nobody else changes files while they are read
        return plan_purge(files, item_ids)


def _purge_data(plan: "PurgePlan") -> dict[str, Any]:
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


def _planned_purge(plan: "PurgePlan") -> list[str]:
    """What a purge will do, in sentences."""
    told = [item for item in plan.items if not (plan.finds_nothing and item.was_purged)][:MAX_TOLD]
    rows = {True: "{} vectors published", False: "not published now"}
    lines = [f"{item.item_id!r}: {rows[item.is_published].format(f'{item.num_vectors:,}')}" for item in told]
    if len(plan.items) > len(told) > 0:
        lines.append(f"and {len(plan.items) - len(told):,} more")
    if plan.finds_nothing:
        return [*lines, "purged before: nothing of them is left"]
    lines += [
        f"to remove for good: {len(plan.items):,} items; {plan.num_published:,} are published, with "
        f"{plan.num_vectors:,} vectors",
        f"{len(plan.rewritten):,} part files written anew without them, {size_text(plan.bytes_rewritten)}; "
        f"{len(plan.deleted):,} files deleted (part files, journal entries, {len(plan.indexes):,} index versions), "
        f"{len(plan.changed):,} texts and log files changed",
        f"{len(plan.versions):,} versions hold them and stay readable, without them{_listed(plan.versions)}",
    ]
    if plan.given_up:
        lines.append(f"not finished, and given up: {', '.join(plan.given_up)}; the next run embeds its items again")
    return lines


def _listed(run_ids: Sequence[str]) -> str:
    more = f" and {len(run_ids) - MAX_TOLD:,} more" if len(run_ids) > MAX_TOLD else ""
    return f": {', '.join(run_ids[:MAX_TOLD])}{more}" if run_ids else ""


def _purged(files: StoreFiles, done: "Purge") -> list[RenderableType]:
    plan, scan = done.plan, done.scan
    lines = [
        f"{plan.num_published:,} of {len(plan.items):,} items were published, with {plan.num_vectors:,} vectors; "
        f"{len(plan.rewritten):,} part files written anew ({size_text(plan.bytes_rewritten)}), "
        f"{len(plan.deleted):,} files deleted, {len(plan.changed):,} texts and log files changed",
        f"searched {scan.num_files:,} files ({scan.num_parquet:,} Parquet, {size_text(scan.size_bytes)} in all): "
        "none holds or names them",
    ]
    before = sum(item.was_purged for item in plan.items)
    if before:
        left = "nothing of them was left" if plan.finds_nothing else "what was left of them is gone now"
        lines.append(f"purged before: {before:,}; {left}")
    if plan.versions:
        lines.append(f"{len(plan.versions):,} earlier versions stay readable, without them{_listed(plan.versions)}")
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
