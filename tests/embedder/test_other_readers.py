"""The tables are everybody's: other programs read them without this one."""

import duckdb
import numpy as np
import polars
import pytest
import samples
from deltalake import DeltaTable
from embedding_runs import embedded


@pytest.fixture
def published(make_run, tmp_path):
    config = make_run(samples.folder(tmp_path / "in"))
    _, rows = embedded(config)
    return f"{config.store}/embeddings", rows


def test_polars_reads_the_same_vectors(published):
    path, rows = published
    found = polars.read_delta(path).rows_by_key("item_id", named=True, unique=True)
    assert len(found) == len(rows)
    for (item_id, _), row in rows.items():
        assert np.array_equal(found[item_id]["image_embedding"], row["image_embedding"])


def test_duckdb_reads_the_same_rows(published):
    path, rows = published
    embeddings = DeltaTable(path).to_pyarrow_dataset()  # noqa: F841 - DuckDB finds it by its name
    counts = dict(duckdb.sql("SELECT modality, count(*) FROM embeddings GROUP BY modality").fetchall())
    assert counts == {"pair": 3, "image": 3}
    assert sum(counts.values()) == len(rows)
