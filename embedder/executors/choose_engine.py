"""Choice of the faster engine for a job: Ray, or this one process. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

from embedder.config import ComputeSettings
from embedder.placement.device_settings import gpu_type
from embedder.quantities import duration_text, plural
from shards.plan import ShardPlan
from shards.planning.devices import cpu_core, with_slow_float16
from shards.planning.planning_costs import IMAGE_DECODE_S, STARTUP_S, JsonText

SMALL_GPU = "T4"
"""Assumed for GPUs with unknown names."""
RAY_FACTOR = 1.1  # overhead of Ray


LOCAL_STARTUP_S = 5.0
"""Imports, weights and the first batch of the shipped model in one process, on two cores: 4.5 to 8 s."""
PLACES = {"local": "in one process", "ray": "on Ray"}
MEASURED: Mapping[str, "RunTimes"] = {}


@dataclass(frozen=True)
class RunTimes(JsonText):
    """Times of earlier runs of a model on this machine, by one engine.

    `startup_s` is the seconds from the command to the first call of a step, `items_per_s` the rate from then on,
    measured with `num_items`; `publish_s` the seconds from the last item to the end, for tables and index.
    """

    text_kind: ClassVar[str] = "times of runs"

    startup_s: float
    items_per_s: float
    num_items: int
    publish_s: float

    def seconds(self, num_items: int) -> float:
        """Estimate the time of a run."""
        return self.startup_s + num_items / self.items_per_s + self.publish_s


@dataclass(frozen=True)
class EngineChoice:
    """Engine, and the reason for it."""

    engine: str
    reason: str


def choose_engine(
    compute: ComputeSettings,
    plan: ShardPlan,
    num_items: int,
    num_cpus: int,
    num_gpus: int = 0,
    *,
    gpus: Collection[str] = (),
    has_bf16: bool = False,
    measured: Mapping[str, RunTimes] = MEASURED,
) -> EngineChoice:
    """Follow the configuration; for `auto`, take the faster engine, including Ray's start.

    In one process all cores encode but only one decodes: many cores would wait for it, while Ray's tasks decode on all.
    Stages compute on GPUs only through Ray, which assigns them. Each item counts as one image with a caption. CPUs and
    GPUs are those of this machine; `gpus` are the names of their types, of which the slowest counts. `measured` has the
    times of earlier runs of this model here, by engine, which override estimates.
    """
    on_gpus = num_gpus if "auto" in compute.devices else 0
    if (settled := _required_engine(compute, plan, on_gpus)) is not None:
        return settled
    flops = sum(stage.flops_per_image + stage.flops_per_caption for stage in plan.stages)
    core = with_slow_float16(cpu_core(has_bf16=has_bf16))
    shared_s = (flops / core.flops_in(compute.settled_dtype) + IMAGE_DECODE_S) / num_cpus
    local_s = LOCAL_STARTUP_S + num_items * max(shared_s, IMAGE_DECODE_S)
    if on_gpus:
        shared_s = max(IMAGE_DECODE_S / num_cpus, flops / _slowest(compute.settled_dtype, gpus) / on_gpus)
    expected = {"local": local_s, "ray": STARTUP_S + num_items * shared_s * RAY_FACTOR}
    return _faster(
        expected | {name: each.seconds(num_items) for name, each in measured.items()}, num_items, on_gpus, measured
    )


def _faster(seconds: Mapping[str, float], num_items: int, on_gpus: int, measured: Collection[str]) -> EngineChoice:
    """Choose the engine that takes less time, and say what each would take."""
    gpus = f" with {plural(on_gpus, 'GPU')}" if on_gpus else ""
    reason = (
        f"{plural(num_items, 'item')} would take about {duration_text(round(seconds['local']))} in one process and "
        f"{duration_text(round(seconds['ray']))} on Ray{gpus}, each start included"
    )
    if measured:
        reason += f"; the time {' and '.join(PLACES[each] for each in sorted(measured))} is from earlier runs here"
    return EngineChoice("local" if seconds["local"] <= seconds["ray"] else "ray", reason)


def _slowest(dtype: str, gpus: Collection[str]) -> float:
    """Return the operations per second of the slowest of some types; in float32 if it doesn't support the dtype."""
    rates = [gpu_type(name).flops for name in gpus or (SMALL_GPU,)]
    return min(each.get(dtype, each["float32"]) for each in rates)


def _required_engine(compute: ComputeSettings, plan: ShardPlan, on_gpus: int) -> EngineChoice | None:
    """Return the engine that something names or needs; None if the faster one is taken."""
    if compute.engine != "auto":
        return EngineChoice(compute.engine, "as configured")
    if compute.ray_address is not None:
        return EngineChoice("ray", f"a cluster was given: {compute.ray_address}")
    needs = {
        "stages ask for GPUs or replicas": any(
            stage.num_gpus or (stage.replicas != "auto" and stage.replicas.max > 1) for stage in compute.stage
        ),
        'stages ask for device = "cuda"': "cuda" in compute.devices,
        "the plan places stages on GPUs": compute.devices != {"cpu"} and any(stage.num_gpus for stage in plan.stages),
        "float16 is for GPUs, which stages use through Ray": on_gpus > 0 and compute.dtype == "float16",
    }
    return next((EngineChoice("ray", reason) for reason, is_so in needs.items() if is_so), None)
