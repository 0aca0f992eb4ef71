"""The measurements on small clusters, at a size that takes a minute each."""

import os
import shutil

import pytest
from script_runs import found_by

pytestmark = [
    pytest.mark.slow(rotates=True),
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "nsenter"))),
        reason="namespaces need root, and ip, unshare and nsenter",
    ),
]


@pytest.fixture(autouse=True)
def ray_alone(starts_ray):
    """These start clusters of their own."""


def test_decoding_is_held_to_its_nodes():
    found = found_by("scale_decode.py", 1, 3, "--name", f"scale{os.getpid()}-")
    (row,) = found["rows"]
    assert row["items_per_s"] > 0 and row["bound"] == "decode"


def test_bytes_between_nodes_are_told_with_and_without_locality():
    found = found_by("compare_locality.py", 80, "--name", f"local{os.getpid()}-")
    with_locality, without = found["rows"]
    assert (with_locality["locality"], without["locality"]) == ("on", "off")
    assert 0 < without["moved_mib"] <= without["handed_on_mib"]


def test_a_plan_for_unlike_nodes_is_made_and_run():
    found = found_by("compare_cluster_plans.py", 3, "--depth", 2, "--name", f"plans{os.getpid()}-")
    assert [row["plan"] for row in found["rows"]] == ["planned", "even"]
    assert all(row["items_per_s"] > 0 for row in found["rows"])
