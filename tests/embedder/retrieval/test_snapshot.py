"""Rows of items are found by their ids, and the vectors of rows."""

import numpy as np
import pyarrow as pa
import pytest
from search_stores import picture, searchable, video

from embedder.retrieval.row_metadata import IdRows
from embedder.retrieval.store_api import open_store


def test_rows_of_an_id_are_found_among_ids_in_any_order():
    names = ["b", "é", "a", "b", "\U0001f600", "\uffff", "", "b"]
    rows = IdRows(pa.chunked_array([names[:3], names[3:]], pa.string()))
    for name in (*names, "c", "aa", "\x00"):
        assert rows.rows(name).tolist() == [row for row, each in enumerate(names) if each == name]
    assert list(rows.values()) == names
    assert IdRows(pa.chunked_array([[]], pa.string())).rows("a").tolist() == []


@pytest.mark.parametrize("index", [True, False])
def test_vectors_of_rows_are_their_own(tmp_path, index):
    rows = [picture("b.jpg", 40), *video("v.mp4", 10, 20, 30), picture("a.jpg", 70, image_embedding=None)]
    rows[-1]["text_embedding"] = [1.0, 0.0]
    store = searchable(tmp_path / "store", *rows, index=index)
    snapshot = store.searcher.snapshot
    expected = {(row["item_id"], row["segment"]): row["image_embedding"] for row in store.to_arrow().to_pylist()}
    table = snapshot.metadata.rows
    for row, vector_row in enumerate(snapshot.vector_rows.tolist()):
        key = (table["item_id"][row].as_py(), table["segment"][row].as_py())
        if expected[key] is None:
            assert vector_row == -1
        else:
            assert np.allclose(snapshot.vectors.vectors(np.array([vector_row]))[0], expected[key], atol=0.02)


def test_columns_that_are_mapped_are_those_in_memory(tmp_path, monkeypatch):
    rows = [picture(f"{number}.jpg", 10 * number, caption=f"caption {number}") for number in range(6)]
    store = searchable(tmp_path / "store", *rows, price=[1.0, None, 3.0, 4.0, 5.0, 6.0])
    in_memory = store.searcher.snapshot.metadata
    monkeypatch.setattr("embedder.storage.spill_file.MEMORY_BYTES", 0)
    mapped = open_store(store.files.address).searcher.snapshot.metadata
    assert mapped.rows.equals(in_memory.rows)
    assert len(mapped.rows["item_id"].chunks) == 2, "as many pieces as part files"
    wanted = np.array([5, 0, 3, 3, 2])
    assert mapped.take(wanted).to_pylist() == in_memory.take(wanted).to_pylist()
    assert mapped.describe(wanted) == in_memory.describe(wanted)
    assert mapped.take(wanted[:0]).num_rows == 0
