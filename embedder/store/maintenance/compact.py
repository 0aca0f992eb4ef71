"""Compaction of many small part files of all models into fewer larger ones; no row changes."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from embedder.errors import StoreError
from embedder.quantities import plural
from embedder.store.files import StoreFiles
from embedder.store.journal.part_writer import rewrite_each, rewritten_name, round_rows, store_part
from embedder.store.journal.runs import unfinished_runs
from embedder.store.layout import Current, Published, RunInfo
from embedder.store.maintenance.half_precision import VectorType, models_to_round
from embedder.store.part_file import PartFile
from embedder.store.publish.current import IndexChoice, begin, parts_at, publish_files, versions_of, writable
from embedder.store.schema import VECTOR_COLUMNS
from embedder.store.tables.models import model_files
from embedder.store.tables.tables import RecordTable

LOG = logging.getLogger(__name__)

MIN_SAVED = 32
"""Reduction of files over all tables from which a refresh compacts; below, rewriting costs more than it saves."""

MIN_SAVED_BY_EMBED = 1000
"""Reduction from which `embed` compacts: frequent callers want new items soon, and accept some hundred files."""

MIN_CHECKPOINTED = 1000
"""Removed files of a table from which the log gets a checkpoint, which spares readers that large log entry."""


@dataclass(frozen=True)
class PartTarget:
    """Target size of a part file; a group of this size is in memory while it is rewritten.

    Larger files make reading faster and changes costlier: a changed row rewrites its whole file.
    """

    num_rows: int = 50_000
    size_bytes: int = 64 << 20
    marked_share: float = 0.2
    """Share of rows that have left (deletion vectors) from which a file is written without them."""


DEFAULT_TARGET = PartTarget()


@dataclass(frozen=True)
class Compaction:
    """Result of a compaction for one table; `model` is empty for the main one."""

    model: str
    table: str
    num_files_before: int
    num_files_after: int
    bytes_rewritten: int


def plan_groups(parts: Iterable[PartFile], target: PartTarget) -> list[list[PartFile]]:
    """Group files to merge: neighbours by name, so by age, each at most half the target.

    Larger files stay as they are, so that not every compaction rewrites a merged file; but one of whose rows many have
    left is its own group.
    """
    groups: list[list[PartFile]] = []
    folded: list[list[PartFile]] = []
    rows = size_bytes = 0
    for part in sorted(parts, key=lambda each: each.path):
        if part.num_rows * 2 > target.num_rows or part.size_bytes * 2 > target.size_bytes:
            folded += [[part]] if part.marked_share >= target.marked_share else []
            continue
        rows, size_bytes = rows + part.num_rows, size_bytes + part.size_bytes
        if not groups or rows > target.num_rows or size_bytes > target.size_bytes:
            groups.append([])
            rows, size_bytes = part.num_rows, part.size_bytes
        groups[-1].append(part)
    is_due = [len(group) > 1 or group[0].marked_share >= target.marked_share for group in groups]
    return [*(group for group, due in zip(groups, is_due, strict=True) if due), *folded]


def compact(
    files: StoreFiles,
    target: PartTarget = DEFAULT_TARGET,
    min_saved: int = 1,
    choose_index: IndexChoice | None = None,
    *,
    lay_out: bool = False,
    vectors: VectorType | None = None,
) -> tuple[Published | None, list[Compaction]]:
    """Merge small part files and publish the same rows as a new version, with the same index.

    The caller holds the write lock. Nothing is done if fewer than `min_saved` files, over all tables, would be saved,
    or written without the many rows that have left them. `lay_out` also rewrites each larger file whose vectors an
    earlier release has written, so that they are read fast. `vectors` changes the type in which vectors are recorded
    from then on; for float16, published ones are rounded where a gate allows it. `choose_index` chooses the index and
    makes its word index; None keeps the index and makes no word index. Returns the new publication, or None, and the
    result for each table. Raises StoreError if an unfinished run's work would be lost.
    """
    current = writable(files)
    parts = parts_at(files, current)
    halves = _choose_halves(files, current, vectors)
    plan = _plan(files, current, parts, target, halves, lay_out=lay_out)
    done = [
        _compaction(model, name, of_table, plan.groups[model][name])
        for model, tables in parts.items()
        for name, of_table in tables.items()
    ]
    num_saved = sum(each.num_files_before - each.num_files_after for each in done)
    if num_saved + plan.num_folded < min_saved and not plan.num_renewed and not halves:
        return None, done
    _refuse_unfinished_runs(files)
    _log_plan(num_saved, plan.num_folded)
    operation = begin(files, "compaction", current)
    wanted = {
        model: _merge_model(view, operation, own, parts[model], plan.groups[model], is_half=model in halves)
        for model, (view, own) in versions_of(files, current).items()
    }
    published = publish_files(files, operation, current, wanted, choose_index or same_index)
    _write_checkpoints(files, done)
    return published, done


def _choose_halves(files: StoreFiles, current: Current, vectors: VectorType | None) -> dict[str, list[str]]:
    if vectors is not None:  # which is noted in store.json before anything is rounded
        _refuse_unfinished_runs(files)
    return models_to_round(files, current, vectors)


class _Plan(NamedTuple):
    """Part files to merge, by model and table, each group to one; of one file, to rewrite it.

    `num_folded` files lose rows that have left, `num_renewed` get another layout.
    """

    groups: dict[str, dict[str, list[list[PartFile]]]]
    num_folded: int
    num_renewed: int


def _plan(
    files: StoreFiles,
    current: Current,
    parts: dict[str, dict[str, list[PartFile]]],
    target: PartTarget,
    halves: Mapping[str, Sequence[str]],
    *,
    lay_out: bool,
) -> _Plan:
    groups = {
        model: {name: plan_groups(of_table, target) for name, of_table in tables.items()}
        for model, tables in parts.items()
    }
    num_folded = sum(len(group) == 1 for tables in groups.values() for own in tables.values() for group in own)
    num_renewed = 0
    for model, of_model in groups.items():
        merged = {part.path for group in of_model["embeddings"] for part in group}
        others = [part for part in parts[model]["embeddings"] if part.path not in merged]
        if model in halves:
            others = [part for part in others if part.path in halves[model]]
        else:
            others = _not_laid_out(files, current, model, others) if lay_out else []
        of_model["embeddings"] += [[part] for part in others]
        num_renewed += len(others)
    return _Plan(groups, num_folded, num_renewed)


def _not_laid_out(files: StoreFiles, current: Current, model: str, parts: Sequence[PartFile]) -> list[PartFile]:
    """Return those of a model's part files whose vectors are not in the layout that is read fast."""
    view, own = versions_of(files, current)[model]
    table = RecordTable(view, "embeddings", own.embeddings)
    fast = view.each(lambda part: table.is_laid_out(part.path, VECTOR_COLUMNS), parts)
    return [part for part, is_fast in zip(parts, fast, strict=True) if not is_fast]


def _refuse_unfinished_runs(files: StoreFiles) -> None:
    for run in unfinished_runs(files):
        raise StoreError(
            f"store {files.address}: run {run.run_id} is not finished, and compacting would give up what it embedded; "
            "finish it first, by the command that began it"
        )


def _write_checkpoints(files: StoreFiles, done: Iterable[Compaction]) -> None:
    for each in done:
        if each.num_files_before - each.num_files_after >= MIN_CHECKPOINTED:
            RecordTable(model_files(files, each.model), each.table).write_checkpoint()


def same_index(candidate: Current, model: str = "") -> int | None:
    """Choose the existing index: it knows rows by (item_id, segment), not by file, so it remains valid."""
    del model
    return candidate.index


def _compaction(model: str, name: str, parts: list[PartFile], groups: list[list[PartFile]]) -> Compaction:
    rewritten = [part for group in groups for part in group]
    return Compaction(
        model=model,
        table=name,
        num_files_before=len(parts),
        num_files_after=len(parts) - len(rewritten) + len(groups),
        bytes_rewritten=sum(part.size_bytes for part in rewritten),
    )


def _log_plan(num_saved: int, num_folded: int) -> None:
    marked = f", {num_folded:,} written without rows that have left" if num_folded else ""
    LOG.info(f"compacting: {plural(num_saved, 'part file')} fewer{marked}")


def _merge_model(
    view: StoreFiles, run: RunInfo, own: Current, parts: Mapping[str, list[PartFile]],
    groups: Mapping[str, list[list[PartFile]]], *, is_half: bool,
) -> dict[str, list[PartFile]]:  # fmt: skip
    return {name: _merge(view, run, own, name, each, groups[name], is_half=is_half) for name, each in parts.items()}


def _merge(
    files: StoreFiles, run: RunInfo, current: Current, name: str, parts: list[PartFile], groups: list[list[PartFile]],
    *, is_half: bool,
) -> list[PartFile]:  # fmt: skip
    table = RecordTable(files, name, getattr(current, name))
    gone = {part.path for group in groups for part in group}

    def merge(group: list[PartFile]) -> PartFile:
        paths = [part.path for part in group]
        rows = table.read(paths=paths)
        if is_half and name == "embeddings":
            rows = round_rows(rows)
        return store_part(files, name, rewritten_name(run.run_id, "", "compact", paths), rows, session="")

    return [*(part for part in parts if part.path not in gone), *rewrite_each(merge, groups)]
