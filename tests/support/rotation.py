"""Tests that CI leaves out in turn: seven of eight that take minutes each, and those that a leg of versions runs."""

from collections.abc import Sequence

import pytest

ROTATIONS = 8


def left_out(items: Sequence[pytest.Item], rotation: int) -> list[pytest.Item]:
    """Tests that this rotation leaves to the others; eight that follow each other leave out none.

    Args:
        items: all tests, in the order in which they were collected.
        rotation: any number, as that of a commit.
    """
    rotating = [item for item in items if any(mark.kwargs.get("rotates") for mark in item.iter_markers("slow"))]
    return [item for number, item in enumerate(rotating) if (number - rotation) % ROTATIONS]


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
