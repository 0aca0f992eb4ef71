"""Stores with some hundred vectors and an index, and nights that change some of them."""

from pathlib import Path

import numpy as np
import pyarrow as pa
from store_samples import INFO, row, table
from store_states import build_store_index, new_store

from embedder.config_toml.sections import IndexConfig
from embedder.store.files import StoreFiles
from embedder.store.journal.part_writer import RunMetadata, write_part
from embedder.store.journal.runs import start_run
from embedder.store.lock import write_lock
from embedder.store.publish.publication import ModelWork
from embedder.store.publish.publish import PublishIntent, publish
from embedder.store_index.keep_index import DEFAULT_INDEX_CONFIG, index_builder

DIM = 16
NO_FIRST_INDEX = IndexConfig(build=False)


def unit(values: np.ndarray) -> np.ndarray:
    return (values / np.linalg.norm(values, axis=-1, keepdims=True)).astype(np.float32)


def vector_of(item_id: str, night: int = 0) -> np.ndarray:
    """The vector of an item as some night embeds it; no two are alike."""
    return unit(np.random.default_rng([night, *item_id.encode()]).standard_normal(DIM))


def item(number: int, night: int = 0, **changes) -> dict:
    """A picture with a caption."""
    item_id = f"{number:04d}.jpg"
    vector = vector_of(item_id, night)
    caption = unit(vector + 0.1 * vector_of(f"caption of {item_id}", night))
    return (
        row(
            item_id,
            modified=str(night),
            image_embedding=vector.tolist(),
            text_embedding=caption.tolist(),
            caption=item_id,
        )
        | changes
    )


def indexed_run(files: StoreFiles, *rows: dict, retired=(), config=DEFAULT_INDEX_CONFIG, info=INFO):
    """One whole run as a refresh publishes it, its index kept; two part files at most."""
    with write_lock(files):
        run = start_run(files, info, pa.schema([]))
        fingerprints = (info.model_fingerprint, info.preprocess_fingerprint)
        stamp = RunMetadata(run.run_id, run.session, *fingerprints, pa.schema([]))
        for task, some in enumerate((rows[::2], rows[1::2])):
            if some:
                write_part(files, stamp, task, table(*some))
        return publish(
            [
                ModelWork(
                    run, stamp, PublishIntent(kind="refresh", info=info), pa.chunked_array([list(retired)], pa.string())
                )
            ],
            index_builder(config),
        )


def indexed_store(folder: Path, number: int = 200, **options) -> StoreFiles:
    """A store of so many pictures, and its index, built by hand."""
    files = new_store(folder)
    indexed_run(files, *(item(each) for each in range(number)), config=NO_FIRST_INDEX)
    build_store_index(files, **options)
    return files
