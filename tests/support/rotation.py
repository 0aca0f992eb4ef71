"""Tests that CI leaves out in turn: two of three slow ones, and those that a leg of versions runs."""

from collections.abc import Sequence

import pytest

ROTATIONS = 3
ONE_RAY = "one_ray"
"""In the name of every test with Ray; all of them run in one process, beside the others."""


def left_out(items: Sequence[pytest.Item], rotation: int) -> list[pytest.Item]:
    """Slow tests that this rotation leaves to the others; `ROTATIONS` that follow each other leave out none.

    Those with Ray, which all run in one process, and the others are counted apart: each rotation has its share of both.
    With Ray, the tests of a file have one cluster, which a rotation starts for all of them or not at all.

    Args:
        items: all tests, in the order in which they were collected.
        rotation: any number, as that of a commit.
    """
    slow = [item for item in items if item.get_closest_marker("slow") is not None]
    files: dict[str, list[pytest.Item]] = {}
    for item in slow:
        if ONE_RAY in item.nodeid:
            files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    groups = [[*files.values()], [[item] for item in slow if ONE_RAY not in item.nodeid]]
    shares = [share for group in groups for number, share in enumerate(group) if (number - rotation) % ROTATIONS]
    return [item for share in shares for item in share]


def left_to_leg(items: Sequence[pytest.Item], paths: Sequence[str]) -> list[pytest.Item]:
    """Tests that `scripts/test_versions` runs, with other versions: those of some files and folders that aren't slow.

    Args:
        items: all tests.
        paths: as `scripts/test_versions --list` prints them.
    """
    inside = tuple(f"{path}/" for path in paths)
    return [
        item
        for item in items
        if (item.nodeid.startswith(inside) or item.nodeid.partition("::")[0] in paths)
        and item.get_closest_marker("slow") is None
    ]
