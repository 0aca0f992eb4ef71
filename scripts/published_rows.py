"""Publication of rows that no model has computed, as a run publishes its own."""

from collections.abc import Iterable

import pyarrow as pa

from embedder.batch_schema import DECODED, VECTOR
from embedder.store.files import StoreFiles
from embedder.store.journal.part_writer import RunMetadata, write_part
from embedder.store.journal.runs import start_run
from embedder.store.layout import StoreInfo
from embedder.store.publish.publish import NO_IDS, IndexBuilder, PublishIntent, publish
from embedder.store.store_info import bind_store

LISTED = ("item_id", "source", "uri", "size_bytes", "modified", "caption")


def publish_rows(
    files: StoreFiles,
    info: StoreInfo,
    parts: Iterable[pa.Table],
    build_index: IndexBuilder = lambda version: None,
    retired: pa.ChunkedArray = NO_IDS,
) -> None:
    """Publish rows in one run.

    Args:
        files: the store.
        info: the model that the vectors are said to be of.
        parts: rows of `as_embedded`, one table for each part file.
        build_index: of `embedder.store.publish.publish.publish`.
        retired: ids of items that leave the store.
    """
    bind_store(files, info)
    run = start_run(files, info, pa.schema([]))
    fingerprints = info.model_fingerprint, info.preprocess_fingerprint
    metadata = RunMetadata(run.run_id, run.session, *fingerprints, pa.schema([]))
    for task, rows in enumerate(parts):
        write_part(files, metadata, task, rows)
    publish(run, metadata, build_index, PublishIntent(kind="refresh", info=info), retired)


def as_embedded(listed: pa.Table, images: pa.Array, content_version: str) -> pa.Table:
    """Listed items as the last stage hands them to the writer.

    Args:
        listed: with the columns of `LISTED`.
        images: the vector of each.
        content_version: of all.
    """
    made = {"segment": 0, "modality": "image", "content_version": content_version, "num_vectors": 1, "attempts": 1}
    types = {**{field.name: field.type for field in DECODED}, "attempts": pa.int32()}
    nulls = pa.nulls(listed.num_rows, VECTOR)
    return pa.table(
        {name: listed[name] for name in LISTED}
        | {name: pa.repeat(pa.scalar(made.get(name), kind), listed.num_rows) for name, kind in types.items()}
        | {"image_embedding": images, "text_embedding": nulls}
    )
