"""Placement problem (a model, its workload and devices), the load of a stage, and the throughput of a placement."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shards.costs import Dtype, cut_bytes, tensor_bytes, weight_bytes
from shards.model_config import ModelConfig
from shards.planning.devices import CPU_ROWS, GPU_CALLS, DeviceType, Fleet
from shards.planning.planning_costs import ENGINE_CALL_S, CallSizes, DataMix, HostCosts, ModelCosts
from shards.ranges import LayerRange
from shards.shard_specs import ShardSpec, specs_between
from shards.tensor_shapes import PARTS, held_dtype, model_shapes, part_of

# A GPU may be shared by 2, 4 or 8 replicas: power-of-two parts always fit together.
MAX_SHARES = 8

BOUNDLESS = 1 << 60  # bytes of a device whose memory is not limited

# A stage this busy is as much the bottleneck as the cores or the driver are.
NEARLY = 0.999
DRIVER = "Ray's driver"


@dataclass(frozen=True)
class Pool:
    """Devices of one type that stages may use.

    CPU cores are shared: each stage's replicas, decoding and writing together use as many core-seconds as they need.
    Other devices are exclusive: a replica has a whole one or a power-of-two part. Cores of different speeds form
    separate pools; a stage then uses only the cores of its own pool, and work outside the stages uses what is left of
    all.

    Attributes:
        num: number of devices; for cores possibly fractional, where a quota limits a node.
        costs: costs of one replica on one of them.
        num_threads: cores that a replica keeps busy, on CPUs.
        max_shares: the most replicas that may share one device.
        shared: whether these are the cores that everything on the host shares.
        core_speed: speed of its cores for work outside the stages, relative to a core that `num_cores` counts; None
            where there is one kind of cores, and a stage may use all of them.
        node_memory_bytes: memory of one node, the limit of a replica on cores; None for all memory of the pool.
    """

    num: float
    device: DeviceType
    costs: ModelCosts
    num_threads: int = 1
    max_shares: int = MAX_SHARES
    shared: bool = False
    core_speed: float | None = None
    node_memory_bytes: int | None = None

    @property
    def hides_copies(self) -> bool:
        """Whether copies and calls overlap with a replica's computing, as on a GPU."""
        return not (self.shared or self.costs.device.lower().startswith("cpu"))

    @property
    def has_own_cores(self) -> bool:
        """Whether its stages can use only its own cores."""
        return self.shared and self.core_speed is not None

    @property
    def memory_bytes(self) -> float:
        """Memory of all its devices."""
        return self.num * self.device.memory_bytes

    def to_counted_cores(self, cpu_seconds: float) -> float:
        """Convert seconds of its own cores to seconds of the cores that `num_cores` counts."""
        return cpu_seconds * (1.0 if self.core_speed is None else self.core_speed)


@dataclass(frozen=True)
class StageLoad:
    """Load of one replica of a stage: seconds and CPU seconds per item, and bytes of memory."""

    seconds: float
    cpu_seconds: float
    memory_bytes: int


@dataclass(frozen=True)
class PlacementProblem:
    """Model, workload, devices and limits; where several `pools` are shared, each has a `core_speed`.

    `host_seconds` are CPU seconds of an item outside the stages (decoding, writing, the engine), of which
    `decode_seconds` are for decoding and tokenising. `num_cores` are shared by the host's work and CPU stages, weighted
    by speed where speeds differ; None for no limit. The caps are of one replica; `rows_per_batch` items pass together.
    Without `calls`, Ray's driver is no limit.
    """

    config: ModelConfig
    dtype: Dtype
    mix: DataMix
    pools: tuple[Pool, ...]
    host_seconds: float = 0.0
    decode_seconds: float = 0.0
    num_cores: float | None = None
    memory_cap_bytes: int | None = None
    weights_cap_bytes: int | None = None
    rows_per_batch: int = CPU_ROWS
    calls: CallSizes | None = None

    def driver_rate(self, num_stages: int) -> float:
        """Return the items per second for which one thread, that of Ray's driver, can make all calls."""
        return float("inf") if self.calls is None else 1 / (ENGINE_CALL_S * self.calls.calls_per_item(num_stages))

    @cached_property
    def depths(self) -> tuple[int, int]:
        """Number of layers of the vision and the text tower."""
        return self.config.num_layers["vision"], self.config.num_layers["text"]

    @cached_property
    def cut_depths(self) -> tuple[int, int]:
        """Number of layers at which each tower can be cut by itself.

        One tower for both sides is cut only along its layers, and texts go with them: a layer is held by one stage.
        """
        return (self.depths[0], 0) if self.config.is_one_tower else self.depths

    def specs(self, cuts: Sequence[tuple[int, int]]) -> list[ShardSpec]:
        """Return the stages between consecutive cuts, counted as in `cut_depths`."""
        if not self.config.is_one_tower:
            return specs_between(cuts)
        return specs_between([(cut, self.config.shared_layers(LayerRange(0, cut)).stop) for cut, _ in cuts])

    @cached_property
    def shares(self) -> dict[str, tuple[float, ...]]:
        """Shares of the layers in the seconds of each side."""
        return {"vision": (), "text": ()} | {side: tower.layer_shares for side, tower in self.config.towers.items()}

    @cached_property
    def part_bytes(self) -> dict[str, int]:
        """Bytes of the loaded weights by part of the model."""
        sizes: dict[str, int] = dict.fromkeys(PARTS, 0)
        for name, shape in model_shapes(self.config).items():
            part = part_of(self.config, name)
            sizes[part] += tensor_bytes(shape, held_dtype(self.config, name, shape, self.dtype))
        return sizes

    def image_bytes(self, layer: int) -> float:
        """Return the bytes of an item's images after `layer` vision layers."""
        return self.mix.images_per_item * cut_bytes(self.config, "vision", layer, self.dtype, self.mix.caption_tokens)

    def caption_bytes(self, layer: int) -> float:
        """Return the bytes of an item's captions after `layer` text layers."""
        bytes_per_caption = cut_bytes(self.config, "text", layer, self.dtype, self.mix.caption_tokens)
        return self.mix.captions_per_item * bytes_per_caption

    @cached_property
    def bytes_at_cuts(self) -> tuple[list[float], list[float]]:
        """Bytes of an item at each cut of the vision and of the text tower, counted as in `cut_depths`."""
        images = [self.image_bytes(layer) for layer in range(self.depths[0] + 1)]
        if not self.config.is_one_tower:
            return images, [self.caption_bytes(layer) for layer in range(self.depths[1] + 1)]
        texts = [self.config.shared_layers(LayerRange(0, layer)).stop for layer in range(self.depths[0] + 1)]
        return [each + self.caption_bytes(text) for each, text in zip(images, texts, strict=True)], [0.0]

    def replica_cap_bytes(self, pool: Pool) -> int:
        """Return the most memory that one replica may take in a pool; on shared cores, the pool's memory."""
        own = pool.node_memory_bytes or int(pool.memory_bytes) if pool.shared else pool.device.memory_bytes
        return own if self.memory_cap_bytes is None else min(own, self.memory_cap_bytes)

    def towers_s(self, pool: Pool, spec: ShardSpec) -> float:
        """Return the seconds in which an item's images and captions are computed."""
        vision_s = pool.costs.vision.of(spec.vision, self.depths[0], self.shares["vision"])
        text_s = pool.costs.text.of(spec.text, self.depths[1], self.shares["text"])
        return self.mix.images_per_item * vision_s + self.mix.captions_per_item * text_s

    def load(self, pool: Pool, spec: ShardSpec) -> StageLoad:
        """Compute a stage's load on a pool: its layers, half of the transfers on both sides, and the call."""
        costs, mix = pool.costs, self.mix
        towers_s = self.towers_s(pool, spec)
        passing = sum(map(self.image_bytes, (spec.vision.start, spec.vision.stop)))
        passing += sum(map(self.caption_bytes, (spec.text.start, spec.text.stop)))
        host_s = passing * costs.send_s_per_byte / 2 + costs.call_s / self.rows_per_batch
        seconds = max(towers_s, host_s / GPU_CALLS) if pool.hides_copies else towers_s + host_s
        # A picture that is joined with its caption is computed with it; else one is computed after the other.
        workspace = (sum if self.config.preprocess.joins_captions else max)(
            (
                mix.images_per_item * costs.workspace_bytes_per_image * (len(spec.vision) > 0),
                mix.captions_per_item * costs.workspace_bytes_per_caption * (len(spec.text) > 0),
            )
        )
        memory = weight_bytes(self.config, spec, self.dtype) + self.rows_per_batch * (passing + workspace)
        cpu_s = seconds * pool.num_threads if pool.shared else host_s
        return StageLoad(seconds, cpu_s, round(memory))


def make_problem(
    config: ModelConfig,
    fleet: Fleet,
    costs: Mapping[str, ModelCosts],
    host: HostCosts,
    *,
    mix: DataMix,
    dtype: Dtype,
    memory_cap_bytes: int | None = None,
    weights_cap_bytes: int | None = None,
    rows_per_batch: int = CPU_ROWS,
    num_cores: float | None = None,
    calls: CallSizes | None = None,
) -> PlacementProblem:
    """Make a problem from a fleet and measured or estimated costs.

    CPUs in the fleet are the cores that everything shares; `num_cores` counts where the fleet has none. `costs` is by
    device name.
    """
    pools = tuple(
        Pool(num, device, costs[device.name].at_mix(mix, config), shared=device.kind == "cpu") for num, device in fleet
    )
    mix = mix.of_towers(config)
    cores = [pool.num for pool in pools if pool.shared]
    return PlacementProblem(
        config=config.at_patches(mix.image_patches),
        dtype=dtype,
        mix=mix,
        pools=pools,
        host_seconds=host.item_s(mix),
        decode_seconds=host.decode_s(mix),
        num_cores=sum(cores) if cores else num_cores,
        memory_cap_bytes=memory_cap_bytes,
        weights_cap_bytes=weights_cap_bytes,
        rows_per_batch=rows_per_batch,
        calls=calls,
    )


@dataclass(frozen=True)
class PlacedStage:
    """A stage on a pool: its layers, and its devices (a part of one, or whole ones; on CPUs, replicas)."""

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
    """Predicted throughput of a placement, the lowest of all limits.

    `bottleneck` is "stage 1", "decode", "shared cores", "cores of" a type of nodes, or "Ray's driver"; `loads` are of a
    replica of each stage; `cores_rate` is items per second of the shared cores, None if unlimited; `cpu_seconds` per
    item by consumer.
    """

    items_per_s: float
    bottleneck: str
    loads: tuple[StageLoad, ...]
    cores_rate: float | None
    cpu_seconds: dict[str, float]


def predict(problem: PlacementProblem, stages: Sequence[PlacedStage]) -> PlanPrediction:
    """Predict the throughput of given stages.

    The limits are the slowest stage, Ray's driver, and the shared cores over the CPU seconds of all that runs there.
    With cores of different speeds, seconds are those of the cores that `num_cores` counts.
    """
    loads = tuple(problem.load(stage.pool, stage.spec) for stage in stages)
    rates = _rates(problem, stages, loads)
    cpu_seconds = {
        f"stage {number}": stage.pool.to_counted_cores(load.cpu_seconds)
        for number, (stage, load) in enumerate(zip(stages, loads, strict=True))
    }
    cpu_seconds |= {"decode": problem.decode_seconds, "write and engine": problem.host_seconds - problem.decode_seconds}
    cores_rate, cpu_s = None, sum(cpu_seconds.values())
    if problem.num_cores is not None and cpu_s:
        cores_rate = problem.num_cores / cpu_s
    longest_first = sorted(range(len(loads)), key=lambda number: -loads[number].seconds)  # of those with one rate
    limits = {f"stage {number}": rates[number] for number in longest_first} | _own_cores_rates(stages, loads)
    driver_rate = problem.driver_rate(len(stages))
    items_per_s = min(*limits.values(), driver_rate, cores_rate if cores_rate is not None else float("inf"))
    is_driver = driver_rate * NEARLY <= items_per_s
    bottleneck = DRIVER if is_driver else _bottleneck(limits, cores_rate, cpu_seconds)
    return PlanPrediction(items_per_s, bottleneck, loads, cores_rate, cpu_seconds)


def _rates(problem: PlacementProblem, stages: Sequence[PlacedStage], loads: Sequence[StageLoad]) -> list[float]:
    """Return the items per second of each stage.

    Those on parts of GPUs have parts of their memory, and share their time.
    """
    found = []
    for stage, load in zip(stages, loads, strict=True):
        seconds, speed = load.seconds, stage.speed
        if _is_on_part(stage):
            sharing = [other for other in stages if _is_on_part(other) and other.pool is stage.pool]
            towers_s = [problem.towers_s(other.pool, other.spec) for other in sharing]
            seconds, speed = max(time_sliced_s(towers_s, [other.devices for other in sharing]), seconds), 1.0
        found.append(speed / seconds if seconds else float("inf"))
    return found


def time_sliced_s(seconds: Sequence[float], parts: Sequence[float]) -> float:
    """Return the seconds in which stages on parts of GPUs do an item: of the time each takes what it needs.

    `seconds` are of an item on a whole GPU, by stage, `parts` what all replicas of a stage have of GPUs.
    """
    return sum(seconds) / max(1.0, sum(parts))


def _is_on_part(stage: PlacedStage) -> bool:
    return stage.pool.hides_copies and stage.devices < 1


def _own_cores_rates(stages: Sequence[PlacedStage], loads: Sequence[StageLoad]) -> dict[str, float]:
    """Return the items per second that each pool with its own cores reaches with its stages."""
    used: dict[Pool, float] = {}
    for stage, load in zip(stages, loads, strict=True):
        if stage.pool.has_own_cores:
            used[stage.pool] = used.get(stage.pool, 0.0) + load.cpu_seconds
    return {f"cores of {pool.device.name}": pool.num / seconds for pool, seconds in used.items() if seconds}


def _bottleneck(limits: Mapping[str, float], cores_rate: float | None, cpu_seconds: dict[str, float]) -> str:
    slowest = min(limits, key=lambda name: limits[name])
    if cores_rate is None or limits[slowest] < cores_rate * NEARLY:
        return slowest
    return "decode" if cpu_seconds["decode"] > sum(cpu_seconds.values()) / 2 else "shared cores"
