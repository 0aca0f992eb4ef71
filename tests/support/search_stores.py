"""Stores whose vectors are known, to search in: rows by hand, with and without an index."""

import math

import numpy as np
import pyarrow as pa
from store_samples import begin, row, table
from store_states import build_store_index, new_store

from embedder.config_toml.sections import IndexConfig
from embedder.retrieval.store_api import Store, open_store
from embedder.store.journal.part_writer import write_part
from embedder.store.publish.publication import ModelWork
from embedder.store.publish.publish import publish


def towards(degrees: float) -> np.ndarray:
    """A vector of unit length in the plane; its cosine with `towards(0)` is that of the angle."""
    angle = math.radians(degrees)
    return np.array([math.cos(angle), math.sin(angle)], np.float32)


QUERY = towards(0)


def picture(item_id: str, degrees: float, **changes) -> dict:
    """A picture whose vector points somewhere."""
    return row(item_id, image_embedding=towards(degrees).tolist()) | changes


def video(item_id: str, *degrees: float, **changes) -> list[dict]:
    """A video of 5 s segments whose vectors point somewhere."""
    return [
        picture(
            item_id,
            each,
            segment=number,
            start_s=5.0 * number,
            end_s=5.0 * number + 5,
            modality="video",
            num_vectors=len(degrees),
            **changes,
        )
        for number, each in enumerate(degrees)
    ]


def searchable(folder, *rows: dict, index: bool = True, words: str = "unicode", **carried: list) -> Store:
    """Publish rows, with carried columns next to them, in two part files; and open the store."""
    files = new_store(folder)
    columns = {name: pa.array(values) for name, values in carried.items()}
    run, stamp = begin(files, pa.schema({name: values.type for name, values in columns.items()}))
    # An item's rows stand in one part file.
    half = next((n for n in range(len(rows) // 2, len(rows)) if rows[n]["item_id"] != rows[n - 1]["item_id"]), 0)
    for number, (start, stop) in enumerate(((0, half), (half, len(rows)))):
        if stop > start:
            here = {name: values[start:stop] for name, values in columns.items()}
            write_part(files, stamp, number, table(*rows[start:stop], **here))
    publish([ModelWork(run, stamp)])
    if index:
        build_store_index(files, IndexConfig(words=words))
    return open_store(files.address)


def ids(hits) -> list[str]:
    """Which items were found, best first."""
    return [hit.item_id for hit in hits]
