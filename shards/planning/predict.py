"""What a placement is predicted to do, and what limits it: the same model as the search, one stage at a time. Pure."""

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
        """Replicas: one on a part of a device, else one a device."""
        return max(1, round(self.devices))

    @property
    def num_gpus(self) -> float:
        """Of each replica."""
        if self.pool.device.kind == "cpu":
            return 0.0
        return min(1.0, self.devices)

    @property
    def speed(self) -> float:
        """Seconds of work that its devices do a second."""
        return self.num_replicas if self.pool.device.kind == "cpu" else self.devices


@dataclass(frozen=True)
class PlanPrediction:
    """What a placement does.

    Attributes:
        items_per_s: throughput, the slowest of all that limits it.
        bottleneck: "stage 1", "decode" or "shared cores".
        loads: what one replica of each stage takes.
        cores_rate: items a second that the shared cores could do; none where nobody counts them.
        cpu_seconds: of an item, by who spends them.
    """

    items_per_s: float
    bottleneck: str
    loads: tuple[StageLoad, ...]
    cores_rate: float | None
    cpu_seconds: dict[str, float]


def predict(problem: PlacementProblem, stages: Sequence[PlacedStage]) -> PlanPrediction:
    """Predict the throughput of stages that are given.

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
