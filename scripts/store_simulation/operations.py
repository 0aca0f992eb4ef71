"""Operations of the simulated processes: what commands do to a store, by the store's own functions."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from embedder.errors import RunFailedError, StoreError
from embedder.store.files import StoreFiles
from embedder.store.journal.journal_segments import names_in_journal, seal
from embedder.store.journal.part_writer import RunMetadata, write_copies
from embedder.store.journal.refusals import rollback_on_mistake, snapshot_files
from embedder.store.journal.runs import Run, start_run
from embedder.store.layout import StoreInfo, read_current
from embedder.store.lock import write_lock
from embedder.store.maintenance.compact import compact
from embedder.store.maintenance.purge.purge import purge
from embedder.store.maintenance.rollback import release, rollback
from embedder.store.maintenance.vacuum import vacuum
from embedder.store.publish.current import IndexChoice, swap_index
from embedder.store.publish.history import publications
from embedder.store.publish.interim import UnpublishedWork
from embedder.store.publish.publication import ModelWork, PublishIntent
from embedder.store.publish.publish import InterimWork, finish_publication, publish, publish_interim
from embedder.store.publish.tombstones import purged_before
from embedder.store.store_info import bind_store
from embedder.store.tables.models import model_files
from embedder.store.tables.tables import RecordTable
from embedder.store_index import versions
from embedder.store_index.versions import has_version
from index.manifest import MANIFEST_NAME
from store_simulation.light_rows import NO_COLUMNS, Rows
from store_simulation.world import Process

INFO = StoreInfo(
    model="m", model_fingerprint="f", preprocess_fingerprint="p", segment_s=5.0, frames_per_segment=4, dtype="float32"
)
ERRORS = (StoreError, RunFailedError)


def none(candidate: Any, model: str = "") -> None:
    """Choose no index."""
    return


def no_index(version: int, info: Any = None) -> None:
    """Build no index."""
    return


def embed(
    files: StoreFiles,
    process: Process,
    items: Sequence[str],
    *,
    num_tasks: int = 1,
    retired: Sequence[str] = (),
    is_interim: bool = False,
    model: str = "",
) -> None:
    """Embed items and publish them, as `embed` and `refresh` do."""
    process.notes["retired"] = set(retired)
    with write_lock(files):
        bind_store(files, INFO)
        finish_publication(files, no_index)
        gone = purged_before(files, items)
        items = [each for each in items if each not in gone]
        process.notes["items"] = dict.fromkeys(items, process.name)
        views = [(model_files(files, model), INFO)] if model else []
        for view, info in views:
            bind_store(view, info)
        run = start_run(files, INFO, NO_COLUMNS, views)
        process.notes["run"] = (run.run_id, run.session)
        metadata = RunMetadata(run.run_id, run.session, "f", "p", NO_COLUMNS)
        works = [(Run(view, run.info, run.session), metadata) for view, _ in views]
        intent = PublishIntent(kind="refresh", info=INFO)
        work = UnpublishedWork(run, pa.chunked_array([pa.array(items, pa.string())]))
        for task in range(num_tasks):
            rows = Rows({"item_id": each, "version": process.name} for each in items[task::num_tasks])
            for view_run, _ in works:
                write_copies(view_run.files, metadata, task, {"embeddings": rows, "items": rows}, "")
            write_copies(files, metadata, task, {"embeddings": rows, "items": rows}, "")
            if is_interim and task < num_tasks - 1:
                batch = work.next()
                publish_interim(InterimWork(run, batch, metadata, intent), no_index)
                work.note_published(batch)
                seal(files, run.run_id, sorted(names_in_journal(files, run.run_id)))
        ids = pa.chunked_array([pa.array(list(retired), pa.string())])
        models = [ModelWork(own, metadata, intent, ids) for own, _ in works]
        process.notes["published"] = None
        publish(run, metadata, no_index, intent, ids, models)


def write_late(files: StoreFiles, process: Process) -> None:
    """Go on with a write task of the first process, whose driver may be gone."""
    run = process.notes["first"].notes.get("run")
    if run is not None:
        rows = Rows([{"item_id": "k", "version": process.name}])
        write_copies(files, RunMetadata(*run, "f", "p", NO_COLUMNS), 7, {"embeddings": rows, "items": rows}, "")


def refuse(files: StoreFiles, process: Process) -> None:
    """Begin a run that ends with a mistake of the user's, and take back what it has made."""
    before = snapshot_files(files)
    with write_lock(files), rollback_on_mistake(files, before):
        bind_store(files, INFO)
        finish_publication(files, no_index)
        start_run(files, INFO, NO_COLUMNS)
        raise StoreError("a mistake")


def locked(files: StoreFiles, work: Callable[[StoreFiles], Any]) -> None:
    """Do an operation of upkeep."""
    with write_lock(files):
        finish_publication(files, no_index)
        work(files)


def build_index(files: StoreFiles, process: Process) -> None:
    """Upload an index and publish it."""
    with write_lock(files):
        finish_publication(files, no_index)
        current = read_current(files)
        if current is None:
            return
        number = versions._claim_number(files)
        for name in ("vectors.faiss", MANIFEST_NAME):
            files.confirm_lease()
            manifest = {"embeddings_version": current.embeddings, "built_at": current.published_at.isoformat()}
            files.write(f"index/{number:06d}/{name}", json.dumps(manifest | {"by": process.name}).encode())
        swap_index(files, number)


def keep_index(files: StoreFiles) -> IndexChoice:
    """Choose the index of the candidate while it is there."""

    def choose(candidate: Any, model: str = "") -> int | None:
        view = model_files(files, model)
        return candidate.index if candidate.index is not None and has_version(view, candidate.index) else None

    return choose


def read(files: StoreFiles, process: Process) -> None:
    """Read what is published, and later read the same version again."""
    current = read_current(files)
    if current is None:
        return
    seen = {}
    for turn in range(2):
        for name in ("items", "embeddings"):
            try:
                rows = RecordTable(files, name, getattr(current, name)).read()
            except FileNotFoundError as error:
                newest = read_current(files)
                if newest is not None and newest.run_id == current.run_id:
                    raise AssertionError(f"a reader of {current.run_id} lost {error}") from None
                return
            found = {row["item_id"]: row["version"] for row in rows}
            if turn and found.keys() - seen[name].keys():
                raise AssertionError(f"a reader's version of {name} grew: {found} after {seen[name]}")
            seen[name] = found


def roll_back_first(files: StoreFiles) -> None:
    """Go back to the first publication that can be read."""
    rollback(files, publications(files)[0].run_id, keep_index(files))


def purge_items(files: StoreFiles, process: Process, items: Sequence[str]) -> None:
    """Purge items."""
    process.notes["purging"] = set(items)
    process.notes["on_begin"](set(items))
    with write_lock(files):
        finish_publication(files, no_index)
        process.notes["changes"] = process.notes["checker"].num_changes
        purge(files, set(items), keep_index(files))


Operation = Callable[[StoreFiles, Process], Any]

OPERATIONS: dict[str, Operation] = {
    "embed a b y": partial(embed, items=("a", "b", "y")),
    "embed c w": partial(embed, items=("c", "w")),
    "embed c d in two tasks": partial(embed, items=("c", "d"), num_tasks=2),
    "embed and publish as it goes": partial(embed, items=("a", "c", "y"), num_tasks=3, is_interim=True),
    "embed two models": partial(embed, items=("a", "x"), model="second"),
    "refresh without x": partial(embed, items=("a",), retired=("x",)),
    "rollback": lambda files, _: locked(files, lambda each: rollback(each, None, keep_index(each))),
    "rollback to the first": lambda files, _: locked(files, roll_back_first),
    "release": lambda files, _: locked(files, release),
    "vacuum": lambda files, _: locked(files, lambda each: vacuum(each, keep_days=0, keep_versions=1)),
    "compact": lambda files, _: locked(files, lambda each: compact(each, choose_index=keep_index(each))),
    "purge x": partial(purge_items, items=("x",)),
    "purge z": partial(purge_items, items=("z",)),
    "index": build_index,
    "embed nothing, by mistake": refuse,
    "late worker": write_late,
    "read": read,
}
