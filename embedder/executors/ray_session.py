"""A session of Ray, started for one run or attached to; bound to this machine, silent, with bounded memory."""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedder.compat import worker_options
from embedder.compat.ray_fleet import free_resources
from embedder.compat.ray_gcs import GPU_TYPE, gpu_types, refusal_of
from embedder.compat.ray_start import bind_to_loopback, light_start, messages_to_log, replace_attribute
from embedder.config_toml.run_sections import ClusterConfig
from embedder.errors import ConfigError
from embedder.executors.cluster_address import check_answer
from embedder.executors.head_watch import HeadWatch
from embedder.executors.interrupts import delay_signals
from embedder.placement import hardware
from embedder.placement.fleet import TOLERANCE, Available
from embedder.placement.placement import Node
from embedder.placement.resources import OBJECT_STORE_BYTES
from embedder.storage.user_cache import home_folder
from shards.compat import silent_stderr

if TYPE_CHECKING:
    from embedder.placement.preflight import Access

TYPE_LABEL = ClusterConfig().type_label
TOKEN_FILE = Path("~/.ray/auth_token")
# An error that ends a run is raised and reported once: Ray would first print its own stack, a hundred lines.
LOG_LEVELS = {"ray.data": logging.ERROR, "ray.data.exceptions": logging.CRITICAL}


@contextmanager
def ray_session(
    address: str | None,
    no_progress_timeout_s: float,
    object_store_bytes: int = OBJECT_STORE_BYTES,
    *,
    access: "Access | None" = None,
    ship_package: bool = True,
    before_exit: Callable[[str], None] = lambda reason: None,
) -> Iterator[Available]:
    """Make Ray ready, check the nodes of a cluster, and yield the resources that it has.

    Without an address, Ray starts on this machine, unless this process already runs one; it then gets
    `object_store_bytes` of shared memory for what waits between the steps. A dataset that finishes nothing for
    `no_progress_timeout_s` ends with an error. `access` is what the nodes must reach; `ship_package` allows sending
    this package to nodes that lack it. `before_exit` is called with the reason if the head is lost and no error can
    reach the caller. Raises `ConfigError` if no cluster answers at the address, or a node of it can't take part;
    `HeadLostError` if its head went away during the block.
    """
    _set_environment(address)
    import ray

    mine = not ray.is_initialized()
    watch = HeadWatch(address, before_exit) if address is not None else None
    with watch.watching() if watch else nullcontext():
        try:
            if mine:
                start_ray(address=address, object_store_bytes=object_store_bytes)
            with _data_context(no_progress_timeout_s):
                if address is not None:
                    _check_nodes(address, access, ship=ship_package, mine=mine)
                yield cluster()
        finally:
            if mine and (watch is None or watch.answers()):  # it would wait for a lost head
                with delay_signals("Ray has ended"):
                    ray.shutdown()


def _check_nodes(address: str, access: "Access | None", *, ship: bool, mine: bool) -> None:
    """Check all nodes of a cluster; if one needs this package, reattach with it, unless not attached here (`mine`)."""
    import ray

    from embedder.placement.preflight import check_cluster, shipped_modules

    def attach_again() -> None:
        with delay_signals("Ray has ended"):
            ray.shutdown()
        start_ray(address=address, modules=shipped_modules())

    check_cluster(address, ray_nodes(), access, ship=ship and mine, attach_again=attach_again)


def cluster(type_label: str = TYPE_LABEL) -> Available:
    """Return the resources of the running Ray, reserved or not; `type_label` names the type of a node's devices."""
    nodes = ray_nodes(type_label)
    return Available(sum(node.num_cpus for node in nodes), sum(node.num_gpus for node in nodes), nodes)


def ray_nodes(type_label: str = TYPE_LABEL, *, free_now: bool = False) -> tuple[Node, ...]:
    """Return the living nodes that have CPUs or GPUs; zeros for those that have nothing free.

    `free_now` leaves out what processes of this and other jobs hold. Ray says how much of a node's GPUs is free, not of
    which device; a device in use counts as fully used. `type_label` is the label with the type of a node's devices.
    """
    import ray

    free = free_resources() if free_now else None
    return tuple(
        as_node(each, each["Resources"] if free is None else free.get(each["NodeID"], {}), type_label)
        for each in ray.nodes()
        if each["Alive"] and (each["Resources"].get("CPU") or each["Resources"].get("GPU"))
    )


def as_node(entry: dict[str, Any], resources: dict[str, float], type_label: str = TYPE_LABEL) -> Node:
    """Read a node from an entry of `ray.nodes()`; `resources` are the amounts that may be taken."""
    types = [name.removeprefix(GPU_TYPE) for name in entry["Resources"] if name.startswith(GPU_TYPE)]
    labels: dict[str, str] = entry.get("Labels") or {}
    return Node(
        name=f"{entry['NodeManagerHostname']} {entry['NodeManagerAddress']}",
        num_cpus=resources.get("CPU", 0.0),
        num_gpus=int(resources.get("GPU", 0.0) + TOLERANCE),
        gpu_type=types[0] if types else None,
        device_type=labels.get(type_label) or (types[0] if types else None),
        memory_bytes=int(entry["Resources"].get("memory", 0.0)),
        labels=frozenset(labels.items()),
        node_id=entry["NodeID"],
        object_store_bytes=int(entry["Resources"].get("object_store_memory", 0.0)),
    )


def gpu_types_of(address: str) -> list[str | None] | None:
    """Ask a cluster for the types of its GPUs without attaching to it, see `embedder.compat.ray_gcs.gpu_types`."""
    _set_environment(address)
    return gpu_types(address)


def start_ray(
    address: str | None = None,
    num_cpus: int | None = None,
    object_store_bytes: int = OBJECT_STORE_BYTES,
    num_gpus: int | None = None,
    modules: Sequence[str] = (),
) -> None:
    """Attach to a cluster, or start Ray on this machine, with its dashboard and telemetry off.

    Without an address, Ray starts here with `object_store_bytes` of shared memory for what waits between the steps;
    None for `num_cpus` takes those that this process may use, for `num_gpus` those that the driver finds. `modules` are
    folders of packages to send to the nodes of a cluster. Raises `ConfigError` if no cluster answers at the address, it
    wants another token or version, or this is no node of it.
    """
    _set_environment(address)
    import ray

    messages_to_log()
    if address is None:
        bind_to_loopback()
    else:
        check_answer(address)
    place = {"address": address} if address else _ray_here(num_cpus, num_gpus, object_store_bytes)
    try:
        # A signal that interrupts its native part would leave memory corrupted.
        with delay_signals("Ray has started"), silent_stderr(), light_start():
            if address is not None and (refusal := refusal_of(address)):
                raise ConfigError(f"ray_address {address}: {refusal}")
            ray.init(**place, **worker_options(modules), log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        if address is None:
            raise
        cure = f"check that the cluster runs there, and that its token is in {TOKEN_FILE} or RAY_AUTH_TOKEN"
        raise ConfigError(f"ray_address {address}: {str(error).partition(chr(10))[0]}; {cure}") from None


def _ray_here(num_cpus: int | None, num_gpus: int | None, object_store_bytes: int) -> dict[str, Any]:
    return {
        "address": "local",  # not that of RAY_ADDRESS
        "num_cpus": num_cpus or hardware.num_cpus(),
        "num_gpus": num_gpus,
        "include_dashboard": False,
        "object_store_memory": min(object_store_bytes, _object_store_limit()),
    }


def _object_store_limit() -> int:
    """Return the most bytes that Ray takes: it refuses more than 10 GB that shared memory has no room for.

    What is less it puts on the disk. Source: Ray 2.60, `determine_plasma_store_config`.
    """
    shared = int(0.9 * hardware.shared_memory_bytes())
    return min(hardware.memory_bytes() // 4, max(OBJECT_STORE_BYTES, shared))


def _set_environment(address: str | None) -> None:
    """Set what Ray reads when it is imported; what the user has set stays."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray ends a task's process after an idle second, and write tasks come every few: each would start a new one.
    os.environ.setdefault("RAY_idle_worker_killing_time_threshold_ms", "120000")
    # Ray's core reports each restartable actor of Ray Data as an error on the terminal, which nobody can act on.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    if address is not None:  # it has answered already; Ray would try for minutes
        os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "1")
    else:
        # Ray listens on all networks unless it believes that the machine can't join a cluster, as on a Mac.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    token = home_folder() / TOKEN_FILE.relative_to("~")
    has_token = token.exists() or {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    if address is not None and has_token and "ray" not in sys.modules:
        # Ray sends the user's token only to clusters that it starts itself, not to those that it attaches to.
        os.environ.setdefault("RAY_AUTH_MODE", "token")


@contextmanager
def _data_context(no_progress_timeout_s: float) -> Iterator[None]:
    """Set Ray Data's options as a run needs them, for its duration."""
    from ray.data import DataContext

    from embedder.compat.execution_callbacks import select_callbacks
    from embedder.compat.ray_data import known_settings

    context = DataContext.get_current()
    callbacks = [*getattr(context, "custom_execution_callback_classes", []), *select_callbacks()]
    settings = {
        "custom_execution_callback_classes": callbacks,
        "execution_no_progress_timeout_s": no_progress_timeout_s,
        "max_errored_blocks": 0,  # a dropped block would silently lose items
        "raise_original_map_exception": True,  # else a step's exception arrives as text
        "enable_progress_bars": False,
        "print_on_execution_start": False,
    }
    with ExitStack() as changes:
        for name, value in known_settings(settings).items():
            changes.enter_context(replace_attribute(context, name, value))
        for name, level in LOG_LEVELS.items():
            logger = logging.getLogger(name)
            changes.callback(logger.setLevel, logger.level)
            logger.setLevel(level)
        yield
