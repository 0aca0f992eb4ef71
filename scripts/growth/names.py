"""A folder of many names, and a store that has all of them published, although no model ever saw them.

Started as a program of its own (`python -m growth.names SOURCE STORE`), it publishes what it lists in SOURCE.
"""

import os
import sys
from itertools import islice
from pathlib import Path

import pyarrow as pa

from embedder.batch_schema import DECODED, VECTOR
from embedder.config import RunConfig, load_config
from embedder.ingest.inputs import open_inputs
from embedder.store.part_writer import RunMetadata, write_part
from embedder.store.publish import publish
from embedder.store.runs import start_run
from embedder.store.store_info import bind_store

MODEL = Path(__file__).parents[2] / "embedder" / "demo_model"
PER_FOLDER = 1000
CONTENT = b"\0"
CHANGED_CONTENT = b"\0\0"  # of another size, whatever the clock says


def write_names(folder: Path, num_names: int) -> None:
    """Write names, a thousand a folder; those of one folder are links to one file, which costs next to no room."""
    for start in range(0, num_names, PER_FOLDER):
        inside = folder / f"{start // PER_FOLDER:05d}"
        inside.mkdir(parents=True)
        first, *others = (f"{inside}/{number:08d}.png" for number in range(start, min(start + PER_FOLDER, num_names)))
        Path(first).write_bytes(CONTENT)
        for name in others:
            os.link(first, name)


def change_names(folder: Path, every: int) -> int:
    """Give every so many-th name a file of its own with another content; returns how many there are."""
    names = (path for inside in sorted(folder.iterdir()) for path in sorted(inside.iterdir()))
    changed = list(islice(names, 0, None, every))
    for path in changed:
        path.unlink()
        path.write_bytes(CHANGED_CONTENT)
    return len(changed)


def publish_names(config: RunConfig) -> None:
    """Publish what is listed as if it had been embedded: parts as small as a run makes them, vectors of one number."""
    inputs = open_inputs(config)
    bind_store(inputs.files, inputs.info)
    run = start_run(inputs.files, inputs.info, pa.schema([]))
    of_model, of_preprocessing = inputs.info.model_fingerprint, inputs.info.preprocess_fingerprint
    stamp = RunMetadata(run.run_id, run.session, of_model, of_preprocessing, pa.schema([]))
    for task, start in enumerate(range(0, inputs.listing.num_rows, config.rows_per_part)):
        write_part(inputs.files, stamp, task, as_embedded(inputs.listing.slice(start, config.rows_per_part)))
    publish(run, stamp, lambda version: None)


def as_embedded(listed: pa.Table) -> pa.Table:
    """Listed items as the last stage hands them to the writer."""
    made = {"segment": 0, "modality": "image", "content_version": "0" * 32, "num_vectors": 1, "attempts": 1}
    types = {**{field.name: field.type for field in DECODED}, "attempts": pa.int32()}
    columns = {name: listed[name] for name in ("item_id", "source", "uri", "size_bytes", "modified", "caption")}
    for name, kind in types.items():
        columns[name] = pa.repeat(pa.scalar(made.get(name), kind), listed.num_rows)
    columns["image_embedding"] = pa.repeat(pa.scalar([1.0], VECTOR), listed.num_rows)
    columns["text_embedding"] = pa.nulls(listed.num_rows, VECTOR)
    return pa.table(columns)


if __name__ == "__main__":
    source, store = sys.argv[1:]
    publish_names(load_config(overrides={"model": str(MODEL), "store": store, "source": [{"path": source}]}))
