"""Tables of a decode task that Ray runs again, after files came or went."""

from random import Random

import numpy as np
import pytest

from embedder.media.limits import DecodeLimits
from embedder.media.resize import ResizeSpec
from embedder.steps.item_decoder import DecodeSpec
from embedder.steps.table_cuts import divide, fixed_cuts

ROW_BYTES = 3 * 8 * 8


def spec(rows_per_batch=4, resize=ResizeSpec(8)):  # noqa: B008  # frozen
    return DecodeSpec(resize, DecodeLimits(), None, 8, 5.0, 4, rows_per_batch)


def rows_of(sizes):
    """One row for an image, some for a video, one without pixels (0) for what can't be read."""
    pixels = np.zeros((8, 8, 3), np.uint8)
    for number, size in enumerate(sizes):
        for _ in range(max(1, size)):
            yield number, {"pixels": pixels if size else None}


def ids(tables):
    """Item and row of that item, by table."""
    found, last = [], (-1, 0)
    for table in tables:
        found.append([])
        for number, _ in table:
            last = (number, last[1] + 1 if last[0] == number else 0)
            found[-1].append(last)
    return found


def attempt(sizes, *, earlier=None, table_bytes=8 * ROW_BYTES):
    """Tables of one attempt, and its cuts; after a complete earlier one, with its cuts."""
    cuts = list(earlier or [])
    is_full = lambda rows, size: rows > 0 and rows % 4 == 0 and size >= table_bytes  # noqa: E731
    fixed = fixed_cuts(len(sizes), spec(), table_bytes)
    tables = ids(divide(rows_of(sizes), fixed + cuts, is_full, cuts.append if earlier is None else None))
    return tables, cuts


def test_images_end_a_table_after_whole_batches_that_are_large_enough():
    assert fixed_cuts(20, spec(), 8 * ROW_BYTES) == [(8, 0), (16, 0)]
    assert fixed_cuts(16, spec(), 8 * ROW_BYTES - 1) == [(8, 0)], "and none at the end"
    assert fixed_cuts(9, spec(), 1) == [(4, 0), (8, 0)]
    assert fixed_cuts(9, spec(resize=None), 1) == [], "captions are small"
    patches = ResizeSpec(8, mode="patches", patch_size=4, max_patches=8)
    assert fixed_cuts(9, spec(resize=patches), 8 * ROW_BYTES) == [(4, 0), (8, 0)]
    tables, noted = attempt([1] * 20)
    assert [len(table) for table in tables] == [8, 8, 4] and noted == []


def test_a_video_ends_tables_where_they_are_full_and_its_item_is_noted():
    tables, noted = attempt([1, 1, 20, 1])
    assert [len(table) for table in tables] == [8, 8, 7] and noted == [(2, 6), (2, 14)]


@pytest.mark.parametrize("seed", range(200))
def test_another_attempt_makes_as_many_tables_of_the_same_items_whatever_came_or_went(seed):
    rng = Random(seed)
    sizes = [rng.choice([0, 1, 1, 1, 30]) for _ in range(rng.randint(1, 30))]
    first, noted = attempt(sizes)
    again = [rng.choice([size, size, 0, 25]) for size in sizes]
    second, _ = attempt(again, earlier=noted)
    assert len(second) == len(first)
    starts = sorted([(0, 0), *fixed_cuts(len(sizes), spec(), 8 * ROW_BYTES), *noted])
    for tables in (first, second):
        for start, stop, table in zip(starts, [*starts[1:], (len(sizes), 0)], tables, strict=True):
            assert all(start <= each < stop for each in table)


def test_a_stopped_task_makes_as_many_tables_as_ever():
    tables, _ = attempt([1] * 20)
    stopped = ids(divide(rows_of([]), fixed_cuts(20, spec(), 8 * ROW_BYTES), lambda rows, size: False, None))
    assert len(stopped) == len(tables) and not any(stopped)
