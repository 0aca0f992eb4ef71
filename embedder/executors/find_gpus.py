"""GPUs that a run's stages may compute on: of this machine, or of a cluster that is only queried, not attached to."""

import sys

from embedder.config import ComputeSettings
from embedder.placement import hardware
from embedder.placement.compute_dtype import UNKNOWN_GPU, Gpu, Gpus, gpus_of_nodes


def find_gpus(compute: ComputeSettings) -> Gpus:
    """Find the GPUs that a run may use; a cluster that may grow has at least one of unknown type.

    Returns None if the cluster doesn't say.
    """
    if not compute.may_use_gpus:
        return ()
    if compute.ray_address is None:
        return gpus_here()
    from embedder.executors.ray_session import gpu_types_of

    types = gpu_types_of(compute.ray_address)
    if types is None:
        return None
    return tuple(Gpu(each or UNKNOWN_GPU.name) for each in types) or (
        (UNKNOWN_GPU,) if compute.cluster.max_gpus else ()
    )


def gpus_here() -> tuple[Gpu, ...]:
    """List the GPUs of this machine, or of the Ray that this process already runs."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        from embedder.executors.ray_session import ray_nodes

        return gpus_of_nodes(ray_nodes())
    return tuple(Gpu(*each) for each in hardware.gpus()) if hardware.num_gpus() else ()
