"""All code that uses private interfaces of libraries, apart from `shards.compat`, and nothing else.

Each patch is a `shards.compat.Private`: its names, where they were seen, a probe that looks for them, and what is lost
without them, which is logged in one line. `tests/test_private_names.py` finds private names elsewhere.

For speed; also switched off by `fast_start = false`:

    light_imports                       transformers' questions about torch; garbage collection while it is imported;
                                        pandas, which Arrow imports with its first array
    malloc                              glibc's thresholds, through `mallopt`, which is public
    ray_start.light_start               Ray without monitor, log monitor and API server
    ray_helpers                         no helper actors of Ray Data on a Ray of the run's own
    ray_callbacks.LoopPace              pauses, waits and calls in flight of Ray Data's scheduling loop
    steady_pools                        Ray Data's autoscaler of actor pools
    ray_data.map_blocks                 blocks pass to stages on GPUs whole; fallback: joined and cut by rows
    shards.compat.deferred_compiler     no `torch._dynamo` while timm and transformers are imported

For what a run shows:

    operator_readings                   states of the operators, from Ray Data's scheduling loop
    ray_fleet                           draining nodes, and free resources of each, from Ray's global state

For correctness; without the names, the effect on the right is missing:

    ray_claim                           of two runs that start on a cluster, one waits
    ray_start.bind_to_loopback          Ray only listens on this machine
    ray_start.light_start               SIGTERM keeps its handler while Ray starts
    ray_start.messages_to_log           Ray's messages about its cluster aren't printed between a report's lines
    ray_gcs.refusal_of                  a wrong token, version or machine is reported before Ray attaches
    ray_callbacks.DrainOnStop           a stopped run keeps what is finished
    ray_callbacks.EndStagesOnFailure    a hanging stage releases its CPUs
    ray_attempts                        work that repeatedly kills its process ends the run

The switch and the probe are in `shards.compat`, as `shards` needs them too.
"""

import os
import pkgutil
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from shards import compat
from shards.compat import FAST_START_VARIABLE, Private, fast_start, is_fast_start

__all__ = ["FAST_START_VARIABLE", "STORE_TRACE_VARIABLE", "fast_start", "worker_options"]

STORE_TRACE_VARIABLE = "EMBEDDER_STORE_TRACE"
"""Names the file to which processes append their changes of stores (`embedder.store.trace`)."""

# Of the package: 20 MB that no worker needs, and that each node would get a copy of.
NOT_SENT = ["demo_data", "demo_model", "__pycache__"]


def worker_options(modules: Sequence[str] = ()) -> dict[str, Any]:
    """Return options of Ray actors that pass this project's environment variables to their processes, on any node.

    They are the switch of `fast_start` if it is off, and the file of a store's trace if there is one. `modules` are
    folders of packages that are sent along, without the demo's data.
    """
    variables = {} if is_fast_start() else {FAST_START_VARIABLE: "0"}
    if file := os.environ.get(STORE_TRACE_VARIABLE):
        variables[STORE_TRACE_VARIABLE] = str(Path(file).absolute())  # workers have other working directories
    environment: dict[str, Any] = {"env_vars": variables} if variables else {}
    if modules:
        environment |= {"py_modules": list(modules), "excludes": NOT_SENT}
    return {"runtime_env": environment} if environment else {}


def private_names() -> Iterator[tuple[str, Private]]:
    """Yield the private names of all patches, by `module.NAME`; imports Ray and the parts that are probed."""
    for module in (*(f"{__name__}.{each.name}" for each in pkgutil.iter_modules(__path__)), compat.__name__):
        try:
            found = vars(import_module(module))
        except ImportError:  # it imports what another one has probed, and the installed Ray lacks
            continue
        for name, value in found.items():
            if isinstance(value, Private):
                yield f"{module.rpartition('.')[2]}.{name}", value


def describe_fallbacks() -> list[str]:
    """Describe for each patch that is off what the installed library lacks, and what that costs."""
    return [text for _, private in private_names() if (text := private.describe_fallback()) is not None]
