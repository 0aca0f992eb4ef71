"""Runs of `embed`, and what they publish."""

import numpy as np

import embedder
from embedder.ingest.embed import embed


def embedded(config, **options):
    """Run, and give the report and the table by (item_id, segment)."""
    report = embed(config, **options)
    rows = embedder.open_store(config.store).to_arrow().to_pylist()
    by_key = {(row["item_id"], row["segment"]): row for row in rows}
    assert len(by_key) == len(rows), "each row once"
    return report, by_key


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, row in expected.items():
        other = found[key]
        for name in ("modality", "uri", "caption", "content_version", "model_fingerprint", "preprocess_fingerprint"):
            assert other[name] == row[name]
        for name in ("image_embedding", "text_embedding"):
            assert (other[name] is None) == (row[name] is None)
            assert row[name] is None or np.dot(other[name], row[name]) >= 0.9999
