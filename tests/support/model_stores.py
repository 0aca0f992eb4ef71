"""Stores with further models, their vectors and outputs known: rows by hand, published as a run publishes them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from store_samples import INFO, reject, row, table

from embedder.servables import make_servable
from embedder.store.files import StoreFiles
from embedder.store.journal.part_writer import RunMetadata, write_part
from embedder.store.journal.runs import new_run
from embedder.store.layout import STORE_FILE, Current, Published, StoreInfo, utc_now, write_record
from embedder.store.publish.current import publish_current
from embedder.store.schema import TABLES, with_carryover
from embedder.store.store_info import FURTHER_FIELDS, MODEL_FIELDS, read_published
from embedder.store.tables.models import model_files
from embedder.store.tables.tables import RecordTable
from index.vectors import Floats

LABELS = pa.list_(pa.struct({"label": pa.string(), "score": pa.float32()}))


def further_info(name: str, *, has_vectors: bool = True, outputs: pa.Schema | None = None, **changes) -> StoreInfo:
    """Description of a further model."""
    return INFO.model_copy(
        update={
            "model": f"/models/{name}",
            "model_fingerprint": f"fingerprint of {name}",
            "has_vectors": has_vectors,
            "outputs": {field.name: str(field.type) for field in outputs or ()},
            "servable": {"name": name, "uri": f"/models/{name}", "kind": "towers"},
        }
        | changes
    )


def add_model(
    files: StoreFiles,
    name: str,
    *rows: dict,
    has_vectors: bool = True,
    kind: str = "refresh",
    retired: bool = False,
    section: Mapping[str, Any] | None = None,
    **outputs: pa.Array,
) -> Published:
    """Publish rows of a further model next to what is published, as a run with work only for that model.

    Args:
        files: the store.
        name: of the model.
        rows: finished rows (`store_samples.row`).
        has_vectors: whether they have any.
        kind: of the publication.
        retired: whether the rows that the model had before leave its tables.
        section: of the model, whose files are there (`code_section`); else that of towers that are nowhere.
        outputs: columns next to the vectors, a value for each row.
    """
    current, view = read_published(files), model_files(files, name)
    schema = pa.schema({column: values.type for column, values in outputs.items()})
    served = {} if section is None else {"servable": section, "model_fingerprint": make_servable(section).fingerprint()}
    info = further_info(name, has_vectors=has_vectors, outputs=schema, **served)
    write_record(view, STORE_FILE, info)
    run = new_run(files, info, pa.schema([]), kind)
    fingerprints = (info.model_fingerprint, info.preprocess_fingerprint)
    metadata = RunMetadata(run.run_id, "0001-aaaa", *fingerprints, pa.schema([]), schema)
    entry = write_part(view, metadata, 0, table(*rows, **outputs))
    versions = {}
    for each in TABLES:
        columns = with_carryover(TABLES[each], schema if each == "embeddings" else pa.schema([]))
        held = RecordTable(view, each)
        kept = [] if retired else held.parts()
        new = [part for part in entry.parts if part.table == each]
        versions[each] = held.commit_files(run.run_id, [*kept, *new], columns)
    before = current.models.get(name)
    own = Current(
        run_id=run.run_id,
        published_at=utc_now(),
        index=None if before is None else before.index,
        **versions,
        **{field: getattr(info, field) for field in (*MODEL_FIELDS, *FURTHER_FIELDS)},
    )
    changes = {"run_id": run.run_id, "published_at": utc_now(), "models": current.models | {name: own}}
    return publish_current(files, current.model_copy(update=changes), kind)


def code_section(folder: Path, name: str = "own", **keys: Any) -> dict[str, Any]:
    """Section of a model of the kind python, for whose class each text points upwards; it leaves a file when it ran."""
    (folder / "own.py").write_text(
        f"""
from pathlib import Path
import numpy as np

class Upwards:
    def load(self, device):
        Path({str(folder / "ran")!r}).touch()

    def __call__(self, batch):
        return {{"text_embedding": np.array([[0.0, 1.0]] * batch.num_rows, np.float32)}}
"""
    )
    columns = {
        "inputs": {"text": {"make": "text"}},
        "outputs": {"text_embedding": {"type": "float32", "shape": [2]}},
    }
    return {"name": name, "kind": "python", "uri": f"{folder / 'own.py'}:Upwards", **columns, **keys}


def drop_model(files: StoreFiles, name: str) -> Published:
    """Publish what is published without a further model, as a refresh does whose configuration lacks it."""
    current = read_published(files)
    run = new_run(files, further_info(name), pa.schema([]), "refresh")
    models = {each: own for each, own in current.models.items() if each != name}
    changes = {"run_id": run.run_id, "published_at": utc_now(), "models": models}
    return publish_current(files, current.model_copy(update=changes), "refresh")


def vector_row(item_id: str, vector: Floats, **changes) -> dict:
    """Row of an image with a vector."""
    return row(item_id, image_embedding=vector.tolist()) | changes


def label_row(item_id: str, **changes) -> dict:
    """Row of an image that a model without vectors gave something of."""
    return row(item_id, image_embedding=None) | changes


def rejected_row(item_id: str) -> dict:
    """Row of an image that the model could compute nothing of."""
    return reject(item_id, step="embed", error_type="ModelFailed", error="it gave NaN")


def files_of(files: StoreFiles, *, but: str = "models") -> dict[str, bytes]:
    """Content of all files of a store but those of a folder and its lock."""
    kept = (info.path for info in files.list("") if not info.path.startswith(f"{but}/") and info.path != ".lock")
    return {path: files.read(path) for path in kept}
