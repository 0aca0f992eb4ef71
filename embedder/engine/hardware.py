"""CPUs, GPUs, memory and processes of this machine, as the operating system reports them; read when a run starts."""

import ctypes
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

CGROUP_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")


def num_cpus() -> int:
    """Count the CPUs that this process may use: those it is pinned to, or fewer by a container's quota."""
    pinned = len(os.sched_getaffinity(0))
    try:
        quota, period = CGROUP_CPU_LIMIT.read_text().split()
    except (OSError, ValueError):
        return pinned
    if quota == "max":
        return pinned
    return max(1, min(pinned, int(quota) // int(period)))


def num_gpus() -> int:
    """Count the NVIDIA GPUs that Ray would find here: those of the driver, or fewer by CUDA_VISIBLE_DEVICES."""
    try:
        driver = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    number = ctypes.c_uint()
    if driver.nvmlInit_v2() or driver.nvmlDeviceGetCount_v2(ctypes.byref(number)):
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return number.value
    return 0 if visible in ("", "NoDevFiles") else min(number.value, len(visible.split(",")))


def memory_bytes() -> int:
    """Return the memory of the machine in bytes."""
    return int(psutil.virtual_memory().total)


def process_tree() -> list[psutil.Process]:
    """List this process and all its descendants."""
    here = psutil.Process()
    return [here, *here.children(recursive=True)]


def pss_bytes(processes: Iterable[psutil.Process]) -> int:
    """Sum the memory of several processes, each shared page counted once (proportional set size)."""
    total = 0
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it ended after it was listed
            total += process.memory_full_info().pss
    return total
