"""Claim of a cluster by one driver while its actors start, kept in the key-value store of the cluster's head.

Otherwise, two drivers that look for room at the same time could both find it, and each hold what the other needs.
"""

from embedder.compat.ray_attempts import job_id
from shards.compat import Private

CLAIM = Private(
    "the claim of a cluster while a run starts",
    (
        "ray.experimental.internal_kv:_internal_kv_put(key, value, overwrite, namespace)",
        "ray.experimental.internal_kv:_internal_kv_get(key, namespace)",
        "ray.experimental.internal_kv:_internal_kv_del(key, namespace)",
        "ray._private.state:state.job_table",
    ),
    "ray 2.52.1 to 2.60.0",
    "runs that start together may wait for ever",
)
NAMESPACE = b"embedder-claim"
KEY = b"starting"


def claim() -> bool:
    """Claim the cluster, and return whether this driver has it; the claim of a driver that has ended is void."""
    if not CLAIM.is_there():
        return True
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

    mine = job_id().encode()
    if not _internal_kv_put(KEY, mine, overwrite=False, namespace=NAMESPACE):
        return True
    holder = _internal_kv_get(KEY, namespace=NAMESPACE)
    if holder is not None and holder != mine and _is_dead(holder.decode()):
        _delete()
        return not _internal_kv_put(KEY, mine, overwrite=False, namespace=NAMESPACE)
    return bool(holder == mine)


def release() -> None:
    """Release the claim, if it is this driver's."""
    if not CLAIM.is_there():
        return
    from ray.experimental.internal_kv import _internal_kv_get

    if _internal_kv_get(KEY, namespace=NAMESPACE) == job_id().encode():
        _delete()


def _delete() -> None:
    from ray.experimental.internal_kv import _internal_kv_del

    _internal_kv_del(KEY, namespace=NAMESPACE)


def _is_dead(driver: str) -> bool:
    from ray._private.state import state

    return any(job["JobID"] == driver and job["IsDead"] for job in state.job_table())
