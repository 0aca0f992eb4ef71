"""Nodes of a cluster as its GCS tells a driver; no dashboard is needed.

For what a run shows: outside of the tested versions it tells nothing of nodes that come and go.
Source: ray 2.60 `_private/state.py`.
"""

from collections.abc import Mapping
from typing import Any

from embedder.compat.draining import TESTED
from shards.compat import is_tested


def can_read() -> bool:
    """Return whether the installed Ray is one that the module was tested with."""
    return is_tested("watching of nodes", TESTED, "a run tells nothing of nodes that come and go")


def read_nodes() -> tuple[list[dict[str, Any]], Mapping[str, int]] | None:
    """Read the table of nodes.

    Returns:
        Entries of `ray.nodes()`, dead ones included, and the deadline of each node that is drained, by id: Unix time in
        milliseconds, 0 for none. None where the GCS doesn't answer.
    """
    import ray
    from ray._private.state import state

    try:
        entries, draining = ray.nodes(), state.get_draining_nodes()
    except (RuntimeError, ConnectionError, ray.exceptions.RayError):
        return None
    return (entries, draining) if entries else None  # what the GCS answers that is just gone
