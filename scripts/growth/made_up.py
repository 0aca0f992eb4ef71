"""A store and a refresh without a model: listed captions are published with vectors of chance.

    python -m growth.made_up make CONFIG       # publishes all that is listed, in one commit
    python -m growth.made_up refresh CONFIG    # a refresh whose engine makes the vectors up; ends with its report

Imports no more than a refresh does, so that the memory of its process is that of a refresh.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from embedder.batch_schema import DECODED, VECTOR
from embedder.config import load_config

ROWS_PER_PART = 50_000  # of a store that has been compacted
DIMENSIONS = 16


def as_embedded(listed: pa.Table, seed: int) -> pa.Table:
    """Listed captions as the last stage hands them to the writer, with vectors of chance."""
    num_rows = listed.num_rows
    made = {"segment": 0, "modality": "text", "content_version": "0" * 32, "num_vectors": 1}
    values = pa.array(np.random.default_rng(seed).standard_normal(num_rows * DIMENSIONS, np.float32))
    offsets = pa.array(np.arange(num_rows + 1, dtype=np.int32) * DIMENSIONS)
    columns = {name: listed[name] for name in ("item_id", "source", "uri", "size_bytes", "modified", "caption")}
    columns |= {
        field.name: pa.repeat(pa.scalar(made.get(field.name), field.type), num_rows)
        for field in DECODED
        if field.name not in columns
    }
    attempts = (
        listed["attempts"] if "attempts" in listed.schema.names else pa.repeat(pa.scalar(1, pa.int32()), num_rows)
    )
    vectors = pa.ListArray.from_arrays(offsets, values).cast(VECTOR)
    return pa.table(
        columns | {"attempts": attempts, "image_embedding": pa.nulls(num_rows, VECTOR), "text_embedding": vectors}
    )


def make_store(config_path: Path) -> None:
    """Publish what is listed, one commit for all; nothing of it is held in memory."""
    from embedder.sources.listing import list_sources

    listed = list_sources(load_config(config_path).source, rows_per_chunk=ROWS_PER_PART, unique=False)
    publish(config_path, (as_embedded(rows, task) for task, rows in enumerate(listed)))


def publish(config_path: Path, embedded: Iterable[pa.Table]) -> None:
    """Publish rows as the writer gets them, each table a part file, in one commit; no model sees them.

    Args:
        config_path: of the run that they might be of.
        embedded: the tables.
    """
    from embedder.executors.job import make_plan, store_info
    from embedder.models.model_folder import open_model
    from embedder.store.files import StoreFiles
    from embedder.store.journal.part_writer import RunMetadata, write_part
    from embedder.store.journal.runs import start_run
    from embedder.store.layout import Current, utc_now
    from embedder.store.publish.current import publish_current
    from embedder.store.schema import TABLES
    from embedder.store.store_info import MODEL_FIELDS, bind_store
    from embedder.store.tables.tables import RecordTable

    config = load_config(config_path)
    model = open_model(config.required_model)
    make_plan(config.compute, model)
    info, files = store_info(config.rows, model, config.compute.settled_dtype), StoreFiles(config.required_store)
    bind_store(files, info)
    run = start_run(files, info, pa.schema([]))
    prints = info.model_fingerprint, info.preprocess_fingerprint
    metadata = RunMetadata(run.run_id, run.session, *prints, pa.schema([]))
    parts: dict[str, list] = {name: [] for name in TABLES}
    for task, rows in enumerate(embedded):
        for part in write_part(files, metadata, task, rows).parts:
            parts[part.table].append(part)
    versions = {name: RecordTable(files, name).commit_files(run.run_id, parts[name], TABLES[name]) for name in TABLES}
    fields = info.model_dump(include=set(MODEL_FIELDS))
    publish_current(
        files, Current(run_id=run.run_id, index=None, published_at=utc_now(), **versions, **fields), "embed"
    )


def refresh_without_model(config_path: Path, command: str = "refresh") -> None:
    """Refresh, or `embed`, as the command does, with an engine that makes vectors up; prints the report as JSON."""
    from embedder.ingest import embed
    from embedder.store.journal.part_writer import RunMetadata, write_part

    execute = embed.execute

    def made_up(inputs: Any, run: Any, to_embed: pa.Table, *others: Any) -> Any:
        prints = run.info.model_fingerprint, run.info.preprocess_fingerprint
        metadata = RunMetadata(run.run_id, run.session, *prints, pa.schema([]))
        for task, rows in enumerate(cut(to_embed, ROWS_PER_PART)):
            write_part(run.files, metadata, task, as_embedded(rows, task))
        return execute(inputs, run, to_embed.slice(0, 0), *others)

    embed.execute = made_up
    print(getattr(embed, command)(load_config(config_path)).model_dump_json())


def cut(rows: pa.Table, num_rows: int) -> Iterator[pa.Table]:
    """Cut a table into pieces of so many rows."""
    return (rows.slice(start, num_rows) for start in range(0, rows.num_rows, num_rows))


if __name__ == "__main__":
    {"make": make_store, "refresh": refresh_without_model}[sys.argv[1]](Path(sys.argv[2]))
