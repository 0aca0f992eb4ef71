"""Rows of one model among those of several: what only reports, what is a reject, what stays another model's."""

import pyarrow as pa

from embedder.batch_schema import CARRIED, VECTOR
from embedder.store.files import StoreFiles
from embedder.store.journal.model_parts import ERROR_TYPE, ModelPart, rows_of_model
from embedder.store.journal.part_writer import RunMetadata
from embedder.store.tables.models import model_files

OUTPUTS = pa.schema({"top": pa.string()})


def main_part(tmp_path):
    return ModelPart(StoreFiles(tmp_path / "store"), RunMetadata("run", "0001-aaaa", "m", "p", pa.schema([])))


def part(tmp_path):
    view = model_files(StoreFiles(tmp_path / "store"), "tags")
    stamp = RunMetadata("run", "0001-aaaa", "m", "p", pa.schema([]), OUTPUTS)
    return ModelPart(view, stamp, (("top", "top"), ("vector", "image_embedding")))


def table(rows):
    """Rows of items: by default new for both models, with a vector of each."""
    normal = {
        "modality": "image",
        "num_vectors": 1,
        "reason": "new",
        "attempts": 1,
        "known_version": None,
        "known_vectors": 0,
        "needed": True,
        "reason@tags": "new",
        "attempts@tags": 3,
        "known_version@tags": "v1",
        "known_vectors@tags": 2,
        "needed@tags": True,
        "image_embedding": [1.0],
        "text_embedding": None,
        "tags.top": "cat",
        "tags.vector": [2.0],
        "tags.error": None,
        "step": None,
        "error_type": None,
        "error": None,
        "transient": None,
        "unchanged": None,
        "trace": None,
    }
    types = {name: pa.string() for name in ("known_version", "step", "error_type", "error", "tags.error", "modality")}
    types |= {"text_embedding": VECTOR, "image_embedding": VECTOR, "tags.vector": VECTOR, "num_vectors": pa.int32()}
    types |= {"transient": pa.bool_(), "unchanged": pa.bool_(), "reason": pa.string(), "reason@tags": pa.string()}
    full = [normal | row for row in rows]
    columns = {name: pa.array([row[name] for row in full], types.get(name)) for name in full[0]}
    return pa.table(columns)


def test_a_model_gets_its_own_values_in_the_place_of_the_main_models(tmp_path):
    (row,) = rows_of_model(table([{"item_id": "a"}]), part(tmp_path)).to_pylist()
    assert (row["image_embedding"], row["text_embedding"], row[CARRIED + "top"]) == ([2.0], None, "cat")
    assert (row["attempts"], row["known_version"], row["known_vectors"], row["unchanged"]) == (3, "v1", 2, False)
    (main,) = rows_of_model(table([{"item_id": "a"}]), main_part(tmp_path)).to_pylist()
    assert (main["image_embedding"], main["attempts"]) == ([1.0], 1)


def test_items_that_a_model_does_not_list_are_not_among_its_rows(tmp_path):
    rows = table([{"item_id": "a", "reason": None}, {"item_id": "b", "reason@tags": None}])
    assert rows_of_model(rows, main_part(tmp_path))["item_id"].to_pylist() == ["b"]
    assert rows_of_model(rows, part(tmp_path))["item_id"].to_pylist() == ["a"]


def test_equal_contents_only_report_on_their_items(tmp_path):
    first = {"item_id": "clip", "needed@tags": False, "num_vectors": None}
    last = {"item_id": "clip", "needed@tags": False, "num_vectors": 2}
    rows = rows_of_model(table([first, last]), part(tmp_path))
    assert rows["modality"].to_pylist() == [None, None]
    assert rows["num_vectors"].to_pylist() == [None, 0]
    assert rows["unchanged"].to_pylist() == [True, True]


def test_a_row_that_failed_rejects_all_of_its_item_and_no_earlier_reason_is_lost(tmp_path):
    rows = rows_of_model(
        table(
            [
                {"item_id": "clip", "tags.error": "it hurts", "num_vectors": None},
                {"item_id": "clip", "num_vectors": 2},
                {"item_id": "torn", "tags.error": "no pixels", "step": "decode", "error_type": "Torn", "error": "torn"},
                {"item_id": "fine"},
            ]
        ),
        part(tmp_path),
    ).to_pylist()
    assert [(row["step"], row["error_type"], row["error"]) for row in rows] == [
        ("model tags", ERROR_TYPE, "it hurts"),
        ("model tags", ERROR_TYPE, "it hurts"),
        ("decode", "Torn", "torn"),
        (None, None, None),
    ]
    assert rows[0]["transient"] is False
    main = rows_of_model(table([{"item_id": "clip", "tags.error": "it hurts"}]), main_part(tmp_path)).to_pylist()
    assert main[0]["error_type"] is None
