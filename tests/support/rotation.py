"""Tests that CI leaves out in turn: the slow ones of every other file, and those that a leg of versions runs."""

from collections.abc import Sequence

import pytest

ROTATIONS = 2
ONE_RAY = "one_ray"
"""In the name of every test with Ray; all of them run in one process, beside the others."""


def left_out(items: Sequence[pytest.Item], rotation: int) -> list[pytest.Item]:
    """Slow tests that this rotation leaves to the others; `ROTATIONS` that follow each other leave out none.

    Those of a file, which share what is slow to set up, run together; each rotation has its share of those with Ray.

    Args:
        items: all tests, in the order in which they were collected.
        rotation: any number, as that of a commit.
    """
    slow = [item for item in items if item.get_closest_marker("slow") is not None]
    keys = [(ONE_RAY in item.nodeid, item.nodeid.partition("::")[0]) for item in slow]
    files = {with_ray: list(dict.fromkeys(key for key in keys if key[0] is with_ray)) for with_ray in (True, False)}
    return [item for item, key in zip(slow, keys, strict=True) if (files[key[0]].index(key) - rotation) % ROTATIONS]


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
