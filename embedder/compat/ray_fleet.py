"""Nodes of a cluster as its GCS reports them to a driver; no dashboard is needed."""

from collections.abc import Mapping
from typing import Any

from shards.compat import Private

FLEET = Private(
    "watching of nodes",
    ("ray._private.state:state.get_draining_nodes",),
    "ray 2.52.1 to 2.60.0",
    "a run doesn't report nodes that come and go",
)
FREE = Private(
    "what is free on each node",
    ("ray._private.state:available_resources_per_node",),
    "ray 2.52.1 to 2.60.0",
    "what other jobs hold is not seen, and a run next to them waits in Ray until it has room",
)


def can_read() -> bool:
    """Return whether the installed Ray can report its nodes."""
    return FLEET.is_there()


def read_nodes() -> tuple[list[dict[str, Any]], Mapping[str, int]] | None:
    """Return `ray.nodes()`, dead ones included, and draining nodes' deadlines by id; None if the GCS doesn't answer.

    Deadlines are Unix times in milliseconds, 0 for none.
    """
    import ray
    from ray._private.state import state

    try:
        entries, draining = ray.nodes(), state.get_draining_nodes()
    except (RuntimeError, ConnectionError, ray.exceptions.RayError):
        return None
    return (entries, draining) if entries else None  # the answer of a GCS that is just ending


def free_resources() -> dict[str, dict[str, float]] | None:
    """Return the resources that no process holds, by node; None if Ray doesn't report them."""
    if not FREE.is_there():
        return None
    from ray._private.state import available_resources_per_node

    free: dict[str, dict[str, float]] = available_resources_per_node()
    return free
