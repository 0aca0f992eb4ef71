"""Permanent removal of items from all models' published rows, older versions and texts, which a search then verifies.

The order makes each step repeatable. First the items are recorded as purged, so that no run embeds them again. Then
they leave the published state, then indexes, texts and logs. Part files come last, as they hold the URIs and vectors by
which the rest is searched. After a kill at any point, the same command continues.

Older versions stay readable: their part files are rewritten in place, so that every version keeps its list of files,
and the log gets the new sizes (with deletion vectors: see `blank_rows`). The published state has no such file.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeGuard, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from embedder.errors import RunFailedError, StoreError
from embedder.plugins.maintain.purge.audit import (
    Scan,
    is_among,
    is_free_text,
    names_in,
    row_values,
    scan_store,
    texts_of,
)
from embedder.plugins.maintain.purge.blank_rows import blank, find_vectors, mark_blanked
from embedder.plugins.maintain.purge.id_matcher import ItemNames
from embedder.plugins.maintain.purge.purge_plan import (
    PurgePlan,
    index_folder,
    is_part,
    place_of,
    plan_purge,
    split_segment,
)
from embedder.quantities import plural
from embedder.store.backends import FileInfo, WriteConflictError, is_unfinished
from embedder.store.files import StoreFiles
from embedder.store.journal.journal_segments import is_segment
from embedder.store.journal.part_writer import encode_part, rewritten_name, store_part
from embedder.store.layout import Current, Published, RunInfo, read_current, swap_bytes
from embedder.store.part_file import PartFile, PartKey
from embedder.store.publish.current import (
    IndexChoice,
    begin,
    count_rows,
    model_folder,
    move_current,
    parts_at,
    publish_files,
    update_record,
    versions_of,
)
from embedder.store.publish.deletions import delete_listed
from embedder.store.publish.history import publications, readable
from embedder.store.publish.tombstones import finish_purge, remember_purged
from embedder.store.schema import TABLES
from embedder.store.tables.delta_log import LOG_FOLDER, Action, change_log, places_of, restate_parts, without_bounds
from embedder.store.tables.models import model_files, model_folders
from embedder.store.tables.tables import RecordTable

LOG = logging.getLogger(__name__)
Result = TypeVar("Result")

MAX_LOOKS = 3
GROUP_BYTES = 256 << 20
"""Size of part files whose new content is held in memory together, so that the log is rewritten once for all."""


@dataclass(frozen=True)
class Purge:
    """Result of a purge, with a final search of the whole store (`scan`).

    `unreadable` are run ids of publications that have become unreadable, contrary to the plan. `published` is None if
    the published state didn't hold the items.
    """

    plan: PurgePlan
    unreadable: tuple[str, ...]
    published: Published | None
    scan: Scan


def purge(files: StoreFiles, item_ids: Collection[str], choose_index: IndexChoice) -> Purge:
    """Remove items permanently, all of them or none.

    The caller holds the write lock. `choose_index` chooses or builds the index of the new publication, if the old one
    held the items. Raises StoreError if there is no store, its format is older, or an item is unknown, and
    RunFailedError if the search still finds a trace.
    """
    unfinished = [info.path for info in files.list("") if is_unfinished(info.path)]
    files.confirm_lease()
    files.delete_each(unfinished)  # from killed writers; nothing ever refers to them, and they may contain anything
    plan = _repeat_until_settled(partial(plan_purge, files, item_ids))
    before = readable(files, publications(files))
    remember_purged(files, plan.ids)
    new = _publish_without(files, plan, choose_index) if plan.publishes else None
    _forget_indexes(files, plan.indexes)
    _delete(files, [info for info in plan.deleted if not is_part(info)])
    _drop_sealed_entries(files, plan)
    redact_logs(files, plan.names)
    _repeat_until_settled(partial(redact_texts, files, plan.names))
    _delete(files, [info for info in plan.deleted if is_part(info)])
    for model in ["", *model_folders(files)]:
        for name in TABLES:
            _rewrite_in_place(files, model, name, plan.rewritten, plan.ids)
    _recount(files)
    scan = _repeat_until_settled(partial(scan_store, files, plan.names))
    if scan.found_in:
        raise RunFailedError(
            f"purge: an item is still held or named in {len(scan.found_in):,} of {plural(scan.num_files, 'file')}: "
            f"{', '.join(scan.found_in[:5])}; nothing that is published holds them; purge again, or delete these files"
        )
    finish_purge(files, plan.ids)
    lost = before - readable(files, publications(files))
    return Purge(plan, tuple(sorted(lost)), new, scan)


def _repeat_until_settled(work: Callable[[], Result]) -> Result:
    """Do something with all files; retry if a run that was overtaken still joins or deletes files of its journal."""
    for _ in range(MAX_LOOKS - 1):
        with suppress(FileNotFoundError):
            return work()
    return work()


def _publish_without(files: StoreFiles, plan: PurgePlan, choose_index: IndexChoice) -> Published | None:
    current = read_current(files)
    if current is None:
        return None
    for run_id in plan.given_up:
        LOG.info(f"run {run_id} was not finished and is given up: the next run embeds its items again")
    operation = begin(files, "purge", current)
    held = {info.path for info in plan.published}
    parts = parts_at(files, current)
    wanted = {
        model: {name: [*_without(view, operation, name, parts[model][name], held, plan.ids)] for name in TABLES}
        for model, (view, _) in versions_of(files, current).items()
    }

    def choose(candidate: Current, model: str = "") -> int | None:
        is_held = candidate.index is not None and index_folder(candidate.index, model) in plan.indexes
        return choose_index(candidate, *([model] if model else [])) if is_held else candidate.index

    return publish_files(files, operation, current, wanted, choose)


def _without(
    files: StoreFiles, run: RunInfo, name: str, parts: Sequence[PartFile], held: Collection[str], ids: Collection[str]
) -> Iterator[PartFile]:
    """Yield the part files without the items: unchanged, or new ones in place of those that hold an item."""
    table = RecordTable(files, name)
    for part in parts:
        if f"{model_folder(files.model)}{name}/{part.path}" not in held:
            yield part
        elif (rest := _rest(table, part.path, ids)).num_rows:
            yield store_part(files, name, rewritten_name(run.run_id, "", "purge", [part.path]), rest, session="")


def _rest(table: RecordTable, path: str, ids: Collection[str]) -> pa.Table:
    rows = table.read(paths=[path])
    return rows.filter(pc.invert(is_among(rows["item_id"], ids)))


def _forget_indexes(files: StoreFiles, folders: Collection[str]) -> None:
    """Remove index versions that will be deleted from publications' records; searches of those are then exact."""
    for model in ["", *model_folders(files)]:
        view = model_files(files, model)
        for record in publications(view):
            times = record.past_indexes.items()
            past = {number: when for number, when in times if index_folder(number, model) not in folders}
            is_gone = record.index is not None and index_folder(record.index, model) in folders
            update_record(view, record.run_id, {"index": None if is_gone else record.index, "past_indexes": past})


def _recount(files: StoreFiles) -> None:
    whole = readable(files, publications(files))
    for model in ["", *model_folders(files)]:
        view, known = model_files(files, model), dict[PartKey, Counter[str]]()
        for record in publications(view):
            if record.run_id in whole:
                update_record(view, record.run_id, count_rows(view, record, known))


def _drop_sealed_entries(files: StoreFiles, plan: PurgePlan) -> None:
    """Rewrite journal segments without the entries that name an item or a part file with one."""
    parts = {info.path for info in (*plan.rewritten, *plan.deleted) if is_part(info)}
    for info in plan.changed:
        if is_segment(info.path):

            def without_items(content: bytes | None, path: str = info.path) -> bytes | None:
                stays, goes = split_segment(files, path, content or b"", plan.names, parts)
                return b"".join(line + b"\n" for line in stays) if goes else None

            swap_bytes(files, info.path, without_items)


def _delete(files: StoreFiles, infos: Sequence[FileInfo]) -> None:
    """Delete files in two steps: CURRENT.json lists them first."""
    current = read_current(files)
    if current is None:  # nothing was ever published, so nothing can refer to them
        files.confirm_lease()
        files.delete_each([info.path for info in infos])
    elif infos:
        move_current(files, current, [info.path for info in infos])
        delete_listed(files)


def redact_texts(files: StoreFiles, names: ItemNames) -> None:
    """Replace the names in texts with `[purged]`; the final search reports files that aren't text."""
    texts = [info for info in files.list("") if is_free_text(info)]
    for info in texts:
        if names_in(files, info, names):
            swap_bytes(files, info.path, lambda content: _without_names(content, names) if _is_utf8(content) else None)


def _without_names(content: bytes, names: ItemNames) -> bytes:
    values = [names.removed_from(value) for value in texts_of(content)]
    is_document = len(values) == 1 and b"\n" in content.strip()
    lines = [
        value if isinstance(value, str) else json.dumps(value, indent=2 if is_document else None) for value in values
    ]
    return "\n".join(lines).encode() + (b"\n" if content.endswith(b"\n") else b"")


def _is_utf8(content: bytes | None) -> TypeGuard[bytes]:
    if content is None:
        return False
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def redact_logs(files: StoreFiles, names: ItemNames) -> None:
    """Remove the names from the Delta logs, where they are the lowest or highest id of a part file.

    Entries and checkpoints keep everything else, so each version stays what it was.
    """
    folders = [model_folder(model) for model in ["", *model_folders(files)]]
    logs = [info for each in folders for name in TABLES for info in files.list(f"{each}{name}/{LOG_FOLDER}")]
    for info in logs:
        if names_in(files, info, names):
            change_log(files, info.path, lambda action: _redact(action, names))


def _redact(action: Action, names: ItemNames) -> Action:
    """Redact one log action: drop bounds that are purged ids, as any replacement would be a wrong bound."""
    if not names.found_in(row_values(action)):
        return action
    if not action.get("commitInfo"):
        return without_bounds(action)
    parameters = action["commitInfo"]["operationParameters"]
    return action | {"commitInfo": action["commitInfo"] | {"operationParameters": names.removed_from(parameters)}}


def _rewrite_in_place(
    files: StoreFiles, model: str, name: str, infos: Sequence[FileInfo], ids: Collection[str]
) -> None:
    """Rewrite part files of a table under their own names, without some items' rows.

    The log gets the new size first: after a kill in between, the file still holds the items and is found again.
    """
    all_places = {info: place_of(info.path) for info in infos}
    own = {info: each.path for info, each in all_places.items() if each is not None and each[:2] == (model, name)}
    if not own:
        return
    view = model_files(files, model)
    table, places = RecordTable(view, name), places_of(view, name, set(own.values()))
    vectors = find_vectors(view, name, set(own.values()))
    for group in _groups(list(own)):
        paths = [own[info] for info in group]
        tags = {path: view.read_tagged(f"{name}/{path}")[1] for path in paths}
        plain = [path for path in paths if path not in vectors]
        new = {path: encode_part(name, path, _rest(table, path, ids), session="") for path in plain}
        for log_path in sorted(set().union(*(places[path] for path in plain))):
            restate_parts(view, log_path, {path: part for path, (part, _) in new.items()})
        if blanked := {path: blank(table, path, ids) for path in paths if path in vectors}:
            mark_blanked(view, name, blanked, vectors)
            new |= {path: (each.part, each.data) for path, each in blanked.items()}
        for path, (_, content) in new.items():
            files.confirm_lease()
            try:
                view.replace(f"{name}/{path}", content, tags[path])
            except WriteConflictError:
                files.confirm_lease()  # refused if another run has taken over the store
                raise StoreError(
                    f"{view.uri(f'{name}/{path}')}: changed while it was rewritten, though no other command writes to "
                    "the store; run the same purge again"
                ) from None


def _groups(infos: Sequence[FileInfo]) -> Iterator[list[FileInfo]]:
    group: list[FileInfo] = []
    for info in infos:
        if group and sum(each.size_bytes for each in (*group, info)) > GROUP_BYTES:
            yield group
            group = []
        group.append(info)
    if group:
        yield group
