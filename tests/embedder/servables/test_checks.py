"""Outputs of a servable against their declaration: what is wrong is named, and rows that are right stay."""

import numpy as np
import pyarrow as pa
import pytest

from embedder.servables.checks import check_outputs
from embedder.servables.servable_columns import OutputColumn
from embedder.servables.servable_errors import ServableError

VECTOR = {"vector": OutputColumn(shape=(3,))}
BOXES = {"boxes": OutputColumn(shape=("any", 2))}


def check(columns, declared, there=(True, True)):
    expected = dict.fromkeys(declared, np.array(there))
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    return check_outputs("servable s (python, s.py:S)", table, declared, expected)


def floats(*rows):
    return pa.array(rows, pa.list_(pa.float32()))


def test_right_outputs_are_returned_as_declared():
    fixed = pa.array([[1, 2, 3], [4, 5, 6]], pa.list_(pa.float32(), 3))
    found = check(
        {"vector": fixed, "label": pa.array(["a", "b"], pa.large_string())},
        VECTOR | {"label": OutputColumn(type="string")},
    )
    assert found.problems == [None, None]
    assert found.columns["vector"].type == pa.list_(pa.float32())
    assert found.columns["vector"].to_pylist() == [[1, 2, 3], [4, 5, 6]]
    assert found.columns["label"].type == pa.string()


def test_tensors_of_arrow_are_the_vectors_that_they_hold():
    found = check({"vector": pa.FixedShapeTensorArray.from_numpy_ndarray(np.eye(2, 3, dtype=np.float32))}, VECTOR)
    assert found.problems == [None, None]
    assert found.columns["vector"].to_pylist() == [[1, 0, 0], [0, 1, 0]]


def test_empty_lists_without_a_type_are_of_the_declared_one():
    found = check({"boxes": pa.array([[], []])}, BOXES)
    assert found.columns["boxes"].to_pylist() == [[], []]
    assert found.columns["boxes"].type == BOXES["boxes"].arrow_type()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"vector": floats([1, 2, 3])}, "returned 1 rows for 2"),
        ({"vector": floats(*[[1, 2, 3]] * 3)}, "returned 3 rows for 2"),
        ({"other": floats([1, 2, 3], [1, 2, 3])}, "returned other, and declares 'vector'"),
        ({"vector": floats([1] * 3, [1] * 3), "more": pa.array([1, 2])}, "a column 'more' that it doesn't declare"),
        ({"vector": pa.array([[1.0] * 3] * 2)}, r"returned list<item: double>, and declares float32 of shape \[3\]"),
        ({"vector": pa.array([1.0, 2.0], pa.float32())}, r"returned float, and declares float32 of shape \[3\]"),
        ({"vector": pa.array([[1, 2, 3]] * 2, pa.list_(pa.int64()))}, "int64"),
        ({"vector": pa.array(["a", "b"])}, "returned string"),
        (pa.Table.from_arrays([floats([1] * 3, [1] * 3)] * 2, ["vector", "vector"]), "2 columns 'vector'"),
        (pa.table({}), "returned no column"),
    ],
)
def test_a_call_of_another_form_is_refused_whole(columns, message):
    with pytest.raises(ServableError, match=message) as refused:
        check(columns, VECTOR)
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("servable s (python, s.py:S): ")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ([1, float("nan"), 3], "found NaN or infinity"),
        ([1, float("inf"), 3], "found NaN or infinity"),
        ([1, 2], r"found 2 values in a list of 3 \(shape \[3\]\)"),
        ([1, 2, 3, 4], "found 4 values in a list of 3"),
        ([1, None, 3], "found a null inside"),
        (None, "found nothing"),
    ],
)
@pytest.mark.parametrize("place", [0, 1])
def test_a_wrong_row_is_told_and_the_other_one_stays(row, problem, place):
    rows = [[7, 8, 9], [7, 8, 9]]
    rows[place] = row
    found = check({"vector": floats(*rows)}, VECTOR)
    other = 1 - place
    assert found.problems[other] is None
    assert pytest.importorskip("re").search(problem, found.problems[place])
    assert found.problems[place].startswith("servable s (python, s.py:S): vector: ")
    assert found.columns["vector"].to_pylist()[place] is None
    assert found.columns["vector"].to_pylist()[other] == [7, 8, 9]


def test_sizes_inside_lists_are_counted_to_their_own_row():
    boxes = pa.array([[[1, 2]], [], [[1, 2], [3, 4, 5]], [[6, 7]] * 3], BOXES["boxes"].arrow_type())
    found = check({"boxes": boxes}, BOXES, [True] * 4)
    assert [problem is None for problem in found.problems] == [True, True, False, True]
    assert "found 3 values in a list of 2" in found.problems[2]
    assert found.columns["boxes"].to_pylist() == [[[1, 2]], [], None, [[6, 7]] * 3]


def test_nan_inside_the_second_row_of_sliced_lists_is_found():
    whole = floats([float("nan")] * 3, [1, 2, 3], [4, 5, float("nan")])
    found = check(pa.table({"vector": whole}).slice(1), VECTOR)
    assert [problem is None for problem in found.problems] == [True, False]


def test_what_a_row_is_not_computed_from_must_be_null():
    found = check({"vector": floats([1, 2, 3], None)}, VECTOR, (True, False))
    assert found.problems == [None, None]
    found = check({"vector": floats([1, 2, 3], [1, 2, 3])}, VECTOR, (True, False))
    assert "an input that it needs is missing" in found.problems[1]


def test_a_nullable_output_may_be_null():
    found = check({"text": pa.array(["a", None])}, {"text": OutputColumn(type="string", nullable=True)})
    assert found.problems == [None, None]
    assert found.columns["text"].to_pylist() == ["a", None]
