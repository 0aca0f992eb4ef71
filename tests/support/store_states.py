"""State of a store as readers see it, and simulated kills between any two changes to it."""

import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
from store_samples import INFO, table

from embedder.config import RunConfig
from embedder.config_toml.sections import IndexConfig
from embedder.ingest.build_index import build_index
from embedder.store.backends import DiskBackend
from embedder.store.bucket_backend import BucketBackend
from embedder.store.environment import REAL_ENVIRONMENT
from embedder.store.files import StoreFiles
from embedder.store.journal.part_writer import RunMetadata, write_part
from embedder.store.journal.runs import finished_items, start_run
from embedder.store.layout import Published
from embedder.store.publish.publication import ModelWork
from embedder.store.publish.publish import PublishIntent, publish
from embedder.store.store_info import bind_store, differing, read_published, read_store_info
from embedder.store.tables.tables import RecordTable
from embedder.store_index.keep_index import DEFAULT_INDEX_CONFIG
from index.manifest import Manifest


def new_store(folder: Path) -> StoreFiles:
    """Make an empty store of the samples' model."""
    files = StoreFiles(folder)
    bind_store(files, INFO)
    return files


def rows_at(files: StoreFiles, version, name: str = "embeddings") -> dict:
    """Rows of one publication by item and segment, with all their values; each occurs once."""
    rows = RecordTable(files, name, getattr(version, name)).read().to_pylist()
    by_key = {(row["item_id"], row.get("segment")): row for row in rows}
    assert len(by_key) == len(rows), "each row once"
    return by_key


def rows_now(files: StoreFiles, name: str = "embeddings") -> dict:
    """Rows of what is published."""
    return rows_at(files, read_published(files), name)


def state_now(files: StoreFiles) -> dict:
    """Both tables of what is published."""
    return {name: rows_now(files, name) for name in ("embeddings", "items")}


def vectors_now(files: StoreFiles) -> dict:
    """item_id -> image vector, of what is published."""
    return {item_id: row["image_embedding"] for (item_id, _), row in rows_now(files).items()}


def no_index(candidate, model=""):
    """Choose no index, so that search is exact."""
    return


class Killed(Exception):
    """Stands for kill -9."""


@contextmanager
def dying(monkeypatch, number: int):
    """Kill all changes to files of stores but the first few before they are made; yields a list of those that were.

    On a disk, the write that is killed leaves half of its file under an unfinished name.
    """
    made: list[str] = []
    guard, is_dead = threading.Lock(), threading.Event()

    def survives(name: str, path: str) -> bool:
        with guard:
            if len(made) < number:
                made.append(f"{name} {path}")
                return True
        return False

    def mortal_put(kind):
        put = kind.put

        def attempt(self, path, data, condition):
            if survives("put", path):
                return put(self, path, data, condition)
            if kind is DiskBackend and not is_dead.is_set():
                is_dead.set()
                content = data if isinstance(data, bytes) else data.read_bytes()
                put(self, f"{path}#dead", content[: len(content) // 2], None)
            raise Killed

        return attempt

    def mortal_delete(kind):
        delete = kind.delete

        def attempt(self, paths):
            for path in paths:
                if not survives("delete", path):
                    is_dead.set()
                    raise Killed
                delete(self, [path])

        return attempt

    with monkeypatch.context() as patch:
        for kind in (DiskBackend, BucketBackend):
            patch.setattr(kind, "put", mortal_put(kind))
            patch.setattr(kind, "delete", mortal_delete(kind))
        yield made


def set_clock(monkeypatch, now: Callable[[], datetime], *stores: StoreFiles) -> None:
    """Have stores take another wall clock."""
    changed = replace(REAL_ENVIRONMENT, now=now)
    monkeypatch.setattr("embedder.store.files.REAL_ENVIRONMENT", changed)
    for files in stores:
        files.environment = changed


def build_store_index(files: StoreFiles, config: IndexConfig = DEFAULT_INDEX_CONFIG, **options) -> tuple[int, Manifest]:
    """Build and publish an index of a store, as `embedder index build` does."""
    return build_index(RunConfig(store=files.address, index=config), **options)


def publish_refresh(files: StoreFiles, *rows: dict, retired=(), info=INFO, kind: str = "refresh", marks="auto"):
    """Write and publish one whole run as a refresh does; return its record."""
    bind_store(files, info, may_change=True)
    run = start_run(files, info, pa.schema([]))
    fingerprints = (info.model_fingerprint, info.preprocess_fingerprint)
    metadata = RunMetadata(run.run_id, run.session, *fingerprints, pa.schema([]))
    if rows:
        write_part(files, metadata, 0, table(*rows))
    replaces_all = differing(read_store_info(files), info) != []
    intent = PublishIntent(kind=kind, info=info, replaces_all=replaces_all, deletion_vectors=marks)
    return publish([ModelWork(run, metadata, intent, pa.chunked_array([list(retired)], pa.string()))])


def record(run_id: str, previous: str | None = None, kind: str = "refresh", restores: str | None = None) -> Published:
    """Record of a publication with one item."""
    return Published(
        run_id=run_id,
        previous=previous,
        restores=restores,
        kind=kind,
        embeddings=1,
        items=1,
        published_at=datetime(2026, 1, 1, tzinfo=UTC),
        num_items=1,
        num_vectors=1,
        num_rejected=0,
    )


def finished_ids(run) -> list[str]:
    """Ids of the items that a run has finished."""
    return pa.concat_tables(finished_items(run).tables())["item_id"].to_pylist()
