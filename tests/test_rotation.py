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


def slow(names, *places):
    """Two slow tests of each file."""
    return [Marked(pytest.mark.slow, nodeid=f"{name}::test_{each}") for name in names for each in places]


@pytest.mark.parametrize("first", [0, 1, 1001])
def test_each_file_of_slow_tests_runs_whole_in_one_rotation_and_all_other_tests_in_each(first):
    names = [f"tests/test_{number}.py" for number in range(2 * ROTATIONS + 1)]
    here, on_ray = slow(names, "1", "2[x]"), slow(names, "3[one_ray]", "4[one_ray-x]")
    always = [
        Marked(nodeid=f"{names[0]}::test_quick"),
        Marked(pytest.mark.timeout(5), nodeid="tests/test_b.py::test_1"),
    ]
    items = [*here[:3], *always, *on_ray, *here[3:]]
    runs = [[item for item in items if item not in left_out(items, first + number)] for number in range(ROTATIONS)]
    assert all(item in run for run in runs for item in always)
    for group in (here, on_ray):
        assert all(sum(item in run for run in runs) == 1 for item in group)
        assert all(
            (one in run) == (two in run) for run in runs for one, two in zip(group[::2], group[1::2], strict=True)
        )
        assert all(2 <= len(set(run) & set(group)) / 2 <= 3 for run in runs)


def test_the_quick_tests_of_a_leg_are_left_to_it():
    names = ("tests/index/test_a.py::test_1", "tests/index_more/test_a.py::test_1", "tests/test_b.py::test_1[x]")
    items = [*(Marked(nodeid=name) for name in names), Marked(pytest.mark.slow, nodeid="tests/index/test_a.py::test_2")]
    left = left_to_leg(items, ["tests/index", "tests/test_b.py"])
    assert [item.nodeid for item in left] == [names[0], names[2]]
    assert left_to_leg(items, []) == []
