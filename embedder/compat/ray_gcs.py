"""Queries to the head of a Ray cluster before this process attaches to it: token, version, node here, types of GPUs.

`ray.init` checks them too, but ends the process if there is no token, retries for minutes with a wrong one, and takes
a minute for a machine that is no node. Never switched off, because the user needs the message. Without the private
names nothing is queried, and `ray.init` answers in its own time and words.
"""

import time
from collections.abc import Callable, Collection
from typing import Any

from shards.compat import Private

GCS = (
    "ray._raylet:GcsClient",
    "ray._raylet:InnerGcsClient.get_all_node_info",
    "ray._private.authentication.authentication_token_setup:ensure_token_if_auth_enabled(create_token_if_missing)",
    "ray.exceptions:AuthenticationError",
)
REFUSALS = Private(
    "the check of a cluster's address",
    (
        *GCS,
        "ray._common.usage.usage_lib:get_cluster_metadata",
        "ray._private.services:find_node_ids",
        "ray._private.utils:check_version_info(cluster_metadata, this_process_address)",
        "ray._private.utils:compute_version_info",
    ),
    "ray 2.54.1 to 2.60.0",
    "a wrong token or version is reported late, after minutes, in Ray's words",
)
GPU_TYPES = Private(
    "the question for a cluster's GPUs",
    (*GCS, "ray.core.generated.gcs_pb2:GcsNodeInfo.ALIVE"),
    "ray 2.52.1 to 2.60.0",
    "a first run computes in float32, unless told otherwise",
)
TIMEOUT_S = 5.0
REGISTERED_S = 15.0  # a busy machine takes seconds from a node's first process to its place in the head's list
GPU_TYPE = "accelerator_type:"  # prefix of the resource by which Ray names the type of a node's GPUs


def _is_node(head: Any, find_local: Callable[[], Collection[str]]) -> bool:
    """Whether the cluster has a node here; one that has just been started may not be in the head's list yet."""
    deadline = time.monotonic() + REGISTERED_S
    while local := find_local():
        if not {node_id.hex() for node_id in head.get_all_node_info(timeout=TIMEOUT_S)}.isdisjoint(local):
            return True
        if time.monotonic() > deadline:
            break
        time.sleep(0.5)
    return False


def refusal_of(address: str) -> str | None:
    """Return why this process can't attach to the cluster at HOST:PORT (a gRPC server), and the fix; None if it can."""
    if not REFUSALS.is_there():
        return None
    from ray._common.usage.usage_lib import get_cluster_metadata
    from ray._private import services, utils
    from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
    from ray._raylet import GcsClient
    from ray.exceptions import AuthenticationError, RayError

    try:
        ensure_token_if_auth_enabled(create_token_if_missing=False)  # else its absence ends the process in C++
        head = GcsClient(address=address)
        metadata = get_cluster_metadata(head)
        is_node = _is_node(head, services.find_node_ids)
    except AuthenticationError:
        return (
            "the cluster wants another token, or one at all; copy the head's ~/.ray/auth_token here, or set "
            "RAY_AUTH_TOKEN, with RAY_AUTH_MODE=token"
        )
    except (RayError, RuntimeError, OSError) as error:
        return (
            f"the answer is not that of a cluster's head ({str(error).partition('.')[0][:200]}); give the port of "
            "`ray start --head`, which is 6379 unless it was given another"
        )
    if metadata:
        try:
            utils.check_version_info(metadata, address)
        except RuntimeError:
            here = " and Python ".join(utils.compute_version_info())
            return (
                f"the cluster runs Ray {metadata['ray_version']} and Python {metadata['python_version']}, this command "
                f"Ray {here}; the two must be the same: install the cluster's versions here"
            )
    if not is_node:
        return (
            f"this machine is no node of the cluster, and a pipeline is run by one; run the command on a node, or "
            f"`ray start --address={address}` here"
        )
    return None


def gpu_types(address: str) -> list[str | None] | None:
    """Return the GPU type of each node with GPUs of the cluster at HOST:PORT (a gRPC server), in Ray's terms.

    A type that Ray doesn't know is None; so is the whole result if the head doesn't answer.
    """
    if not GPU_TYPES.is_there():
        return None
    from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
    from ray._raylet import GcsClient
    from ray.core.generated.gcs_pb2 import GcsNodeInfo
    from ray.exceptions import RayError

    try:
        ensure_token_if_auth_enabled(create_token_if_missing=False)
        infos = GcsClient(address=address).get_all_node_info(timeout=TIMEOUT_S)
    except (RayError, RuntimeError, OSError):
        return None  # attaching will report the reason
    alive = [info.resources_total for info in infos.values() if info.state == GcsNodeInfo.ALIVE]
    return [
        next((name.removeprefix(GPU_TYPE) for name in resources if name.startswith(GPU_TYPE)), None)
        for resources in alive
        if resources.get("GPU", 0.0)
    ]
