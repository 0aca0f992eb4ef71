"""`embedder plan`: the cut of a model and the placement of its stages, from its config.json and the devices."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedder.compat import with_fast_start
from embedder.compat.malloc import keep_freed_memory
from embedder.config import RunConfig
from embedder.engine import hardware
from embedder.engine.job import rows_per_batch
from embedder.errors import ConfigError
from embedder.installation import require
from embedder.planning.options import PlanOptions
from embedder.storage.model_download import resolve_model
from shards.config import ModelConfig, load_model_config
from shards.plan import ShardPlan, plan_placement
from shards.planning.costs import STARTUP_S, HostCosts, ModelCosts, estimate_costs, estimate_host
from shards.planning.devices import DEVICES, DeviceType, Fleet, parse_devices
from shards.planning.explain import PlanComparison, compare_with_equal_parts
from shards.planning.problem import PlacementProblem, make_problem
from shards.planning.what_if import WhatIf, what_if

if TYPE_CHECKING:
    from embedder.planning.cluster_costs import ClusterCosts

DEFAULT_OPTIONS = PlanOptions()


@dataclass(frozen=True)
class Answer:
    """Plan, with the optional comparisons.

    Attributes:
        plan: the plan.
        problem: the placement problem that it solves.
        comparison: with equal parts of each tower; None without `explain`.
        what_if: hours and costs for a number of items; None without `num_items`.
        node_types: types of nodes of a cluster, each in a line.
    """

    plan: ShardPlan
    problem: PlacementProblem
    comparison: PlanComparison | None
    what_if: WhatIf | None
    node_types: tuple[str, ...] = ()


@with_fast_start
def plan(config: RunConfig, options: PlanOptions = DEFAULT_OPTIONS, **keywords: Any) -> Answer:
    """Plan the cut of the model and the placement of its stages.

    Args:
        config: the run; `model` must be set.
        options: see `PlanOptions`.
        keywords: fields of `PlanOptions`, over those of `options`: `devices="2xA100:80GB, 8xCPU"`.

    Raises:
        ConfigError: the configuration names no model, or the cluster can't be measured.
        shards.ModelError: the folder is no model folder, or no plan can run; the message names the nearest that can.
    """
    options = replace(options, **keywords)
    keep_freed_memory()  # the search goes over the same large arrays again and again
    folder = resolve_model(config.required_model)
    model_config = load_model_config(folder)
    caps = {"memory_cap_bytes": options.memory_cap_bytes, "weights_cap_bytes": options.weights_cap_bytes}
    cluster = _measured_cluster(config, folder, model_config, options) if options.cluster else None
    if cluster is not None:
        from embedder.planning.cluster_costs import problem_of_cluster

        problem, startup_s = problem_of_cluster(config, model_config, cluster, options.mix, **caps), STARTUP_S
    else:
        fleet, costs, host = _costs(config, folder, model_config, options)
        problem, startup_s = (
            make_problem(
                model_config,
                fleet,
                costs,
                host,
                mix=options.mix,
                dtype=config.dtype,
                rows_per_batch=rows_per_batch(config),
                **caps,
            ),
            host.startup_s,
        )
    placement = plan_placement(problem, config.num_stages, model_fingerprint=_fingerprint(folder, options))
    return Answer(
        placement,
        problem,
        compare_with_equal_parts(problem, config.num_stages) if options.explain else None,
        what_if(problem, config.num_stages, options.num_items, startup_s) if options.num_items else None,
        cluster.lines() if cluster is not None else (),
    )


def _measured_cluster(config: RunConfig, folder: Path, model: ModelConfig, options: PlanOptions) -> "ClusterCosts":
    """Types of nodes of the cluster and the costs on each.

    Raises:
        ConfigError: devices are named too, there are no weights to measure, or the cluster can't be measured.
    """
    if options.devices is not None:
        raise ConfigError("--cluster and --devices: give one of the two; --cluster takes the devices that are there")
    if not options.estimate and not _has_weights(folder):
        raise ConfigError(f"--cluster measures the model, and {folder} has no weights; give --estimate, or the weights")
    require("embed", "embedder plan --cluster")
    from embedder.planning.cluster_costs import costs_of_cluster

    return costs_of_cluster(config, model, estimate=options.estimate)


def _costs(
    config: RunConfig, folder: Path, model: ModelConfig, options: PlanOptions
) -> tuple[Fleet, dict[str, ModelCosts], HostCosts]:
    """Devices, and costs of the model on each: from the table, or on this machine."""
    if options.devices is not None:
        fleet = parse_devices(options.devices)
        costs = {device.name: estimate_costs(model, device, config.dtype) for _, device in fleet}
        return fleet, costs, estimate_host(model)
    core = _core_of_this_machine()
    fleet = ((hardware.num_cpus(), core),)
    if options.estimate or not _has_weights(folder):
        return fleet, {core.name: estimate_costs(model, core, config.dtype)}, estimate_host(model)
    require("embed", "embedder plan without --estimate, which measures the model")
    from embedder.engine.model_folder import open_model
    from embedder.planning.profile import measured_costs

    measured, host = measured_costs(_on_cores(config), open_model(str(folder)))
    return fleet, {core.name: measured}, host


def _on_cores(config: RunConfig) -> RunConfig:
    """Configuration with all stages on CPUs, for a plan without `--devices`."""
    stages = tuple(stage.model_copy(update={"device": "cpu"}) for stage in config.stage)
    return config.model_copy(update={"device": "cpu", "stage": stages})


def _core_of_this_machine() -> DeviceType:
    """One of this machine's cores, with its part of the memory."""
    core = DEVICES["CPU"]
    return DeviceType(
        core.name, "cpu", core.flops, hardware.memory_bytes() // hardware.num_cpus(), core.bandwidth_bytes_per_s
    )


def _fingerprint(folder: Path, options: PlanOptions) -> str | None:
    """Fingerprint of the weights, for a plan that is kept; None of a folder without weights."""
    if options.out is None or not _has_weights(folder):
        return None
    from shards.fingerprint import model_fingerprint

    return model_fingerprint(folder)


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))
