"""Runs of CI that follow each other run every slow test."""

import pytest
from rotation import ROTATIONS, left_out, left_to_leg


class Marked:
    """Test with marks."""

    def __init__(self, *marks, nodeid=""):
        self._marks, self.nodeid = marks, nodeid

    def get_closest_marker(self, name):
        return next(self.iter_markers(name), None)

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


def test_the_quick_tests_of_a_leg_are_left_to_it():
    names = ("tests/index/test_a.py::test_1", "tests/index_more/test_a.py::test_1", "tests/test_b.py::test_1[x]")
    items = [*(Marked(nodeid=name) for name in names), Marked(pytest.mark.slow, nodeid="tests/index/test_a.py::test_2")]
    left = left_to_leg(items, ["tests/index", "tests/test_b.py"])
    assert [item.nodeid for item in left] == [names[0], names[2]]
    assert left_to_leg(items, []) == []
