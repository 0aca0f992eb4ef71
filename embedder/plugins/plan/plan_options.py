"""Options of a plan, in addition to the run's configuration."""

from dataclasses import dataclass, field
from pathlib import Path

from shards.planning.planning_costs import DataMix


@dataclass(frozen=True)
class PlanOptions:
    """Options of `embedder.plan` and `embedder plan`.

    Attributes:
        mix: mean images and captions of an item.
        devices: a fleet, such as `2xA100:80GB, 8xCPU`; None means this machine.
        cluster: use the nodes of the Ray cluster, and measure on each type of them.
        estimate: estimate costs by operations and bandwidth, instead of measuring them.
        memory_cap_bytes: most memory of one replica.
        weights_cap_bytes: most weights of one replica.
        explain: compare with a cut into equal parts.
        num_items: items to answer what-if questions for.
        out: plan file that the command writes.
    """

    mix: DataMix = field(default_factory=DataMix)
    devices: str | None = None
    cluster: bool = False
    estimate: bool = False
    memory_cap_bytes: int | None = None
    weights_cap_bytes: int | None = None
    explain: bool = False
    num_items: int | None = None
    out: Path | None = None
