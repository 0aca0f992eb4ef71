"""A session of Ray, started for one run or attached to; bound to this machine, silent, with bounded memory."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from embedder.compat import worker_options
from embedder.compat.ray_start import bind_to_loopback, light_start, replaced
from embedder.engine import hardware
from embedder.engine.interrupts import held
from embedder.engine.resources import OBJECT_STORE_BYTES, Available
from embedder.errors import ConfigError
from shards.compat import silent_stderr

TOKEN_FILE = Path("~/.ray/auth_token")
# An error that ends a run is raised and reported once: Ray would print its own stack of it first, a hundred lines.
LOG_LEVELS = {"ray.data": logging.ERROR, "ray.data.exceptions": logging.CRITICAL}


@contextmanager
def ray_session(
    address: str | None, no_progress_timeout_s: float, object_store_bytes: int = OBJECT_STORE_BYTES
) -> Iterator[Available]:
    """Make Ray ready, and yield the resources that it has.

    Args:
        address: cluster to attach to; none starts Ray on this machine, unless this process already runs one.
        no_progress_timeout_s: seconds after which a dataset that finished nothing ends with an error.
        object_store_bytes: shared memory for what waits between the steps, in a Ray that is started here.
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
    """Return the resources of the running Ray, reserved or not."""
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
        address: address of a cluster; none starts Ray here.
        num_cpus: CPUs of this machine; none takes those that this process may use.
        object_store_bytes: shared memory for what waits between the steps.
        num_gpus: GPUs of this machine; none counts those that its driver finds.

    Raises:
        ConfigError: no cluster answers at the address, or it wants another token.
    """
    _set_environment(address)
    import ray

    if address is None:
        bind_to_loopback()
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
        with held("Ray has started"), silent_stderr(), light_start():
            ray.init(**place, **worker_options(), log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise ConfigError(
            f"ray_address {address}: {error}; check that the cluster runs there, and that its token is in "
            f"{TOKEN_FILE} or RAY_AUTH_TOKEN"
        ) from None


def _set_environment(address: str | None) -> None:
    """Set what Ray reads when it is imported; what the user has set stays."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray ends a task's process that idles for a second, and write tasks come every few: each would start a new one.
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

    from embedder.compat.draining import execution_callbacks

    context = DataContext.get_current()
    settings = {
        "custom_execution_callback_classes": [*context.custom_execution_callback_classes, *execution_callbacks()],
        "execution_no_progress_timeout_s": no_progress_timeout_s,
        "max_errored_blocks": 0,  # a dropped block would lose items without a word
        "raise_original_map_exception": True,  # else what a step raises comes as text
        "enable_progress_bars": False,
        "print_on_execution_start": False,
    }
    with ExitStack() as changes:
        for name, value in settings.items():
            changes.enter_context(replaced(context, name, value))
        for name, level in LOG_LEVELS.items():
            logger = logging.getLogger(name)
            changes.callback(logger.setLevel, logger.level)
            logger.setLevel(level)
        yield
