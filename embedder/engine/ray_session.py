"""Ray, started for one run or attached to; bound to this machine, silent, with bounded retries and memory."""

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any

from embedder.engine import hardware
from embedder.engine.interrupts import held
from embedder.engine.resources import OBJECT_STORE_BYTES, Available
from embedder.errors import ConfigError
from shards.stderr import silent_stderr

TOKEN_FILE = Path("~/.ray/auth_token")
# What ends a run is raised, and told once: Ray would print its own stack of it, a hundred lines, beforehand.
LOG_LEVELS = {"ray.data": logging.ERROR, "ray.data.exceptions": logging.CRITICAL}


@contextmanager
def ray_session(
    address: str | None, no_progress_timeout_s: float, object_store_bytes: int = OBJECT_STORE_BYTES
) -> Iterator[Available]:
    """Make Ray ready, and say what it has.

    Args:
        address: cluster to attach to; none starts Ray on this machine, unless this process already runs one.
        no_progress_timeout_s: a dataset that finishes nothing for so long ends with an error.
        object_store_bytes: what may wait between the steps, in a Ray that is started here.
    """
    _set_environment(address)
    import ray

    mine = not ray.is_initialized()
    try:
        if mine:
            start_ray(address=address, object_store_bytes=object_store_bytes)
        with _data_context(no_progress_timeout_s):
            yield cluster()
    finally:
        if mine:
            with held("Ray has ended"):
                ray.shutdown()


def cluster() -> Available:
    """What the running Ray has, taken or not."""
    import ray

    total = ray.cluster_resources()
    return Available(num_cpus=total.get("CPU", 0.0), num_gpus=total.get("GPU", 0.0))


def start_ray(
    address: str | None = None,
    num_cpus: int | None = None,
    object_store_bytes: int = OBJECT_STORE_BYTES,
    num_gpus: int | None = None,
) -> None:
    """Attach to a cluster, or start Ray on this machine, with its dashboard and telemetry off.

    Args:
        address: of a cluster.
        num_cpus: of this machine; none takes those that this process may use.
        object_store_bytes: shared memory for what waits between the steps.
        num_gpus: to count on this machine; none counts those that its driver finds.

    Raises:
        ConfigError: no cluster answers at the address, or it wants another token.
    """
    _set_environment(address)
    import ray

    if address is None:
        # Where Ray was imported before the variable was set; `ray.init` refuses a loopback address by its argument.
        ray._private.ray_constants.ENABLE_RAY_CLUSTER = False
        place: dict[str, Any] = {
            "num_cpus": num_cpus or hardware.num_cpus(),
            "num_gpus": num_gpus,
            "include_dashboard": False,
            "object_store_memory": min(object_store_bytes, hardware.memory_bytes() // 4),
        }
    else:
        place = {"address": address}
    try:
        # A signal that broke off its native part would leave memory in disorder.
        with held("Ray has started"), silent_stderr(), _without_watchers():
            ray.init(**place, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise ConfigError(
            f"ray_address {address}: {error}; check that the cluster runs there, and that its token is in "
            f"{TOKEN_FILE} or RAY_AUTH_TOKEN"
        ) from None


@contextmanager
def _without_watchers() -> Iterator[None]:
    """Ray on this machine without three processes: for more nodes, for logs on a terminal, for questions by HTTP.

    Each takes half a second of CPU to start, 50 MB, and some CPU all the time; `ray.init` has no argument for them. Nor
    has it one for SIGTERM, which stays with who handled it before.
    """
    from ray._private import utils
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    init, start_api_server, take_sigterm = RayParams.__init__, Node.start_api_server, utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda _: None
    RayParams.__init__ = partialmethod(init, no_monitor=True, include_log_monitor=False)
    Node.start_api_server = lambda *_, **__: None
    try:
        yield
    finally:
        RayParams.__init__, Node.start_api_server, utils.set_sigterm_handler = init, start_api_server, take_sigterm


def _set_environment(address: str | None) -> None:
    """What Ray reads when it is imported; what the user has set stays."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray ends a task's process that idles for a second, and write tasks come every few: each would start one anew.
    os.environ.setdefault("RAY_idle_worker_killing_time_threshold_ms", "120000")
    # Ray's core calls each restartable actor of Ray Data an error on the terminal, and nobody can act on it.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    if address is None:
        # Ray listens on all networks of a machine unless it believes that no cluster can be made of it, as on a Mac.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    has_token = TOKEN_FILE.expanduser().exists() or {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    if address is not None and has_token and "ray" not in sys.modules:
        # Ray shows the user's token only to clusters that it starts itself, not to those that it attaches to.
        os.environ.setdefault("RAY_AUTH_MODE", "token")


@contextmanager
def _data_context(no_progress_timeout_s: float) -> Iterator[None]:
    """Settings of Ray Data that a run needs, for its duration."""
    from ray.data import DataContext

    from embedder.compat.actor_pool_scaling import SteadyPools
    from embedder.compat.scheduler_throttle import SchedulerThrottle
    from embedder.engine.draining import DrainOnStop, EndStagesOnFailure

    context = DataContext.get_current()
    settings = {
        "custom_execution_callback_classes": [
            *context.custom_execution_callback_classes,
            SchedulerThrottle,
            SteadyPools,
            DrainOnStop,
            EndStagesOnFailure,
        ],
        "execution_no_progress_timeout_s": no_progress_timeout_s,
        "max_errored_blocks": 0,  # a dropped block would lose items without a word
        "raise_original_map_exception": True,  # else what a step raises comes as text
        "enable_progress_bars": False,
        "print_on_execution_start": False,
    }
    before = {name: getattr(context, name) for name in settings}
    loggers = {logging.getLogger(name): level for name, level in LOG_LEVELS.items()}
    levels = {logger: logger.level for logger in loggers}
    _apply(context, settings)
    try:
        for logger, level in loggers.items():
            logger.setLevel(level)
        yield
    finally:
        _apply(context, before)
        for logger, level in levels.items():
            logger.setLevel(level)


def _apply(context: object, settings: Mapping[str, object]) -> None:
    for name, value in settings.items():
        setattr(context, name, value)
