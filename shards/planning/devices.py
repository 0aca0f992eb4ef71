"""Devices that stages may run on: a table of their speeds and sizes, and fleets of them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from shards.model_errors import ModelError
from shards.ranges import STRICT

GB = 10**9
GIB = 1 << 30
MAX_TYPES = 3

# Rows that a stage computes together, as far as a plan counts them; `embedder.placement.device_settings` has the rest.
CPU_ROWS, GPU_ROWS = 32, 256
GPU_CALLS = 3
"""Calls of a stage at once: while one computes, the others' inputs and outputs are copied."""


@dataclass(frozen=True)
class GpuFigures:
    """What a forward pass on a GPU costs besides its operations.

    `product_flops`, by dtype, are of very wide matrices; layers of `half_width` reach half. `launch_s` are host seconds
    per kernel, including the module around it; `kernel_s` those of a kernel that does almost nothing.
    """

    __pydantic_config__ = STRICT

    product_flops: Mapping[str, float] = field(hash=False)
    half_width: int
    memory_bytes_per_s: float
    launch_s: float
    kernel_s: float

    def layer_s(self, flops: float, values: int, width: int, dtype: str, *, num_inputs: int, num_kernels: int) -> float:
        """Return the seconds of a layer for one input of a batch: computing, or launching if that takes longer.

        `flops` and `values` (held at once; norms, additions and activations read and write them) are for one input.
        """
        product_s = flops / (self.product_flops[dtype] * width / (width + self.half_width))
        memory_s = PASSES * values * VALUE_BYTES[dtype] / self.memory_bytes_per_s
        computed_s = product_s + memory_s + num_kernels * self.kernel_s / num_inputs
        return max(computed_s, num_kernels * self.launch_s / num_inputs)


@dataclass(frozen=True)
class DeviceType:
    """One device: a GPU, or one CPU core; `name` is as in `--devices`.

    `flops` are achieved, not peak, by compute dtype; a missing dtype isn't supported. A core has its share of the
    machine's memory. Bandwidth is between host and device, for a core that of a copy. `price_per_h` is in any one
    currency. `gpu` is None where only `flops` are known, such as for a measured one.
    """

    __pydantic_config__ = STRICT

    name: str
    kind: Literal["cpu", "gpu"]
    flops: Mapping[str, float] = field(hash=False)
    memory_bytes: int
    bandwidth_bytes_per_s: float
    price_per_h: float | None = None
    gpu: GpuFigures | None = field(default=None, hash=False)

    def flops_in(self, dtype: str) -> float:
        """Return the operations per second in a compute dtype; raises a ModelError if the device doesn't support it."""
        if dtype not in self.flops:
            raise ModelError(
                f"device {self.name}: it doesn't compute in {dtype}; give --dtype {' or '.join(sorted(self.flops))}, "
                "or leave the device out"
            )
        return self.flops[dtype]


Fleet = tuple[tuple[float, DeviceType], ...]
"""Number and type of devices; CPU cores may be fractional, where a quota limits a node."""

# Share of a datasheet's dense peak that a transformer's matrix products reach. With tensor cores (half precision) 30 to
# 55 % are typical; without them (float32: torch uses no TF32 by default) more, as they need less bandwidth.
TENSOR_CORE_SHARE = 0.4
FLOAT32_SHARE = 0.6
# Share of the link's nominal rate that copies from and to pinned memory reach: 55 of 64 GB/s, on an H100.
LINK_SHARE = 0.86

# Shares of a datasheet's figures, fitted to forward passes of three towers at three batch sizes on an H100, where they
# are accurate within 15 % (`tests/shards/test_gpu_figures.py`); assumed for the others.
PRODUCT_SHARE, BANDWIDTH_SHARE, HALF_WIDTH = 0.8, 0.88, 500
KERNEL_S = 6e-6
# Host seconds for a kernel with its module, of which a layer of CLIP has 15 (`Tower.kernels_per_layer`). There are
# three figures for it, as what was measured on an H100's host differs by what a layer is given:
# - LAUNCH_S, of forward passes: 345 us a layer, fitted to the libraries' towers in long loops, with captions of one
#   length, which need no mask.
# - GROUP_LAUNCH_S, of one more group of captions, which have masks and are gathered and put back: 450 us a layer. A
#   shard took 660 and 690 us (31.7 ms for 4 groups of 12 layers, 57.9 for 7) when each group also waited for copies. If
#   345 or 690 is the truth, groups by 450 cost at most 9 % more than by the truth, and groups by 345 up to 25 %.
# - The simulated device (`scripts/gpu_simulation.py`) counts operations: 12 to 14 kernels of 31 us and 8 or 9 views of
#   8 us are 436 to 506 us a layer, fitted to those captions of the shard.
LAUNCH_S, GROUP_LAUNCH_S = 23e-6, 30e-6
PASSES = 3.5
"""How often a layer's kernels between two products read or write what it holds at once."""
VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 2}


def _gpu(
    name: str,
    half: float,
    single: float,
    memory_gb: int,
    link_gb: float,
    memory_gb_per_s: float,
    *,
    has_bf16: bool = True,
) -> DeviceType:
    """Make a table entry from a datasheet: dense tera-operations per second, GB, GB/s in one direction."""
    flops = {"float32": single * 1e12 * FLOAT32_SHARE, "float16": half * 1e12 * TENSOR_CORE_SHARE}
    flops["int8"] = flops["float16"]
    if has_bf16:
        flops["bfloat16"] = flops["float16"]
    products = dict.fromkeys(flops, half * 1e12 * PRODUCT_SHARE) | {"float32": single * 1e12 * PRODUCT_SHARE}
    figures = GpuFigures(products, HALF_WIDTH, memory_gb_per_s * GB * BANDWIDTH_SHARE, LAUNCH_S, KERNEL_S)
    return DeviceType(name, "gpu", flops, memory_gb * GB, link_gb * GB * LINK_SHARE, gpu=figures)


# Source: NVIDIA's datasheets of the SXM (V100, A100, H100, H200) and PCIe cards (T4, A10, L4, L40S); rates without
# sparsity. A CPU core: the rate measured for one AVX-512 core of a cloud server in this package's towers (float32);
# such servers have 4 GiB per core. float16 is not for CPUs: torch supports it at a quarter of float32's speed. int8
# counts no faster than the dtype that it replaces: its purpose is small weights.
CORE_FLOPS = 3e10
CORE_BF16 = {True: 2.0, False: 1 / 6}
"""Speed of bfloat16 relative to float32, with and without instructions for it: a core with AVX512-BF16 does a ViT-S in
half the time; one with only AVX2 does 0.9 images a second instead of 5.6 in float32.
"""
CORE_FLOAT16 = 1 / 4


def cpu_core(*, has_bf16: bool) -> DeviceType:
    """Make the entry of a CPU core, with or without bfloat16 products (AVX512-BF16, AMX, BF16 of ARM)."""
    flops = {"float32": CORE_FLOPS, "bfloat16": CORE_FLOPS * CORE_BF16[has_bf16], "int8": CORE_FLOPS}
    return DeviceType("CPU", "cpu", flops, 4 * GIB, 5e9)


DEVICES = {
    device.name: device
    for device in (
        _gpu("T4", 65, 8.1, 16, 16, 320, has_bf16=False),
        _gpu("V100", 125, 15.7, 16, 16, 900, has_bf16=False),
        _gpu("A10", 125, 31.2, 24, 32, 600),
        _gpu("L4", 121, 30.3, 24, 32, 300),
        _gpu("L40S", 362, 91.6, 48, 32, 864),
        _gpu("A100", 312, 19.5, 40, 32, 1555),
        _gpu("H100", 989, 67, 80, 64, 3350),
        _gpu("H200", 989, 67, 141, 64, 4800),
        cpu_core(has_bf16=False),  # of a CPU that was not inspected
    )
}

# Ray's names (ray.util.accelerators) of types that the table has under another name, or in only one of several sizes.
RAY_NAMES = {"A10G": ("A10", 24), "A100-40G": ("A100", 40), "A100-80G": ("A100", 80)}
# Ray's names of NVIDIA GPUs with a compute capability below 8.0, which lack native bfloat16.
OLDER_GPUS = frozenset({"K80", "P4", "P100", "V100", "T4"})


def knows_gpu(name: str) -> bool:
    """Whether it is known if this type of GPU supports bfloat16."""
    return name in OLDER_GPUS or RAY_NAMES.get(name, (name,))[0] in DEVICES


def with_slow_float16(device: DeviceType) -> DeviceType:
    """Let a CPU core compute in (slow) float16 next to GPUs that need it; GPUs stay unchanged."""
    if device.kind != "cpu":
        return device
    return replace(device, flops={**device.flops, "float16": device.flops["float32"] * CORE_FLOAT16})


def device_of_ray_type(name: str) -> DeviceType:
    """Return the table's entry of a GPU type under Ray's name; raises a ModelError if there is none."""
    table_name, memory_gb = RAY_NAMES.get(name, (name, None))
    device = DEVICES.get(table_name)
    if device is None or device.kind != "gpu":
        raise ModelError(
            f"device {name!r} is not in the table, so its costs can't be estimated; leave --estimate out, and they are "
            "measured"
        )
    return replace(device, name=name, memory_bytes=memory_gb * GB if memory_gb else device.memory_bytes)


_ENTRY = re.compile(
    r"(?P<num>\d+)\s*x\s*(?P<name>\w+)(:(?P<memory>\d+(\.\d+)?)\s*(?P<unit>[GM]i?B))?(@(?P<price>\d+(\.\d+)?))?"
)
_UNITS = {"GB": GB, "GiB": GIB, "MB": 10**6, "MiB": 1 << 20}


def parse_devices(text: str) -> Fleet:
    """Parse `2xA100:80GB, 4xT4:16GB@0.53, 8xCPU` (number, type, memory, hourly price), or raise a ModelError."""
    fleet = tuple(_parse_entry(entry.strip()) for entry in text.split(","))
    names = [device.name for _, device in fleet]
    if len(set(names)) < len(names):
        raise ModelError(f"devices {text!r}: {', '.join(names)}: a type is named twice; add the numbers up")
    if len(fleet) > MAX_TYPES:
        raise ModelError(f"devices {text!r}: {len(fleet)} types; a plan places stages on up to {MAX_TYPES}")
    return fleet


def _parse_entry(entry: str) -> tuple[int, DeviceType]:
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise ModelError(f"devices: {entry!r} is no entry; write NUMBERxNAME[:MEMORY][@PRICE], as in 2xA100:80GB@1.80")
    known = {name.lower(): device for name, device in DEVICES.items()}
    device = known.get(match["name"].lower())
    if device is None:
        raise ModelError(f"devices: {match['name']!r} is not in the table; take one of {', '.join(DEVICES)}")
    if int(match["num"]) < 1:
        raise ModelError(f"devices: {entry!r} has none of them; leave it out, or give a number from 1 up")
    if match["memory"]:
        memory_bytes = int(float(match["memory"]) * _UNITS[match["unit"]])
        if memory_bytes < 1:
            raise ModelError(f"devices: {entry!r} has no memory; leave it out, or give the memory of one device")
        name = f"{device.name}:{match['memory']}{match['unit']}"
        device = replace(device, name=name, memory_bytes=memory_bytes)
    if match["price"]:
        device = replace(device, price_per_h=float(match["price"]))
    return int(match["num"]), device
