"""Options of a plan, in addition to the run's configuration."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from embedder.errors import ConfigError
from shards.planning.planning_costs import DataMix

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGTP]?)(i?)B?")
_POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}


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


def parse_size(option: str, text: str | None) -> int | None:
    """Parse `2GiB`, `500MB`, `200TB` as bytes; None for None. Raises `ConfigError` if it is no size."""
    if text is None:
        return None
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"{option} {text!r}: this is no size; write it as 2GiB, 500MB or 200TB")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** _POWERS[match[2]])


def items_in(num_items: int | None, data: str | None, item: str | None) -> int | None:
    """Return the number of items to plan for: as given, or bytes of all data (`200TB`) over the mean bytes of an item.

    Raises a ConfigError if both are given, or bytes without the size of an item.
    """
    if data is None:
        return num_items
    if num_items is not None:
        raise ConfigError("--num-items and --bytes: give one of the two")
    if item is None:
        raise ConfigError(f"--bytes {data}: how large is one item on average? Give --item-bytes, for example 150kB")
    data_bytes, item_bytes = parse_size("--bytes", data), parse_size("--item-bytes", item)
    return max(1, (data_bytes or 0) // (item_bytes or 1))
