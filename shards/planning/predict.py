"""Prediction of a placement's throughput and its limit: the same cost model as the solver, stage by stage. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from shards.planning.problem import PlacementProblem, Pool, StageLoad
from shards.ranges import ShardSpec

# A stage this busy is as much the bottleneck as the cores are.
NEARLY = 0.999


@dataclass(frozen=True)
class PlacedStage:
    """A stage on a pool: its layers, and the devices that it takes (a part of one, or whole ones; CPUs: replicas)."""

    spec: ShardSpec
    pool: Pool
    devices: float

    @property
    def num_replicas(self) -> int:
        """Number of replicas: one on a part of a device, else one per device."""
        return max(1, round(self.devices))

    @property
    def num_gpus(self) -> float:
        """GPUs of each replica, or the part of one."""
        if self.pool.device.kind == "cpu":
            return 0.0
        return min(1.0, self.devices)

    @property
    def speed(self) -> float:
        """Seconds of work that its devices do per second."""
        return self.num_replicas if self.pool.device.kind == "cpu" else self.devices


@dataclass(frozen=True)
class PlanPrediction:
    """Predicted throughput of a placement.

    Attributes:
        items_per_s: throughput, the lowest of all limits.
        bottleneck: "stage 1", "decode" or "shared cores".
        loads: load of one replica of each stage.
        cores_rate: items per second that the shared cores could do; None where they are unlimited.
        cpu_seconds: CPU seconds per item, by consumer.
    """

    items_per_s: float
    bottleneck: str
    loads: tuple[StageLoad, ...]
    cores_rate: float | None
    cpu_seconds: dict[str, float]


def predict(problem: PlacementProblem, stages: Sequence[PlacedStage]) -> PlanPrediction:
    """Predict the throughput of given stages.

    It's bounded by the slowest stage and, on shared cores, by the cores over the CPU seconds of all that runs there.
    """
    loads = tuple(problem.load(stage.pool, stage.spec) for stage in stages)
    rates = tuple(
        stage.speed / load.seconds if load.seconds else float("inf") for stage, load in zip(stages, loads, strict=True)
    )
    cpu_seconds = {f"stage {number}": load.cpu_seconds for number, load in enumerate(loads)}
    cpu_seconds |= {"decode": problem.decode_seconds, "write and engine": problem.host_seconds - problem.decode_seconds}
    cores_rate = None
    if problem.num_cores is not None:
        cores_rate = problem.num_cores / sum(cpu_seconds.values())
    items_per_s = min(*rates, cores_rate if cores_rate is not None else float("inf"))
    return PlanPrediction(items_per_s, _bottleneck(rates, cores_rate, cpu_seconds), loads, cores_rate, cpu_seconds)


def _bottleneck(rates: Sequence[float], cores_rate: float | None, cpu_seconds: dict[str, float]) -> str:
    slowest = min(rates)
    if cores_rate is None or slowest < cores_rate * NEARLY:
        return f"stage {rates.index(slowest)}"
    return "decode" if cpu_seconds["decode"] > sum(cpu_seconds.values()) / 2 else "shared cores"
