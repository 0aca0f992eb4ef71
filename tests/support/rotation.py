"""Tests that CI leaves out in turn: half of the medium and slow ones, and those that a leg of versions runs."""

from collections.abc import Sequence

import pytest

ROTATIONS = 2
ONE_RAY = "one_ray"
"""In the name of every test with Ray; all of them run in one process, next to the others."""
SECONDS = {
    "test_cluster_submission.py": 690,
    "test_backpressure.py": 190,
    "test_chaos_nodes.py": 180,
    "test_slurm.py": 175,
    "test_cluster_connection.py": 150,
    "test_throttled_operators.py": 150,
    "test_logical_gpus.py": 130,
    "test_dataset.py": 120,
    "test_bench_gpu.py": 110,
    "test_cluster_growth.py": 100,
    "test_cluster_scripts.py": 75,
    "test_growing_stages.py": 70,
    "test_cluster_costs.py": 65,
    "test_several_models.py": 55,
}
"""Of the files with Ray that take longest, by runs on two slow cores; what is wrong here makes one turn longer."""
OTHER_SECONDS = 30


def left_out(items: Sequence[pytest.Item], rotation: int) -> list[pytest.Item]:
    """Medium and slow tests that this rotation leaves to the other; `ROTATIONS` that follow each other leave out none.

    Those with Ray, which all run in one process, and the others are counted apart: each rotation has its share of both.
    With Ray, the tests of a file have one cluster, which a rotation starts for all of them or not at all; a file goes
    to the rotation that has least to do, the longest first.

    Args:
        items: all tests, in the order in which they were collected.
        rotation: any number, as that of a commit.
    """
    in_turns = [item for item in items if item.get_closest_marker("slow") or item.get_closest_marker("medium")]
    turns: list[list[pytest.Item]] = [[] for _ in range(ROTATIONS)]
    files: dict[str, list[pytest.Item]] = {}
    for item in in_turns:
        if ONE_RAY in item.nodeid:
            files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    seconds = {path: SECONDS.get(path.rpartition("/")[2], OTHER_SECONDS) for path in files}
    taken = [0] * ROTATIONS
    for path in sorted(files, key=lambda path: -seconds[path]):
        turn = taken.index(min(taken))
        turns[turn] += files[path]
        taken[turn] += seconds[path]
    for number, item in enumerate(item for item in in_turns if ONE_RAY not in item.nodeid):
        turns[number % ROTATIONS].append(item)
    return [item for number, turn in enumerate(turns) if (number - rotation) % ROTATIONS for item in turn]


def left_to_leg(items: Sequence[pytest.Item], paths: Sequence[str]) -> list[pytest.Item]:
    """Tests that `scripts/test_versions` runs with other versions: of some files and folders, but no slow ones."""
    inside = tuple(f"{path}/" for path in paths)
    return [
        item
        for item in items
        if (item.nodeid.startswith(inside) or item.nodeid.partition("::")[0] in paths)
        and item.get_closest_marker("slow") is None
    ]
