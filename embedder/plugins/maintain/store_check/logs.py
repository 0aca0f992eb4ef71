"""Checks the tables' logs: readable entries without gaps, and the newest version compared with the published one."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from embedder.plugins.maintain.store_check.findings import Finding, Unreadable, attempt, format_names
from embedder.plugins.maintain.store_check.scope import CheckedModel
from embedder.store.files import StoreFiles
from embedder.store.schema import TABLES
from embedder.store.tables.deletion_vectors import files_of
from embedder.store.tables.delta_log import LOG_FOLDER, read_actions

LOG_FILE = re.compile(r"(?P<number>\d{20})(?P<checkpoint>\.checkpoint(?:\.\d{10}\.\d{10})?\.parquet|\.json)")
RESTORE = "restore the file from a backup, or embed into a new store"


@dataclass(frozen=True)
class LogContent:
    """Content of a table's log.

    `added` are the part files of any version and the files of their deletion vectors, relative to the table's folder;
    `is_readable` is whether nothing is missing or damaged.
    """

    added: frozenset[str]
    findings: tuple[Finding, ...]
    is_readable: bool


def check_logs(model: CheckedModel) -> dict[str, LogContent]:
    """Check the log of each table of a model."""
    return {table: check_log(model, table) for table in TABLES}


def check_log(model: CheckedModel, table: str) -> LogContent:
    """Read a table's whole log."""
    folder, published = f"{table}/{LOG_FOLDER}", getattr(model.current, table)
    names = {name: found for name in model.sizes_below(folder) if (found := LOG_FILE.fullmatch(name)) is not None}
    entries = {int(found["number"]) for name, found in names.items() if name.endswith(".json")}
    checkpoints = {int(found["number"]) for name, found in names.items() if found["checkpoint"] != ".json"}
    added, findings = set[str](), []
    is_readable = True
    order = sorted(names)
    contents = model.files.stream(lambda name: attempt(lambda: _list_added(model.files, table, name)), order)
    for name, content in zip(order, contents, strict=True):
        if isinstance(content, Unreadable):
            is_readable = False
            rule = "an entry of a log has an action in each line"
            place = model.place(f"{folder}/{name}")
            findings.append(Finding("error", place, f"can't be read ({content.reason})", rule, RESTORE))
        else:
            added |= content
    place = model.place(folder)
    if missing := missing_entries(entries, checkpoints, published):
        is_readable = False
        findings.append(_gap(place, missing, checkpoints, published))
    newest = max([*entries, *checkpoints], default=-1)
    if newest > published:
        text = f"version {newest} is newer than the published {published}"
        rule = f"the last {newest - published:,} of them are of an operation that was cut off, or is at work"
        cure = "the next command that writes finishes it or reverts it"
        findings.append(Finding("note", place, text, rule, cure))
    return LogContent(frozenset(added), tuple(findings), is_readable)


def missing_entries(entries: Iterable[int], checkpoints: Iterable[int], published: int) -> list[int]:
    """Return numbers that a log lacks up to the published version; another tool's log may begin at a checkpoint."""
    there = set(entries)
    first = 0 if 0 in there or not (known := set(checkpoints)) else min(known) + 1
    return [number for number in range(first, max([published, *there], default=-1) + 1) if number not in there]


def _gap(place: str, missing: Sequence[int], checkpoints: Iterable[int], published: int) -> Finding:
    """Finding on missing entries: an error if they come after the checkpoint that the published version starts at."""
    start = max((each for each in checkpoints if each <= published), default=-1)
    lost = any(number > start for number in missing)
    return Finding(
        "error" if lost else "warning",
        place,
        f"lacks {format_names(f'entry {number}' for number in missing)}",
        "each version has its entry, and what is published has them all from its last checkpoint on",
        RESTORE if lost else "versions before the checkpoint can't be read any more; leave them, or restore them",
    )


def _list_added(files: StoreFiles, table: str, name: str) -> set[str]:
    actions = list(read_actions(files, f"{table}/{LOG_FOLDER}/{name}")[0])
    if not actions:
        raise ValueError("it is empty")
    return {path for action in actions if action.get("add") for path in files_of(table, action["add"])}
