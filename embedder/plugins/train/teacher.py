"""A teacher's vectors for the items to train on: read from a store, joined by item, checked by content version.

The listing says which items the teacher knows. Whether its vector is of the same content shows only when the item is
decoded, since content versions are hashes. Items that the teacher lacks, or has with other content, are left out.
"""

import logging
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict

from embedder.config import RunConfig
from embedder.config_toml.sections import IndexConfig
from embedder.errors import SourceError, StoreError
from embedder.ingest.embed import embed
from embedder.plugins.train.items import Items, TeacherVectors, Vectors
from embedder.plugins.train.train_config import TeacherConfig, TrainConfig
from embedder.plugins.train.train_outputs import Outputs
from embedder.quantities import plural
from embedder.retrieval.store_api import Store, open_store
from embedder.store.tables.models import check_has_vectors

LOG = logging.getLogger(__name__)

VECTORS = {"image": "image_embedding", "caption": "text_embedding"}
COLUMNS = ("item_id", "segment", "modality", "content_version", *VECTORS.values())
CURE = "embed the same sources, with the same columns, by `embedder embed` or `embedder refresh`"
LEAST_NORM = 1e-6


class TeacherReport(BaseModel):
    """What became of a teacher's vectors, in `report.json`."""

    model_config = ConfigDict(frozen=True)

    store: str
    """Store that they are read from."""
    version: str
    """Publication, and model where it is a further one."""
    dim: int
    num_joined: int
    """Items to train on that the teacher knows."""
    num_missing: int
    """Items to train on that it does not know; they are left out."""
    num_stale: int
    """Of those joined, items seen so far whose content is another than the teacher's; they are left out."""


def teacher_store(config: TrainConfig, teacher: TeacherConfig, outputs: Outputs) -> str:
    """Return the address of the teacher's store; for a model, embed what is missing into a store in the run's folder.

    Raises `RunFailedError` if the embedding was stopped or refused; the same command continues it.
    """
    if teacher.store is not None:
        return teacher.store
    LOG.info(f"embedding the items with the teacher {teacher.model} into {outputs.teacher}")
    taken = ("source", "decode", "web", "engine", "ray_address", "max_reject_fraction", "no_progress_timeout_s")
    own: dict[str, Any] = {name: getattr(config, name) for name in taken}
    own |= {"device": config.device.partition(":")[0], "index": IndexConfig(build=False)}
    embed(RunConfig(model=teacher.model, store=str(outputs.teacher), **own))
    return str(outputs.teacher)


@dataclass(frozen=True)
class Teacher:
    """A teacher's vectors, and the items that it knows, each with its row of the vectors; none counts as stale yet."""

    items: Items
    report: TeacherReport


def join_teacher(items: Items, store: str, teacher: TeacherConfig) -> Teacher:
    """Join items to train on with a teacher's vectors.

    Raises `StoreError` if the store can't be read, or a vector in it is invalid; `SourceError` if the teacher knows
    none of the items.
    """
    opened = open_store(store, model=teacher.store_model, version=teacher.publication)
    where = f"teacher {opened.files.address}"
    rows = _rows_of(opened, where)
    theirs = rows["item_id"].combine_chunks().cast(pa.string())
    places = pc.fill_null(pc.index_in(items.listing["item_id"].cast(pa.string()), value_set=theirs), -1).to_numpy()
    known = np.flatnonzero(places >= 0)
    if not len(known):
        raise SourceError(
            f"{where}: it has vectors of none of {plural(len(items), 'item')} to train on (it has "
            f"{theirs[0].as_py()!r}, the sources list {items.listing['item_id'][0].as_py()!r}); {CURE}"
        )
    vectors = _vectors_of(rows.take(pa.array(places[known])), where)
    joined = replace(items.take(known), teacher=vectors)
    LOG.info(
        f"{where}: {len(known):,} of {plural(len(items), 'item')} to train on are in it; "
        f"{len(items) - len(known):,} that it lacks are left out"
    )
    report = TeacherReport(
        store=opened.files.main.address,
        version=opened.version.partition("/")[0] + (f"/{opened.model}" if opened.model else ""),
        dim=vectors.dim,
        num_joined=len(known),
        num_missing=len(items) - len(known),
        num_stale=0,
    )
    return Teacher(joined, report)


def _rows_of(opened: Store, where: str) -> pa.Table:
    """Rows of whole items with a vector of an image or a caption; segments of videos are left out."""
    check_has_vectors(opened.files, opened.current)
    if missing := set(COLUMNS) - set(opened.columns):
        raise StoreError(f"{where}: its table has no column {sorted(missing)[0]}; name a store of vectors")
    table = opened.to_arrow(COLUMNS)
    has_vector = pc.or_(*(pc.is_valid(table[name]) for name in VECTORS.values()))
    is_whole = pc.not_equal(table["modality"], "video")
    rows = table.filter(pc.and_(has_vector, is_whole))
    if not rows.num_rows:
        found = ", ".join(sorted(set(table["modality"].to_pylist()))) or "nothing"
        raise SourceError(
            f"{where}: it has no vector of an image or a caption to learn from, its rows are of: {found}; {CURE}"
        )
    return rows


def _vectors_of(rows: pa.Table, where: str) -> TeacherVectors:
    dims = {
        name: pc.unique(pc.list_value_length(rows[column]).drop_null()).to_pylist() for name, column in VECTORS.items()
    }
    found = sorted({dim for each in dims.values() for dim in each})
    if len(found) > 1:
        raise StoreError(f"{where}: its vectors are of {found[0]} and of {found[-1]} values; name a store of one model")
    images, captions = (_unit_rows(rows, column, found[0], where) for column in VECTORS.values())
    versions = rows["content_version"].combine_chunks()
    return TeacherVectors(images, captions, versions, np.arange(len(versions)))


def _unit_rows(rows: pa.Table, column: str, dim: int, where: str) -> Vectors:
    """Vectors of a column as unit rows, NaN where there is none; StoreError if one is zero or not finite."""
    values = rows[column].combine_chunks()
    is_there = values.is_valid().to_numpy(zero_copy_only=False)
    unit = np.full((len(values), dim), np.nan, np.float32)
    vectors = values.flatten().to_numpy(zero_copy_only=False).astype(np.float32).reshape(-1, dim)
    norms = np.linalg.norm(vectors, axis=1)
    is_broken = ~(np.isfinite(norms) & (norms > LEAST_NORM))
    if is_broken.any():
        number = int(np.flatnonzero(is_there)[int(is_broken.argmax())])
        kind = "zero" if np.isfinite(norms[is_broken.argmax()]) else "not finite"
        raise StoreError(
            f"{where}: {column} of item {rows['item_id'][number].as_py()!r} is {kind}, no vector to learn from; embed "
            "it again, or leave it out of the sources"
        )
    unit[is_there] = vectors / norms[:, None]
    return unit
