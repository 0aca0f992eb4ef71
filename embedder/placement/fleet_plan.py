"""Plan for a run that brings none, for the available GPUs: cuts, shares and replicas. Pure."""

import logging

from embedder.config import ComputeSettings
from embedder.models.model_folder import Model
from embedder.placement.device_settings import rows_per_batch, settings_of
from embedder.placement.fleet import Available
from shards.costs import Dtype
from shards.model_errors import ModelError
from shards.plan import ShardPlan, plan_placement
from shards.planning.devices import MAX_TYPES, DeviceType, device_of_ray_type
from shards.planning.planning_costs import DataMix, estimate_costs, estimate_host
from shards.planning.problem import BOUNDLESS, make_problem

LOG = logging.getLogger(__name__)
UNKNOWN = "A10"  # for GPUs whose type Ray doesn't know; among equal ones only relative costs count


def plan_for_fleet(compute: ComputeSettings, model: Model, plan: ShardPlan, available: Available) -> ShardPlan:
    """Cut the model for the GPUs of a fleet by estimated costs, and place its stages on all of them.

    With a single GPU, only CPUs, a plan file, stages with their own settings, or GPUs that are yet to come, whose types
    are unknown, the given plan is kept.
    """
    if compute.plan is not None or compute.stage or compute.device == "cpu" or available.num_devices < 2:
        return plan
    if available.can_grow and not any(node.num_gpus for node in available.nodes):
        return plan
    fleet, dtype = gpus_by_type(available, compute.settled_dtype), compute.settled_dtype
    num_rows = rows_per_batch(compute.batch_size, settings_of(["cuda"], model.config))
    try:
        problem = make_problem(
            model.config,
            fleet,
            {device.name: estimate_costs(model.config, device, dtype, num_rows=num_rows) for _, device in fleet},
            estimate_host(model.config),
            mix=DataMix(),
            dtype=dtype,
            rows_per_batch=num_rows,
            num_cores=available.num_cpus,
        )
        return plan_placement(problem, compute.num_stages, model_fingerprint=model.fingerprint)
    except ModelError as error:
        LOG.warning(f"no plan for the GPUs that are there, so each stage gets an even share of them: {error}")
        return plan


def gpus_by_type(available: Available, dtype: Dtype) -> tuple[tuple[int, DeviceType], ...]:
    """Count the GPUs of the most frequent types that support a dtype, up to the run's share."""
    numbers: dict[str | None, int] = {}
    for node in available.nodes:
        if node.num_gpus:
            numbers[node.device_type] = numbers.get(node.device_type, 0) + node.num_gpus
    total, left = sum(numbers.values()), available.num_devices
    found = []
    for name, number in sorted(numbers.items(), key=lambda item: -item[1])[:MAX_TYPES]:
        device = _device(name)
        share = min(left, max(1, round(number * available.num_devices / total)))
        if share and dtype in device.flops:
            found.append((share, device))
            left -= share
    return tuple(found)


def _device(name: str | None) -> DeviceType:
    """Return the table's entry of a type; for an unknown one, that of UNKNOWN without a memory limit."""
    try:
        return device_of_ray_type(name or "")
    except ModelError:
        known = device_of_ray_type(UNKNOWN)
        return DeviceType(name or "GPU", "gpu", known.flops, BOUNDLESS, known.bandwidth_bytes_per_s)
