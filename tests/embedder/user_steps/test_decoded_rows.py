"""Rows of items after steps that reject some, or make several of one: counted again, reported once."""

import numpy as np
import pytest

from embedder.user_steps.decoded_rows import _BadRowError, _image_of, _of_region, recount

BAD = {"step": "crop", "error_type": "KeyError", "error": "no price", "transient": False}


def counted(*rows, renumbers=False):
    return list(recount(rows, "crop", renumbers=renumbers))


def row(segment=0, **values):
    return {"modality": "video", "segment": segment, **values}


def test_rows_that_nothing_happened_to_stay_as_they_are():
    rows = [(0, row(0)), (0, row(2, num_vectors=2)), (1, {"num_vectors": 0, "unchanged": True, "content_version": "v"})]
    assert counted(*rows) == rows


def test_a_row_that_failed_is_left_out_and_told_by_the_last_one():
    found = counted((0, row(0)), (0, dict(BAD)), (0, row(2, num_vectors=3)))
    assert found == [(0, row(0)), (0, row(2, num_vectors=2) | BAD)]


def test_of_an_item_whose_last_row_failed_the_others_stay():
    found = counted((0, row(0)), (0, BAD | {"num_vectors": 2}), (1, row(0, num_vectors=1)))
    assert found == [(0, row(0)), (0, BAD | {"num_vectors": 1}), (1, row(0, num_vectors=1))]


def test_the_first_reason_is_told_and_what_decoding_found_is_no_less():
    broken = {"step": "decode", "error_type": "Truncated", "error": "cut off", "transient": False}
    assert counted((0, dict(BAD)), (0, row(1, num_vectors=2) | broken)) == [(0, row(1, num_vectors=1) | BAD)]
    assert counted((0, row(0, num_vectors=1) | broken)) == [(0, row(0, num_vectors=1) | broken)]


def test_rows_are_numbered_anew_where_one_may_have_become_several():
    found = counted((4, row(0)), (4, row(0)), (4, row(7, num_vectors=1)), (5, row(3, num_vectors=1)), renumbers=True)
    assert [(number, values["segment"], values.get("num_vectors")) for number, values in found] == [
        (4, 0, None),
        (4, 1, None),
        (4, 2, 3),
        (5, 0, 1),
    ]


def test_an_item_of_which_nothing_is_left_is_a_reject_that_names_the_step():
    ((_, found),) = counted((0, {"num_vectors": 1}))
    assert (found["num_vectors"], found["step"], found["error_type"]) == (0, "crop", "NoRows")


@pytest.mark.parametrize(
    "region",
    [
        None,
        {"x": 0, "y": 0, "width": 5, "height": None},
        {"x": -1, "y": 0, "width": 5, "height": 5},
        {"x": 0, "y": 0, "width": 0, "height": 5},
        {"x": 38, "y": 0, "width": 3, "height": 5},
        {"x": 0, "y": 2**31 - 1, "width": 1, "height": 1},
    ],
)
def test_a_region_that_is_no_part_of_the_image_is_refused(region):
    with pytest.raises(_BadRowError, match="region: found"):
        _of_region(np.zeros((1, 30, 40, 3), np.uint8), region, is_cut=True)


@pytest.mark.parametrize(
    "image",
    [
        None,
        {"pixels": None, "height": 1, "width": 1},
        {"pixels": b"", "height": 0, "width": 0},
        {"pixels": b"123456", "height": -1, "width": -2},
        {"pixels": b"1234567", "height": 1, "width": 2},
        {"pixels": b"123", "height": None, "width": 1},
    ],
)
def test_pixels_that_are_no_image_are_refused(image):
    with pytest.raises(_BadRowError, match="image: found"):
        _image_of(image)
