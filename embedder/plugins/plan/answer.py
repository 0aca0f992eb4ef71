"""`embedder plan`: the cut of a model and the placement of its stages, from its config.json and the devices."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedder.compat.malloc import keep_freed_memory
from embedder.config import ComputeSettings, RowSettings, RunConfig, with_fast_start
from embedder.errors import ConfigError
from embedder.executors.block_size import call_sizes
from embedder.installation import require
from embedder.placement import hardware
from embedder.placement.compile_choice import as_compiled
from embedder.placement.compute_dtype import DtypeChoice, choose_dtype, gpus_of_fleet
from embedder.placement.device_settings import rows_per_batch, settings_of_fleet
from embedder.plugins.plan.plan_options import PlanOptions
from embedder.storage.model_download import resolve_model
from shards.model_config import ModelConfig, load_model_config
from shards.plan import ShardPlan, place
from shards.planning.devices import Fleet, cpu_core, parse_devices, with_slow_float16
from shards.planning.explain import Alternative, PlanComparison, compare_with_equal_parts, find_num_stages
from shards.planning.planning_costs import STARTUP_S, DataMix, HostCosts, ModelCosts, estimate_costs, estimate_host
from shards.planning.problem import PlacementProblem, make_problem
from shards.planning.what_if import WhatIf, what_if

if TYPE_CHECKING:
    from embedder.plugins.plan.cluster_costs import ClusterCosts

DEFAULT_OPTIONS = PlanOptions()


@dataclass(frozen=True)
class PlanAnswer:
    """Plan, with the optional comparisons.

    `alternatives` have one stage fewer and one more. `fixed_by` is the key that fixes the number of stages, None if it
    was searched. `comparison` is with equal parts of each tower, None without `explain`; `what_if` is None without
    `num_items`. `dtype` says why it was chosen; `node_types` has one line each. `counts_compiled` says whether layers
    on GPUs count as compiled.
    """

    plan: ShardPlan
    problem: PlacementProblem
    alternatives: tuple[Alternative, ...]
    fixed_by: str | None
    comparison: PlanComparison | None
    what_if: WhatIf | None
    dtype: DtypeChoice
    node_types: tuple[str, ...] = ()
    counts_compiled: bool = False


@dataclass(frozen=True)
class _Setting:
    """Devices and costs of a plan; `problem` takes a number of stages, on which Ray's own share of an item depends."""

    problem: Callable[[int], PlacementProblem]
    startup_s: float
    dtype: DtypeChoice
    node_types: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Request:
    """Input of a plan: the model (address, folder, description) and the settings of a run."""

    uri: str
    folder: Path
    model: ModelConfig
    compute: ComputeSettings
    rows: RowSettings
    options: PlanOptions

    def in_dtype(self, dtype: DtypeChoice) -> "_Request":
        return replace(self, compute=dtype.apply_to(self.compute))

    def cut_into(self, num_stages: int) -> ComputeSettings:
        return replace(self.compute, num_stages=num_stages)

    def rows_per_batch(self, fleet: Fleet) -> int:
        return rows_per_batch(self.compute.batch_size, settings_of_fleet(fleet, self.model))

    @property
    def has_weights(self) -> bool:
        return any(self.folder.glob("*.safetensors"))

    @property
    def caps(self) -> dict[str, int | None]:
        return {
            "memory_cap_bytes": self.options.memory_cap_bytes,
            "weights_cap_bytes": self.options.weights_cap_bytes,
        }


@with_fast_start
def plan(config: RunConfig, options: PlanOptions = DEFAULT_OPTIONS, **keywords: Any) -> PlanAnswer:
    """Plan the cut of the model and the placement of its stages.

    The number of stages is that of `num_stages` or of the `[[stage]]` entries if the configuration has either.
    Otherwise it is searched: the fewest stages that no other number beats by more than the uncertainty of the costs.

    Args:
        config: the run; `model` must be set.
        options: see `PlanOptions`.
        keywords: fields of `PlanOptions` that override those of `options`: `devices="2xA100:80GB, 8xCPU"`.

    Raises:
        ConfigError: the configuration names no model, or the cluster can't be measured.
        shards.ModelError: the folder is no model folder, or no plan can run; the message names the nearest that can.
    """
    keep_freed_memory()  # the search reuses the same large arrays again and again
    uri, compute, options = config.required_model, config.compute, replace(options, **keywords)
    folder = resolve_model(uri)
    request = _Request(uri, folder, load_model_config(folder), compute, config.rows, options)
    setting = _setting(request)
    num_stages, problem = compute.num_stages, setting.problem(compute.num_stages)
    if compute.fixed_by is None and (found := find_num_stages(problem)) != num_stages:
        num_stages, problem = found, setting.problem(found)
    placed = place(problem, num_stages, model_fingerprint=_fingerprint(request))
    return PlanAnswer(
        placed.plan,
        problem,
        placed.alternatives,
        compute.fixed_by,
        compare_with_equal_parts(problem, num_stages) if options.explain else None,
        what_if(problem, num_stages, options.num_items, setting.startup_s) if options.num_items else None,
        setting.dtype,
        setting.node_types,
        any(as_compiled(pool.costs, compute, request.model) != pool.costs for pool in problem.pools),
    )


def _setting(request: _Request) -> _Setting:
    """Return devices and costs of a cluster, of the named devices, or of this machine."""
    model, options = request.model, request.options
    if options.cluster:
        cluster = _measured_cluster(request)
        from embedder.plugins.plan.cluster_costs import problem_of_cluster

        there = request.in_dtype(cluster.dtype)

        def on_cluster(num_stages: int) -> PlacementProblem:
            return problem_of_cluster(there.cut_into(num_stages), model, cluster, options.mix, **request.caps)

        return _Setting(on_cluster, STARTUP_S, cluster.dtype, cluster.lines())
    fleet = parse_devices(options.devices) if options.devices is not None else _cores_of_this_machine()
    dtype = choose_dtype(request.compute, lambda: gpus_of_fleet(device for _, device in fleet))
    here = request.in_dtype(dtype)
    if not dtype.was_asked and dtype.dtype == "float16":
        fleet = tuple((num, with_slow_float16(device)) for num, device in fleet)
    eager, host = _costs(here, fleet)
    costs = {name: as_compiled(each, here.compute, model) for name, each in eager.items()}

    def on_fleet(num_stages: int) -> PlacementProblem:
        return make_problem(
            model,
            fleet,
            costs,
            _with_engine(here.cut_into(num_stages), model, costs, host),
            mix=options.mix,
            dtype=dtype.dtype,
            rows_per_batch=here.rows_per_batch(fleet),
            calls=call_sizes(here.compute, model, settings_of_fleet(fleet, model)),
            **request.caps,
        )

    return _Setting(on_fleet, host.startup_s, dtype)


def _with_engine(
    compute: ComputeSettings, model: ModelConfig, costs: dict[str, ModelCosts], host: HostCosts
) -> HostCosts:
    """Add Ray's own share of an item for a number of stages, if costs were measured here."""
    if host.source != "measured":
        return host
    from embedder.planning.profile_machine import with_engine

    (measured,) = costs.values()
    return with_engine(compute, model, measured, host, DataMix())


def _measured_cluster(request: _Request) -> "ClusterCosts":
    """Return the cluster's node types and the costs on each; raises `ConfigError` if they can't be measured."""
    options = request.options
    if options.devices is not None:
        raise ConfigError("--cluster and --devices: give one of the two; --cluster takes the devices that are there")
    if not options.estimate and not request.has_weights:
        raise ConfigError(
            f"--cluster measures the model, and {request.folder} has no weights; give --estimate, or the weights"
        )
    require("embed", "embedder plan --cluster")
    from embedder.plugins.plan.cluster_costs import costs_of_cluster

    estimated_for = options.mix if options.estimate else None
    return costs_of_cluster(request.compute, request.rows, request.uri, request.model, estimated_for)


def _costs(request: _Request, fleet: Fleet) -> tuple[dict[str, ModelCosts], HostCosts]:
    """Return the model's costs on each device: from the table, or measured here if these are the machine's cores."""
    model, options = request.model, request.options
    if options.devices is not None or options.estimate or not request.has_weights:
        dtype, num_rows = request.compute.settled_dtype, request.rows_per_batch(fleet)
        estimated = (estimate_costs(model, each, dtype, options.mix.caption_tokens, num_rows) for _, each in fleet)
        return {each.device: each for each in estimated}, estimate_host(model)
    require("embed", "embedder plan without --estimate, which measures the model")
    from embedder.models.model_folder import open_model
    from embedder.planning.profile_machine import measured_costs

    measured, host = measured_costs(_on_cores(request.compute), request.rows, open_model(str(request.folder)))
    return {device.name: measured for _, device in fleet}, host


def _on_cores(compute: ComputeSettings) -> ComputeSettings:
    stages = tuple(stage.model_copy(update={"device": "cpu"}) for stage in compute.stage)
    return replace(compute, device="cpu", stage=stages)


def _cores_of_this_machine() -> Fleet:
    """Return this machine's cores as a fleet, each with its share of the memory."""
    num_cpus, core = hardware.num_cpus(), cpu_core(has_bf16=hardware.has_bf16())
    return ((num_cpus, replace(core, memory_bytes=hardware.memory_bytes() // num_cpus)),)


def _fingerprint(request: _Request) -> str | None:
    """Return the fingerprint of the weights for a plan that is saved; None for a folder without weights."""
    if request.options.out is None or not request.has_weights:
        return None
    from shards.fingerprint import model_fingerprint

    return model_fingerprint(request.folder)
