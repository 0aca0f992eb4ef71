"""Speed of a device by a short trial: matrix products, its own memory, and copies from pinned memory; torch, no Ray."""

import time
from collections.abc import Callable

import torch

from shards.loading import activation_dtype
from shards.planning.planning_costs import DeviceSpeed

TRIAL_S = 0.15  # of each of the three
WIDTHS = (8192, 4096, 2048)  # of the products; the first whose three matrices take little of the free memory
MEMORY_SHARE = 8
COPY_BYTES = 64 << 20


def measure_speed(device: str, dtype: str, widths: tuple[int, ...] = WIDTHS) -> DeviceSpeed:
    """Measure a device for half a second; raises a RuntimeError if it lacks memory, or can't compute in the dtype."""
    values, width = activation_dtype(dtype), _fitting_width(device, dtype, widths)
    left, right, product = (torch.ones(width, width, dtype=values, device=device) for _ in range(3))
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, pin_memory=device != "cpu")
    here, there = (torch.empty(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    with torch.inference_mode():
        products_per_s = _calls_per_s(lambda: torch.mm(left, right, out=product), device)
        copies_per_s = _calls_per_s(lambda: there.copy_(here), device)
        uploads_per_s = _calls_per_s(lambda: here.copy_(source, non_blocking=True), device)
    return DeviceSpeed(
        product_flops=products_per_s * 2 * width**3,
        product_width=width,
        memory_bytes_per_s=copies_per_s * 2 * COPY_BYTES,
        link_bytes_per_s=uploads_per_s * COPY_BYTES,
    )


def _fitting_width(device: str, dtype: str, widths: tuple[int, ...]) -> int:
    if device == "cpu":
        return widths[-1]
    free_bytes = torch.cuda.mem_get_info(device)[0]
    taken_bytes = [3 * width**2 * activation_dtype(dtype).itemsize for width in widths]
    fitting = (width for width, taken in zip(widths, taken_bytes, strict=True) if MEMORY_SHARE * taken <= free_bytes)
    return next(fitting, widths[-1])


def _calls_per_s(call: Callable[[], object], device: str) -> float:
    """Measure with twice as many calls until they take long enough; the first one loads kernels."""
    number, seconds = 1, _seconds_of(call, 1, device)
    seconds = _seconds_of(call, 1, device)
    while seconds < TRIAL_S / 2:
        number *= 2
        seconds = _seconds_of(call, number, device)
    return number / seconds


def _seconds_of(call: Callable[[], object], number: int, device: str) -> float:
    started_s = time.perf_counter()
    for _ in range(number):
        call()
    if device != "cpu":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started_s
