"""Steps before writing: columns of what they make, and rows that they can't take, which keep their place."""

import pyarrow as pa
import pytest
from store_samples import reject, row, table

from embedder.batch_schema import CARRIED
from embedder.config_toml.own_code_sections import StepConfig
from embedder.user_steps.run_steps import written_steps
from embedder.user_steps.written_rows import forget_calls

pytestmark = pytest.mark.medium

SOURCE = """
def price_of(batch):
    prices = batch["price"].to_pylist()
    if 13 in prices:
        raise ValueError("unlucky")
    return {"label": [f"{price} EUR" for price in prices]}

def upper(batch):
    return {"loud": [label.upper() for label in batch["label"].to_pylist()]}
"""

LABEL, LOUD = {"label": "string"}, {"loud": "string"}


@pytest.fixture
def apply(tmp_path):
    """Applies the two steps to rows."""
    file = tmp_path / "own.py"
    file.write_text(SOURCE)
    common = {"where": "before_write", "batch_size": 2}
    steps = [
        StepConfig(
            name="priced", callable=f"{file}:price_of", inputs=("price",), outputs={"label": "string"}, **common
        ),
        StepConfig(name="loud", callable=f"{file}:upper", inputs=("label",), outputs={"loud": "string"}, **common),
    ]
    yield written_steps(steps, LABEL | LOUD | {"former": "float32"})
    forget_calls()


def test_columns_of_steps_follow_their_rows_and_former_ones_are_null(apply):
    rows = table(row("a"), reject("b"), row("c"), row("d"), price=pa.array([1, 2, None, 4]))
    found = apply(rows).to_pylist()
    assert [each[CARRIED + "label"] for each in found] == ["1 EUR", None, None, "4 EUR"]
    assert [each[CARRIED + "loud"] for each in found] == ["1 EUR", None, None, "4 EUR"]
    assert [each[CARRIED + "former"] for each in found] == [None] * 4
    assert [{name: each[name] for name in rows.column_names} for each in found] == rows.to_pylist()


def test_a_row_that_a_step_cannot_take_loses_its_vectors_and_its_item_is_a_reject(apply):
    video = [row("v", segment=number, modality="video", num_vectors=2 if number else None) for number in (0, 1)]
    rows = table(row("a"), *video, row("z"), price=pa.array([1, 13, 2, 13]))
    found = apply(rows).to_pylist()
    assert [each["image_embedding"] is None for each in found] == [False, True, False, True]
    assert [each["modality"] for each in found] == ["image", "video", "video", "image"]
    assert [each["error_type"] for each in found] == [None, "ValueError", "ValueError", "ValueError"]
    assert {(each["step"], each["error"]) for each in found[1:]} == {("priced", "unlucky")}
    assert [each["num_vectors"] for each in found] == [1, None, 2, 1]
    assert [each[CARRIED + "loud"] for each in found] == ["1 EUR", None, "2 EUR", None]
