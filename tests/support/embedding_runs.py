"""Runs of `embed`, and what they publish."""

import numpy as np
import pyarrow as pa

import embedder
from embedder.executors.job import ModelRun, store_info
from embedder.ingest.embed import embed
from embedder.models.run_model import RunModel
from embedder.store.files import StoreFiles
from embedder.store.journal.runs import start_run


def embedded(config, **options):
    """Run, and give the report and the table by (item_id, segment)."""
    report = embed(config, **options)
    rows = embedder.open_store(config.store).to_arrow().to_pylist()
    by_key = {(row["item_id"], row["segment"]): row for row in rows}
    assert len(by_key) == len(rows), "each row once"
    return report, by_key


def begun(config, model):
    """Begin a run of one model, whose items carry no columns."""
    info = store_info(config.rows, model, config.compute.settled_dtype)
    return ModelRun(RunModel("", info), start_run(StoreFiles(config.store), info, pa.schema([])))


def assert_same_vectors(found, expected, *, same=(), atol=1e-6):
    """Compare rows of two stores: their keys, some columns exactly, and both vectors."""
    assert found.keys() == expected.keys()
    for key, row in expected.items():
        assert [found[key][name] for name in same] == [row[name] for name in same], key
        for name in ("image_embedding", "text_embedding"):
            assert (found[key][name] is None) == (row[name] is None), key
            if row[name] is not None:
                np.testing.assert_allclose(found[key][name], row[name], atol=atol)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, row in expected.items():
        other = found[key]
        for name in ("modality", "uri", "caption", "content_version", "model_fingerprint", "preprocess_fingerprint"):
            assert other[name] == row[name]
        for name in ("image_embedding", "text_embedding"):
            assert (other[name] is None) == (row[name] is None)
            assert row[name] is None or np.dot(other[name], row[name]) >= 0.9999
