"""Patches and tuning of libraries, and nothing else that reaches behind their public interfaces.

For speed: skipped outside of the versions that they were tested with, and with `fast_start = false`.

    light_transformers                  transformers' questions about torch; garbage collection while it is imported
    malloc                              glibc's thresholds, through `mallopt`, which is public: no versions
    ray_start.light_start               no monitor, log monitor and API server beside Ray
    ray_callbacks.SchedulerThrottle     pauses in Ray Data's scheduling loop
    ray_callbacks.SteadyPools           Ray Data's autoscaler of actor pools
    shards.compat.deferred_compiler     no `torch._dynamo` while timm and transformers are imported

For correctness: skipped outside of the versions alone, each with a fallback that its docstring names.

    ray_start.bind_to_loopback          Ray listens on this machine alone
    ray_start.light_start               SIGTERM stays with its handler while Ray starts
    ray_callbacks.DrainOnStop           a stopped run keeps what is finished
    ray_callbacks.EndStagesOnFailure    a stage that hangs gives its CPUs back

The switch and the guard (`saves_time`, `is_tested`) are in `shards.compat`, as `shards` needs them too.
"""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from shards.compat import FAST_START_VARIABLE, fast_start, is_fast_start

if TYPE_CHECKING:
    from embedder.config import RunConfig

__all__ = ["FAST_START_VARIABLE", "fast_start", "with_fast_start", "worker_options"]

Function = TypeVar("Function", bound=Callable[..., Any])


def with_fast_start(function: Function) -> Function:
    """Let a function whose first argument is a run's configuration follow its `fast_start`; a decorator."""

    @wraps(function)
    def follow(config: "RunConfig", *args: Any, **options: Any) -> Any:
        with fast_start(config.fast_start):
            return function(config, *args, **options)

    return cast(Function, follow)


def worker_options() -> dict[str, Any]:
    """Return options of Ray actors that carry the switch of `fast_start` to their processes, on any node."""
    return {} if is_fast_start() else {"runtime_env": {"env_vars": {FAST_START_VARIABLE: "0"}}}
