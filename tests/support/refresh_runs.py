"""Runs of `refresh`, and what they leave in the store."""

import json
import os
from pathlib import Path

import pytest

import embedder
from embedder.ingest.embed import refresh
from embedder.ingest.work import IngestOptions
from embedder.observability.run_observer import RUNS_FILE
from embedder.store.files import StoreFiles
from embedder.store.layout import read_current
from embedder.store.tables.tables import RecordTable


def refreshed(config, **options):
    """Run, and give the report and the published rows by (item_id, segment)."""
    report = refresh(config, IngestOptions(kind="refresh", **options))
    return report, rows_of(config)


def rows_of(config):
    """The published embeddings by (item_id, segment)."""
    rows = embedder.open_store(config.store).to_arrow().to_pylist()
    by_key = {(row["item_id"], row["segment"]): row for row in rows}
    assert len(by_key) == len(rows), "each row once"
    return by_key


def items_of(config):
    """The published items by id."""
    files = StoreFiles(config.store)
    rows = RecordTable(files, "items", read_current(files).items).read().to_pylist()
    by_id = {row["item_id"]: row for row in rows}
    assert len(by_id) == len(rows), "each item once"
    return by_id


def touch(path: Path):
    """Change the time of a file, not its content."""
    now = path.stat().st_mtime_ns
    os.utime(path, ns=(now, now + 5_000_000_000))


def interrupted(monkeypatch, config, where: str):
    """Run until it calls the function of that name in `embedder.ingest`, where it is killed."""

    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"embedder.ingest.{where}", stop)
        with pytest.raises(KeyboardInterrupt):
            refreshed(config)


def nightly_file(config, *lines: str) -> Path:
    """Write what a nightly job has of a configuration, with further keys of the top; return the file."""
    top = [f"{key} = {json.dumps(getattr(config, key))}" for key in ("model", "store", "engine")]
    sources = [f"[[source]]\npath = {json.dumps(source.path)}" for source in config.source]
    path = Path(config.store).with_name("nightly.toml")
    path.write_text("\n".join([*top, *lines, *sources]) + "\n")
    return path


def contents(store):
    """Read every file of a store but the lock and the file where each run leaves a line."""
    root = Path(store)
    files = (path for path in root.rglob("*") if path.is_file() and path.name not in (".lock", RUNS_FILE))
    return {path.relative_to(root): path.read_bytes() for path in files}
