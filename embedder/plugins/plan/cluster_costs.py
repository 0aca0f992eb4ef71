"""Costs of a model on each node type of a cluster, measured there by a task, and the resulting fleet.

Cached on the driver's machine by type name and the key of the measured machine.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from embedder.compat import worker_options
from embedder.config import ComputeSettings, RowSettings
from embedder.errors import USER_MISTAKES, ConfigError
from embedder.executors.block_size import call_sizes
from embedder.executors.job import preprocessing_of
from embedder.models.model_folder import Model, open_model
from embedder.placement import hardware
from embedder.placement.compile_choice import as_compiled
from embedder.placement.compute_dtype import DtypeChoice, Gpu, choose_dtype
from embedder.placement.device_settings import rows_per_batch, settings_of, settings_of_fleet
from embedder.placement.placement import Node
from embedder.planning.background_load import delivered_cores
from embedder.planning.profile_machine import group_costs_here, host_costs, machine_key, model_costs, with_engine
from embedder.planning.sample import sample_items
from embedder.plugins.plan.node_types import NodeHardware, NodeType, node_types
from embedder.quantities import duration_text, figure, plural
from embedder.storage.cost_cache import read_or_make
from shards.costs import Dtype, tower_costs
from shards.model_config import ModelConfig
from shards.planning.devices import DeviceType, cpu_core, device_of_ray_type, with_slow_float16
from shards.planning.planning_costs import DataMix, HostCosts, JsonText, ModelCosts, estimate_costs, estimate_host
from shards.planning.problem import PlacementProblem, make_problem
from shards.ranges import STRICT

LOG = logging.getLogger(__name__)
PROBE_S = 120.0  # for a process to start on every node and report its hardware
MEASURE_S = 900.0  # on one node, including fetching the model


@dataclass(frozen=True)
class TypeCosts(JsonText):
    """Costs on one node type.

    `costs` are those of the model in one replica, on a GPU or one core; `host` has the CPU seconds outside the stages
    without Ray's own; `memory_bytes` is that of a GPU, 0 without GPUs; `core_share` is the share of its cores' time
    that busy processes get, below 1 under a quota.
    """

    __pydantic_config__ = STRICT

    costs: ModelCosts
    host: HostCosts
    memory_bytes: int = 0
    core_share: float = 1.0


@dataclass(frozen=True)
class ClusterCosts:
    """Node types of a cluster, the costs on each by its name, and the dtype that they apply to."""

    types: tuple[NodeType, ...]
    costs: Mapping[str, TypeCosts]
    dtype: DtypeChoice

    def cores(self, each: NodeType) -> float:
        """Return the CPU seconds per second that all nodes of a type deliver."""
        return each.cores * self.costs[each.name].core_share

    def lines(self) -> tuple[str, ...]:
        """Describe each type in a few words."""
        return tuple(
            f"{each.name}: {plural(len(each.nodes), 'node')}, "
            f"{plural(each.num_gpus, 'GPU') + ', ' if each.num_gpus else ''}{figure(self.cores(each))} cores"
            for each in self.types
        )


def costs_of_cluster(
    compute: ComputeSettings, rows: RowSettings, uri: str, model: ModelConfig, estimated_for: DataMix | None
) -> ClusterCosts:
    """Attach to the cluster at `compute.ray_address`, list its node types, and measure once on each, unless cached.

    With `estimated_for`, costs for that mix come from the table of devices instead. Raises a ConfigError if nodes of
    different types carry no label, a type can't be measured, or a node doesn't answer; a shards.ModelError if a node
    finds no model folder, or a device to estimate is not in the table.
    """
    from embedder.executors.ray_session import ray_nodes, ray_session

    type_label = compute.cluster.type_label
    with ray_session(compute.ray_address, compute.no_progress_timeout_s):
        types = node_types(_ask_nodes(ray_nodes(type_label)), type_label)
        if compute.device == "cpu":
            types = tuple(each for each in types if not each.num_gpus) or types
        dtype = choose_dtype(compute, lambda: [Gpu(each.ray_type or each.name) for each in types if each.num_gpus])
        compute = dtype.apply_to(compute)
        if estimated_for is not None:
            costs = {each.name: _estimate(compute, model, each, dtype, estimated_for) for each in types}
            return ClusterCosts(types, costs, dtype)
        opened = open_model(uri)
        return ClusterCosts(types, {each.name: _kept_or_measured(compute, rows, opened, each) for each in types}, dtype)


def _estimate(
    compute: ComputeSettings, model: ModelConfig, each: NodeType, choice: DtypeChoice, mix: DataMix
) -> TypeCosts:
    if each.num_gpus:
        device = device_of_ray_type(each.ray_type or each.name)
    else:
        device = cpu_core(has_bf16=each.has_bf16)
        device = device if choice.was_asked else with_slow_float16(device)
    memory_bytes = device.memory_bytes if each.num_gpus else 0
    num_rows = rows_per_batch(compute.batch_size, settings_of_fleet(((1, device),), model))
    costs = estimate_costs(model, device, choice.dtype, mix.caption_tokens, num_rows)
    return TypeCosts(costs, estimate_host(model), memory_bytes)


def _ask_nodes(nodes: Sequence[Node]) -> list[NodeHardware]:
    """Query the hardware of all nodes at once; it takes no CPU of theirs."""
    asked = [_on_node(describe_machine, node.node_id, num_cpus=0) for node in nodes]
    found = []
    for node, answer in zip(nodes, asked, strict=True):
        cores, memory_bytes, machine, has_bf16 = _answer_of(answer, node.name, PROBE_S)
        found.append(NodeHardware(node, min(cores, node.num_cpus), memory_bytes, machine, has_bf16))
    return found


def describe_machine() -> tuple[float, int, dict[str, object], bool]:
    """Return CPU seconds per second, memory, key of measurements, and bfloat16 support; runs as a task on each node."""
    return hardware.cpu_limit(), hardware.memory_bytes(), machine_key(), hardware.has_bf16()


def _kept_or_measured(compute: ComputeSettings, rows: RowSettings, model: Model, each: NodeType) -> TypeCosts:
    """Return the costs on a type, cached or measured on its node with the most cores."""
    facts = max(each.nodes, key=lambda facts: (facts.cores, facts.node.num_gpus))
    key = {
        **facts.machine,
        "node_type": each.name,
        "gpu": each.ray_type,
        "cores": round(facts.cores, 1),
        "model": model.fingerprint,
        "preprocessing": preprocessing_of(rows, model),
        "dtype": compute.settled_dtype,
        "rows": (
            rows_per_batch(compute.batch_size),
            rows_per_batch(compute.batch_size, settings_of(["cuda"], model.config)),
            compute.rows_per_part,
        ),
    }
    return read_or_make(TypeCosts, key, lambda: _measure(compute, rows, model, each, facts))


def _measure(
    compute: ComputeSettings, rows: RowSettings, model: Model, each: NodeType, facts: NodeHardware
) -> TypeCosts:
    node = facts.node
    LOG.info(
        f"measuring on {each.name}: {node}; waits for what others hold there up to "
        f"cluster.wait_s = {compute.cluster.wait_s:g}"
    )
    takes: dict[str, Any] = {"num_gpus": 1} if each.num_gpus else {}
    answer = _on_node(
        measure_here,
        node.node_id,
        compute,
        rows,
        model.uri,
        facts.cores,
        bool(each.num_gpus),
        num_cpus=min(1.0, node.num_cpus),
        **takes,
    )
    return TypeCosts.from_json(_answer_of(answer, f"{each.name}, {node.name}", compute.cluster.wait_s + MEASURE_S))


def measure_here(compute: ComputeSettings, rows: RowSettings, uri: str, cores: float, has_gpu: bool) -> str:
    """Measure costs on this node, one replica on its GPU or on one thread; a task that returns JSON.

    `uri` must be readable from each node; `cores` are those that Ray's processes may use here, as Linux reports them.
    Raises a ConfigError if torch finds no GPU where Ray has one.
    """
    import torch

    from shards.profile import TimingSetting

    if has_gpu and not torch.cuda.is_available():
        raise ConfigError(
            "Ray lends a GPU there and torch finds none: check the driver and torch's build, or start the node with "
            "--num-gpus=0"
        )
    model = open_model(uri)
    device, dtype = "cuda" if has_gpu else "cpu", compute.settled_dtype
    num_rows = rows_per_batch(compute.batch_size, settings_of([device], model.config))
    groups = group_costs_here(model.config, device, dtype)
    setting = TimingSetting(dtype, device, 1, num_rows, group_costs=groups)
    costs = model_costs(rows, model, setting)
    host = host_costs(rows, model, sample_items(rows, model), compute.rows_per_part)
    memory_bytes = int(torch.cuda.mem_get_info()[1]) if has_gpu else 0
    return TypeCosts(costs, host, memory_bytes, min(1.0, delivered_cores(ceil(cores)) / cores)).to_json()


def _on_node(task: Callable[..., Any], node_id: str, *arguments: object, **takes: Any) -> Any:
    import ray

    options = {"label_selector": {"ray.io/node-id": node_id}, "max_retries": 1, **worker_options(), **takes}
    return ray.remote(task).options(**options).remote(*arguments)


def _answer_of(answer: Any, where: str, timeout_s: float) -> Any:
    """Wait for a task; raises `ConfigError` on time-out, on loss of the node, or for a user's mistake found there."""
    import ray
    from ray.exceptions import GetTimeoutError, RayError, RayTaskError

    try:
        return ray.get(answer, timeout=timeout_s)
    except GetTimeoutError:
        ray.cancel(answer, force=True)
        raise ConfigError(
            f"cluster: {where}: no answer in {duration_text(timeout_s)}; its CPUs or GPUs may be held by others: try "
            "again when they are free, or wait longer with --set cluster.wait_s=..."
        ) from None
    except RayTaskError as error:
        if isinstance(error.cause, USER_MISTAKES):
            raise ConfigError(f"cluster: {where}: {str(error.cause).partition(chr(10))[0]}") from None
        raise
    except RayError as error:
        raise ConfigError(f"cluster: {where} was lost while it was asked: {str(error).partition(chr(10))[0]}") from None


def problem_of_cluster(
    compute: ComputeSettings, model: ModelConfig, found: ClusterCosts, mix: DataMix, **caps: int | None
) -> PlacementProblem:
    """State the planner's problem for the cluster: one pool per node type, whose cores have their own speed.

    Stages on nodes with GPUs use only the GPUs; the cores there do the work outside the stages. `mix` holds means over
    the items, and `caps` are `memory_cap_bytes` and `weights_cap_bytes` of one replica.
    """
    usual = max(found.types, key=lambda each: (not each.num_gpus, found.cores(each)))
    usual_s = found.costs[usual.name].host.item_s(mix)
    speeds = {each.name: usual_s / found.costs[each.name].host.item_s(mix) for each in found.types}
    num_cores = sum(found.cores(each) * speeds[each.name] for each in found.types)
    costs = {each.name: as_compiled(found.costs[each.name].costs, compute, model) for each in found.types}
    host = with_engine(compute, model, costs[usual.name], found.costs[usual.name].host, mix, num_cores)
    fleet = tuple(
        (each.num_gpus or found.cores(each), _device(model, each, found, compute.settled_dtype)) for each in found.types
    )
    settings = settings_of_fleet(fleet, model)
    problem = make_problem(
        model,
        fleet,
        costs,
        host,
        mix=mix,
        dtype=compute.settled_dtype,
        rows_per_batch=rows_per_batch(compute.batch_size, settings),
        calls=call_sizes(compute, model, settings),
        **caps,
    )
    pools = tuple(
        replace(pool, core_speed=speeds[each.name], node_memory_bytes=None if each.num_gpus else each.node_memory_bytes)
        for pool, each in zip(problem.pools, found.types, strict=True)
    )
    return replace(problem, pools=pools, num_cores=num_cores)


def _device(model: ModelConfig, each: NodeType, found: ClusterCosts, dtype: Dtype) -> DeviceType:
    """Return a GPU or core of a type as measured: operations per second of its layers, memory, bandwidth."""
    costs, gpu_bytes = found.costs[each.name].costs, found.costs[each.name].memory_bytes
    side, seconds = ("vision", costs.vision.layer_s) if model.vision is not None else ("text", costs.text.layer_s)
    flops = {str(dtype): tower_costs(model, side, costs.caption_tokens).layer / seconds}
    memory_bytes = gpu_bytes or int(sum(facts.memory_bytes for facts in each.nodes) / found.cores(each))
    return DeviceType(each.name, "gpu" if each.num_gpus else "cpu", flops, memory_bytes, 1 / costs.send_s_per_byte)
