"""Runs of CI that follow each other run every slow test."""

import pytest
from rotation import ROTATIONS, SECONDS, left_out, left_to_leg


class Marked:
    """Test with marks."""

    def __init__(self, *marks, nodeid=""):
        self._marks, self.nodeid = marks, nodeid

    def get_closest_marker(self, name):
        return next(self.iter_markers(name), None)

    def iter_markers(self, name):
        return (mark.mark for mark in self._marks if mark.mark.name == name)


@pytest.mark.parametrize("first", [0, 1, 1001])
@pytest.mark.parametrize("mark", [pytest.mark.medium, pytest.mark.slow])
def test_each_slow_test_runs_in_one_rotation_all_others_in_each_and_each_has_its_share_of_those_with_ray(first, mark):
    numbers = range(2 * ROTATIONS + 1)
    names = ("tests/test_a.py::test_{}", "tests/test_{}.py::test_a[one_ray]")
    marked = [[Marked(mark, nodeid=name.format(number)) for number in numbers] for name in names]
    always = [
        Marked(nodeid="tests/test_a.py::test_quick"),
        Marked(pytest.mark.timeout(5), nodeid="tests/test_b.py::test_1"),
    ]
    items = [*marked[0][:3], *always, *marked[1], *marked[0][3:]]
    runs = [[item for item in items if item not in left_out(items, first + number)] for number in range(ROTATIONS)]
    assert all(item in run for run in runs for item in always)
    for group in marked:
        assert all(sum(item in run for run in runs) == 1 for item in group)
        assert all(2 <= len(set(run) & set(group)) <= 3 for run in runs)


def test_slow_tests_of_a_file_with_ray_run_together():
    names = ("a.py::test_1", "a.py::test_2", "b.py::test_1", "b.py::test_2", "a.py::test_3")
    items = [Marked(pytest.mark.slow, nodeid=f"tests/test_{name}[one_ray]") for name in names]
    runs = [[item for item in items if item not in left_out(items, number)] for number in range(ROTATIONS)]
    assert sorted("".join(item.nodeid[11] for item in run) for run in runs if run) == ["aaa", "bb"]


def test_turns_take_about_as_long():
    paths = [*(f"tests/{name}" for name in SECONDS), *(f"tests/test_{number}.py" for number in range(20))]
    items = [Marked(pytest.mark.slow, nodeid=f"{path}::test_a[one_ray]") for path in paths]
    left = [left_out(items, number) for number in range(ROTATIONS)]
    taken = [sum(SECONDS.get(item.nodeid[6:].partition("::")[0], 30) for item in each) for each in left]
    assert max(taken) - min(taken) <= 30


def test_the_quick_tests_of_a_leg_are_left_to_it():
    names = ("tests/index/test_a.py::test_1", "tests/index_more/test_a.py::test_1", "tests/test_b.py::test_1[x]")
    items = [*(Marked(nodeid=name) for name in names), Marked(pytest.mark.slow, nodeid="tests/index/test_a.py::test_2")]
    left = left_to_leg(items, ["tests/index", "tests/test_b.py"])
    assert [item.nodeid for item in left] == [names[0], names[2]]
    assert left_to_leg(items, []) == []
