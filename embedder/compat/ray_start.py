"""Ray's start on this machine: bound to it, with SIGTERM left alone, and without processes that a run never needs."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partialmethod
from typing import Any

from shards.compat import Private

LOG = logging.getLogger(__name__)
SEEN_IN = "ray 2.52.1 to 2.60.0"
LOOPBACK = Private(
    "Ray's binding to this machine",
    ("ray._private.ray_constants:ENABLE_RAY_CLUSTER",),
    SEEN_IN,
    "where Ray was imported first, it listens on all networks: set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0",
)
MESSAGES = Private(
    "Ray's messages in the log",
    ("ray._private.worker:print_to_stdstream(data, ignore_prefix)",),
    SEEN_IN,
    "Ray may print lines on standard output",
)
SIGTERM = Private(
    "Ray's start with SIGTERM left alone",
    ("ray._private.utils:set_sigterm_handler",),
    SEEN_IN,
    "SIGTERM while Ray starts ends this process",
)
MONITORS = Private(
    "Ray's start without its monitors",
    (
        "ray._private.parameter:RayParams.__init__(no_monitor, include_log_monitor)",
        "ray._private.node:Node.start_api_server",
    ),
    SEEN_IN,
)


def bind_to_loopback() -> None:
    """Let Ray listen only on this machine, even if it was imported before its environment variable was set.

    Needed for safety, so never switched off. Without the private name, the variable has the same effect in a process
    that has not imported Ray before. `ray.init` refuses a loopback address as its argument.
    """
    if LOOPBACK.is_there():
        import ray

        ray._private.ray_constants.ENABLE_RAY_CLUSTER = False


def messages_to_log() -> None:
    """Log Ray's messages about its cluster, such as the loss of a node, which it would print on standard output.

    Never switched off, because programs may read standard output.
    """
    if MESSAGES.is_there():
        from ray._private import worker

        worker.print_to_stdstream = _log_message


def _log_message(data: dict[str, Any], ignore_prefix: bool) -> None:
    """Log a message of Ray's as one line; replaces Ray's own function, hence the unused `ignore_prefix`."""
    LOG.info("Ray: " + " ".join(" ".join(data["lines"]).split()))


@contextmanager
def light_start() -> Iterator[None]:
    """Start Ray in the block without the autoscaler's monitor, the log monitor and the API server.

    Each takes half a second of CPU to start, 50 MB, and some CPU all the time; `ray.init` has no argument for them. Nor
    has it one for SIGTERM, which keeps its former handler; this part is never switched off.
    """
    with ExitStack() as patches:
        if SIGTERM.is_there():
            from ray._private import utils

            patches.enter_context(replace_attribute(utils, "set_sigterm_handler", lambda _: None))
        if MONITORS.saves_time():
            from ray._private.node import Node
            from ray._private.parameter import RayParams

            init = partialmethod(RayParams.__init__, no_monitor=True, include_log_monitor=False)
            patches.enter_context(replace_attribute(RayParams, "__init__", init))
            patches.enter_context(replace_attribute(Node, "start_api_server", lambda *_, **__: None))
        yield


@contextmanager
def replace_attribute(owner: object, name: str, value: object) -> Iterator[None]:
    """Replace an attribute inside the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
