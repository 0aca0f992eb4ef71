"""Slow tests that rotate: they take minutes each, mostly of a cluster; CI runs a sixth of them with each commit."""

from collections.abc import Sequence

import pytest

ROTATIONS = 6


def left_out(items: Sequence[pytest.Item], rotation: int) -> list[pytest.Item]:
    """Tests that this rotation leaves to the others; six that follow each other leave out none.

    Args:
        items: all tests, in the order in which they were collected.
        rotation: any number, as that of a commit.
    """
    rotating = [item for item in items if any(mark.kwargs.get("rotates") for mark in item.iter_markers("slow"))]
    return [item for number, item in enumerate(rotating) if (number - rotation) % ROTATIONS]
