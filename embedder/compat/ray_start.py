"""Ray's start on this machine: bound to it, with SIGTERM left alone, and without processes that a run never needs.

Source: ray 2.60 `_private/parameter.py`, `_private/node.py`, `_private/utils.py`, `_private/services.py`,
`_private/worker.py`.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partialmethod
from typing import Any

from shards.compat import Tested, is_tested, saves_time

LOG = logging.getLogger(__name__)
TESTED: Tested = (("ray", "==2.60.*"),)


def bind_to_loopback() -> None:
    """Let Ray listen on this machine alone, also where it was imported before its environment variable was set.

    Needed for safety, so never switched off. Outside of the tested versions the variable alone does it, in a process
    that has not imported Ray before. `ray.init` refuses a loopback address by its argument.
    """
    consequence = "where Ray was imported first, it listens on all networks: set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0"
    if is_tested("Ray's binding to this machine", TESTED, consequence):
        import ray

        ray._private.ray_constants.ENABLE_RAY_CLUSTER = False


def messages_to_log() -> None:
    """Log what Ray tells of its cluster, as the loss of a node; it would print that on standard output.

    Needed where standard output is read by a program, so never switched off. Outside of the tested versions a report
    in JSON may stand between lines of Ray.
    """
    if is_tested("Ray's messages in the log", TESTED, "Ray may print lines on standard output"):
        from ray._private import worker

        worker.print_to_stdstream = _log_message


def _log_message(data: dict[str, Any], ignore_prefix: bool) -> None:
    """Log a message of Ray's as one line.

    Args:
        data: with its lines.
        ignore_prefix: whether Ray would name the process; a message of the cluster has none.
    """
    LOG.info("Ray: " + " ".join(" ".join(data["lines"]).split()))


@contextmanager
def light_start() -> Iterator[None]:
    """Start Ray in the block without the autoscaler's monitor, the log monitor and the API server.

    Each takes half a second of CPU to start, 50 MB, and some CPU all the time; `ray.init` has no argument for them. Nor
    has it one for SIGTERM, which stays with its former handler; this part is never switched off. Outside of the tested
    versions Ray handles SIGTERM during its start, and the caller must restore the handler after it.
    """
    with ExitStack() as patches:
        if is_tested("Ray's start with SIGTERM left alone", TESTED, "SIGTERM while Ray starts ends this process"):
            from ray._private import utils

            patches.enter_context(replaced(utils, "set_sigterm_handler", lambda _: None))
        if saves_time("Ray's start without its monitors", TESTED):
            from ray._private.node import Node
            from ray._private.parameter import RayParams

            init = partialmethod(RayParams.__init__, no_monitor=True, include_log_monitor=False)
            patches.enter_context(replaced(RayParams, "__init__", init))
            patches.enter_context(replaced(Node, "start_api_server", lambda *_, **__: None))
        yield


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Replace an attribute for the block.

    Args:
        owner: module, class or object.
        name: name of the attribute.
        value: its value in the block.
    """
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
