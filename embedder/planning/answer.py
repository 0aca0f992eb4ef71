"""`embedder plan`: the cut of a model and the placement of its stages, from its config.json and the devices."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedder.compat import with_fast_start
from embedder.compat.malloc import keep_freed_memory
from embedder.config import RunConfig
from embedder.errors import ConfigError
from embedder.installation import require
from embedder.placement import hardware
from embedder.placement.compute_dtype import DtypeChoice, choose_dtype, gpus_of_fleet
from embedder.placement.device_settings import rows_per_batch, settings_of_fleet
from embedder.planning.options import PlanOptions
from embedder.storage.model_download import resolve_model
from shards.config import ModelConfig, load_model_config
from shards.plan import ShardPlan, place
from shards.planning.costs import STARTUP_S, DataMix, HostCosts, ModelCosts, estimate_costs, estimate_host
from shards.planning.devices import Fleet, cpu_core, parse_devices, with_slow_float16
from shards.planning.explain import Alternative, PlanComparison, compare_with_equal_parts, find_num_stages
from shards.planning.problem import PlacementProblem, make_problem
from shards.planning.what_if import WhatIf, what_if

if TYPE_CHECKING:
    from embedder.planning.cluster_costs import ClusterCosts

DEFAULT_OPTIONS = PlanOptions()


@dataclass(frozen=True)
class PlanAnswer:
    """Plan, with the optional comparisons.

    Attributes:
        plan: the plan.
        problem: the placement problem that it solves.
        alternatives: what one stage less and one more would bring.
        fixed_by: key of the configuration that fixes the number of stages; None where it was searched.
        comparison: with equal parts of each tower; None without `explain`.
        what_if: hours and costs for a number of items; None without `num_items`.
        dtype: compute dtype, and why it is this one.
        node_types: types of nodes of a cluster, each in a line.
    """

    plan: ShardPlan
    problem: PlacementProblem
    alternatives: tuple[Alternative, ...]
    fixed_by: str | None
    comparison: PlanComparison | None
    what_if: WhatIf | None
    dtype: DtypeChoice
    node_types: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Setting:
    """Devices and costs of a plan.

    Attributes:
        problem: states the placement problem for a number of stages, of which Ray's own share of an item depends.
        startup_s: seconds before the first item.
        dtype: compute dtype.
        node_types: types of nodes of a cluster, each in a line.
    """

    problem: Callable[[int], PlacementProblem]
    startup_s: float
    dtype: DtypeChoice
    node_types: tuple[str, ...] = ()


@with_fast_start
def plan(config: RunConfig, options: PlanOptions = DEFAULT_OPTIONS, **keywords: Any) -> PlanAnswer:
    """Plan the cut of the model and the placement of its stages.

    The number of stages is that of `num_stages` or of the `[[stage]]` entries where the configuration has either. Else
    it is searched: the fewest stages that no other number beats by more than costs are known.

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
    setting = _setting(config, folder, load_model_config(folder), options)
    num_stages, fixed_by, problem = config.num_stages, _fixed_by(config), setting.problem(config.num_stages)
    if fixed_by is None and (found := find_num_stages(problem)) != num_stages:
        num_stages, problem = found, setting.problem(found)
    placed = place(problem, num_stages, model_fingerprint=_fingerprint(folder, options))
    return PlanAnswer(
        placed.plan,
        problem,
        placed.alternatives,
        fixed_by,
        compare_with_equal_parts(problem, num_stages) if options.explain else None,
        what_if(problem, num_stages, options.num_items, setting.startup_s) if options.num_items else None,
        setting.dtype,
        setting.node_types,
    )


def _fixed_by(config: RunConfig) -> str | None:
    """Key that fixes the number of stages; None where the configuration leaves it open."""
    if config.stage:
        return "[[stage]]"
    return "num_stages" if "num_stages" in config.model_fields_set else None


def _setting(config: RunConfig, folder: Path, model: ModelConfig, options: PlanOptions) -> _Setting:
    """Devices and costs: of a cluster, of the devices named, or of this machine.

    Args:
        config: the run.
        folder: of the model.
        model: its description.
        options: of the plan.
    """
    caps = {"memory_cap_bytes": options.memory_cap_bytes, "weights_cap_bytes": options.weights_cap_bytes}
    if options.cluster:
        cluster = _measured_cluster(config, folder, model, options)
        from embedder.planning.cluster_costs import problem_of_cluster

        config = cluster.dtype.apply_to(config)

        def on_cluster(num_stages: int) -> PlacementProblem:
            return problem_of_cluster(_cut_into(config, num_stages), model, cluster, options.mix, **caps)

        return _Setting(on_cluster, STARTUP_S, cluster.dtype, cluster.lines())
    fleet = parse_devices(options.devices) if options.devices is not None else _cores_of_this_machine()
    dtype = choose_dtype(config, lambda: gpus_of_fleet(device for _, device in fleet))
    config = dtype.apply_to(config)
    if not dtype.was_asked and dtype.dtype == "float16":
        fleet = tuple((num, with_slow_float16(device)) for num, device in fleet)
    costs, host = _costs(config, folder, model, options, fleet)

    def on_fleet(num_stages: int) -> PlacementProblem:
        return make_problem(
            model,
            fleet,
            costs,
            _with_engine(_cut_into(config, num_stages), model, costs, host),
            mix=options.mix,
            dtype=config.compute_dtype,
            rows_per_batch=rows_per_batch(config, settings_of_fleet(fleet)),
            **caps,
        )

    return _Setting(on_fleet, host.startup_s, dtype)


def _cut_into(config: RunConfig, num_stages: int) -> RunConfig:
    return config.model_copy(update={"num_stages": num_stages})


def _with_engine(config: RunConfig, model: ModelConfig, costs: dict[str, ModelCosts], host: HostCosts) -> HostCosts:
    """Ray's own share of an item at the configuration's number of stages, where costs were measured here."""
    if host.source != "measured":
        return host
    from embedder.planning.profile import with_engine

    (measured,) = costs.values()
    return with_engine(config, model, measured, host, DataMix())


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
    config: RunConfig, folder: Path, model: ModelConfig, options: PlanOptions, fleet: Fleet
) -> tuple[dict[str, ModelCosts], HostCosts]:
    """Costs of the model on each device: from the table, or measured on this machine, whose cores the fleet is then.

    Args:
        config: the run.
        folder: of the model.
        model: its description.
        options: of the plan.
        fleet: the devices.
    """
    if options.devices is not None or options.estimate or not _has_weights(folder):
        costs = {device.name: estimate_costs(model, device, config.compute_dtype) for _, device in fleet}
        return costs, estimate_host(model)
    require("embed", "embedder plan without --estimate, which measures the model")
    from embedder.models.model_folder import open_model
    from embedder.planning.profile import measured_costs

    measured, host = measured_costs(_on_cores(config), open_model(str(folder)))
    return {device.name: measured for _, device in fleet}, host


def _on_cores(config: RunConfig) -> RunConfig:
    """Configuration with all stages on CPUs, for a plan without `--devices`."""
    stages = tuple(stage.model_copy(update={"device": "cpu"}) for stage in config.stage)
    return config.model_copy(update={"device": "cpu", "stage": stages})


def _cores_of_this_machine() -> Fleet:
    """This machine's cores, each with its part of the memory."""
    num_cpus, core = hardware.num_cpus(), cpu_core(has_bf16=hardware.has_bf16())
    return ((num_cpus, replace(core, memory_bytes=hardware.memory_bytes() // num_cpus)),)


def _fingerprint(folder: Path, options: PlanOptions) -> str | None:
    """Fingerprint of the weights, for a plan that is kept; None of a folder without weights."""
    if options.out is None or not _has_weights(folder):
        return None
    from shards.fingerprint import model_fingerprint

    return model_fingerprint(folder)


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))
