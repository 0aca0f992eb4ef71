"""Ray Data's three helper actors, answered in the driver where Ray runs on this machine for only one run.

Each is a process that imports Ray Data, 1.1 s of CPU, and the first stage waits for them. They keep statistics for
Ray's dashboard, which is off; share a growing cluster out among datasets, of which there is one; and know the nodes of
a stage's replicas, of which there is one, too.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from uuid import uuid4

import ray

from embedder.compat.ray_start import replace_attribute
from shards.compat import Private

DATA = "ray.data._internal"
STATISTICS = f"{DATA}.stats:get_or_create_stats_actor"
SHARES = f"{DATA}.cluster_autoscaler.default_autoscaling_coordinator:get_or_create_autoscaling_coordinator"
LOCATION = "get_or_create_actor_location_tracker"
LOCATIONS = (
    f"{DATA}.execution.operators.actor_pool_map_operator:{LOCATION}",
    f"{DATA}.utils.cached_ray_internals:{LOCATION}",
)
HELPERS = Private(
    "Ray Data's start without its helper actors",
    (STATISTICS, f"{DATA}.cluster_autoscaler.default_autoscaling_coordinator:"
     "DefaultAutoscalingCoordinator.get_reserved_resources", SHARES, *LOCATIONS),
    "ray 2.60.0",
)  # fmt: skip


class Call:
    """Method of an actor that is a function of this process."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        self._answer = answer

    def remote(self, *arguments: Any, **named: Any) -> Any:
        """Call it, and return what `ray.get` takes; nothing where there is no answer, which nobody asks for."""
        answer = self._answer(*arguments, **named)
        return None if answer is None else ray.put(answer)


def _nothing(*_: Any, **__: Any) -> None:
    """Take what only the dashboard or a growing cluster would need."""


def _new_id() -> str:
    return uuid4().hex


def _all_resources(requester_id: str) -> dict[str, dict[str, float]]:
    """Reserve all that there is for the only dataset."""
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def _locate_here(logical_actor_ids: Sequence[str]) -> dict[str, str]:
    return dict.fromkeys(logical_actor_ids, ray.get_runtime_context().get_node_id())


class Helper:
    """Stands for a helper actor: its methods with an answer, by name; all others take anything and answer nothing."""

    def __init__(self, **answers: Callable[..., Any]) -> None:
        self._answers = answers

    def __getattr__(self, name: str) -> Call:
        """Return a method; names with underscores are Python's own."""
        if name.startswith("_"):
            raise AttributeError(name)
        return Call(self._answers.get(name, _nothing))


@contextmanager
def without_helpers() -> Iterator[None]:
    """Let the dataset in the block run without helper actors, on a Ray of one node that runs nothing else."""
    if not HELPERS.saves_time():
        yield
        return
    helpers = {
        STATISTICS: Helper(gen_dataset_id=_new_id),
        SHARES: Helper(get_reserved_resources=_all_resources),
        **dict.fromkeys(LOCATIONS, Helper(get_actor_locations=_locate_here)),
    }
    with ExitStack() as patches:
        for place, helper in helpers.items():
            module, _, name = place.partition(":")
            patches.enter_context(replace_attribute(import_module(module), name, lambda helper=helper: helper))
        yield
