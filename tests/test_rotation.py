"""Runs of CI that follow each other run every slow test."""

import pytest
from rotation import ROTATIONS, left_out


class Marked:
    """Test with marks."""

    def __init__(self, *marks):
        self._marks = marks

    def iter_markers(self, name):
        return (mark.mark for mark in self._marks if mark.mark.name == name)


@pytest.mark.parametrize("first", [0, 1, 1001])
def test_each_slow_test_that_rotates_runs_in_one_rotation_and_all_others_in_each(first):
    rotating = [Marked(pytest.mark.slow(rotates=True)) for _ in range(2 * ROTATIONS + 1)]
    always = [Marked(), Marked(pytest.mark.slow), Marked(pytest.mark.timeout(5))]
    items = [*rotating[:3], *always, *rotating[3:]]
    runs = [[item for item in items if item not in left_out(items, first + number)] for number in range(ROTATIONS)]
    assert all(sum(item in run for run in runs) == 1 for item in rotating)
    assert all(item in run for run in runs for item in always)
    assert all(2 <= len(set(run) & set(rotating)) <= 3 for run in runs)
