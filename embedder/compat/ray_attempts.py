"""Ray's information for a task about its earlier attempts, and notes that outlive the task's process.

The notes are in the key-value store of Ray's head: each takes about a millisecond and no process. Without them every
attempt counts as the first: work that kills its process is retried until `no_progress_timeout_s` ends the run.
"""

import sys
from collections.abc import Collection

from shards.compat import Private

ATTEMPTS = Private(
    "the count of a task's attempts",
    (
        "ray._private.worker:global_worker.mode",
        "ray._private.worker:WORKER_MODE",
        "ray._raylet:CoreWorker.get_current_task_attempt_number",
        "ray.experimental.internal_kv:_internal_kv_put(key, value, namespace)",
        "ray.experimental.internal_kv:_internal_kv_get(key, namespace)",
        "ray.experimental.internal_kv:_internal_kv_list(prefix, namespace)",
        "ray.experimental.internal_kv:_internal_kv_del(key, del_by_prefix, namespace)",
        "ray._private.state:state._connect_and_get_accessor",
        "ray.core.generated.gcs_pb2:WorkerTableData",
    ),
    "ray 2.52.1 to 2.60.0",
    "what kills its process ends a run only by no_progress_timeout_s",
)
NAMESPACE = b"embedder-attempts"


def is_in_worker() -> bool:
    """Return whether this process is a Ray worker, and can count a task's attempts."""
    if "ray" not in sys.modules or not ATTEMPTS.is_there():
        return False
    from ray._private.worker import WORKER_MODE, global_worker

    return bool(global_worker.mode == WORKER_MODE)


def attempt_number() -> int:
    """Return how often Ray has started this task or actor before, or tried to; 0 outside of Ray's workers."""
    if not is_in_worker():
        return 0
    from ray._private.worker import global_worker

    return int(global_worker.core_worker.get_current_task_attempt_number())


def task_id() -> str:
    """Return the id of this task, or of this actor's start; the same in each attempt."""
    import ray

    return str(ray.get_runtime_context().get_task_id())


def job_id() -> str:
    """Return the id of the driver's job on its cluster; the same in the driver and its workers."""
    import ray

    return str(ray.get_runtime_context().get_job_id())


def write_note(key: str, value: str) -> None:
    """Keep a value under a key until it is deleted."""
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(key.encode(), value.encode(), namespace=NAMESPACE)


def read_notes(prefix: str) -> dict[str, str]:
    """Return the notes whose keys begin with `prefix`."""
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_list

    keys = _internal_kv_list(prefix.encode(), namespace=NAMESPACE)
    found = {key.decode(): _internal_kv_get(key, namespace=NAMESPACE) for key in keys}
    return {key: value.decode() for key, value in found.items() if value is not None}


def delete_note(key: str) -> None:
    """Delete a note, if it is there."""
    from ray.experimental.internal_kv import _internal_kv_del

    _internal_kv_del(key.encode(), namespace=NAMESPACE)


def delete_notes() -> None:
    """Delete all notes of this driver's tasks."""
    if ATTEMPTS.is_there():
        from ray.experimental.internal_kv import _internal_kv_del

        _internal_kv_del(f"{job_id()}/".encode(), del_by_prefix=True, namespace=NAMESPACE)


def own_place() -> tuple[str, str]:
    """Return the ids of the node and of the worker process that run this task."""
    import ray

    context = ray.get_runtime_context()
    return str(context.get_node_id()), str(context.get_worker_id())


def living_nodes() -> dict[str, str]:
    """Return the names of the nodes that are alive, by id."""
    import ray

    return {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}


def ends_of(workers: Collection[str]) -> dict[str, str]:
    """Return Ray's explanation of how worker processes ended, by id; unknown ones are left out."""
    from ray._private.state import state
    from ray.core.generated.gcs_pb2 import WorkerTableData

    entries = map(WorkerTableData.FromString, state._connect_and_get_accessor().get_worker_table())
    ends = {entry.worker_address.worker_id.hex(): entry.exit_detail for entry in entries if not entry.is_alive}
    return {worker: ends[worker] for worker in workers if ends.get(worker)}
