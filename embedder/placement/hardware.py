"""CPUs, GPUs, memory and processes of this machine, as the operating system reports them; read when a run starts.

Linux has everything that is used here. For features that another system lacks there are fallbacks; `FEATURES` says what
is lost, and `embedder doctor` prints it.
"""

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
SHARED_MEMORY = "/dev/shm"
CPU_INFO = Path("/proc/cpuinfo")
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


def num_cpus() -> int:
    """Count the CPUs that this process may use: those it is pinned to, or fewer under a container's quota."""
    return max(1, int(cpu_limit()))


def cpu_limit() -> float:
    """Return the CPU seconds that this process's group may use per second; a container's quota may be below one."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(float(usable), *_cpu_quotas(), float("inf"))


def _cpu_quotas() -> list[float]:
    """Return the quotas of this process's control groups and their parents, in CPUs."""
    return [quota for quota in map(_cpu_quota, _own_groups("cpu")) if quota is not None]


def _own_groups(controller: str) -> list[Path]:
    """Return the folders of this process's control groups (version 1 and 2) and of their parents."""
    try:
        groups = [line.split(":", 2) for line in OWN_CGROUPS.read_text().splitlines()]
    except OSError:
        return []
    found = []
    for _, controllers, path in groups:
        if controller in controllers.split(",") or not controllers:
            for top in {CGROUPS / controllers, CGROUPS / controller if controllers else CGROUPS}:
                own = top / path.lstrip("/")
                # In a container the path may be the host's, and its own group is the root.
                found += [folder for folder in (own, *own.parents) if folder.is_relative_to(top)]
    return found


def _cpu_quota(group: Path) -> float | None:
    """Return the quota of one control group; None if it has none."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = " ".join((group / name).read_text() for name in names).split()
            return int(quota) / int(period) if quota not in {"max", "-1"} else None
        except (OSError, ValueError):
            continue
    return None


def has_bf16() -> bool:
    """Whether the CPU has instructions for bfloat16 matrix products; without them float32 is faster."""
    try:
        return has_bf16_instructions(CPU_INFO.read_text(encoding="utf-8"))
    except OSError:
        return False


def has_bf16_instructions(cpu_info: str) -> bool:
    """Look for them in Linux's description of the processor: AVX512-BF16 or AMX on x86, BF16 on ARM. Pure."""
    lines = (line.partition(":") for line in cpu_info.splitlines())
    return any(name.strip() in ("flags", "Features") and BF16_FLAGS & set(flags.split()) for name, _, flags in lines)


def num_gpus() -> int:
    """Count the NVIDIA GPUs that Ray would find here: those of the driver, or fewer by CUDA_VISIBLE_DEVICES."""
    driver, number = _driver()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if driver is None or visible is None:
        return number
    # CUDA ignores a negative number and all that follows it.
    ids = takewhile(lambda each: not each.strip().startswith("-"), visible.split(","))
    return 0 if visible in ("", "NoDevFiles") else min(number, len([*ids]))


def gpus() -> tuple[tuple[str, tuple[int, int] | None], ...]:
    """List name and compute capability (None if unknown) of the driver's GPUs, without torch.

    GPUs hidden by CUDA_VISIBLE_DEVICES are included, as it counts in another order.
    """
    driver, number = _driver()
    return tuple(_gpu(driver, index) for index in range(number)) if driver is not None else ()


def gpu_names() -> list[str]:
    """List the names of the driver's GPUs."""
    return [name for name, _ in gpus()]


def _gpu(driver: ctypes.CDLL, index: int) -> tuple[str, tuple[int, int] | None]:
    device, name, major, minor = ctypes.c_void_p(), ctypes.create_string_buffer(96), ctypes.c_int(), ctypes.c_int()
    if driver.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)):
        return "GPU", None
    has_name = not driver.nvmlDeviceGetName(device, name, ctypes.c_uint(len(name)))
    has_level = not driver.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor))
    return name.value.decode() if has_name else "GPU", (major.value, minor.value) if has_level else None


def _driver() -> tuple[ctypes.CDLL | None, int]:
    try:
        driver = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None, 0
    number = ctypes.c_uint()
    if driver.nvmlInit_v2() or driver.nvmlDeviceGetCount_v2(ctypes.byref(number)):
        return None, 0
    return driver, number.value


def memory_bytes() -> int:
    """Return the memory that this process may use, in bytes: the machine's, or less under a container's limit."""
    limits = [int(psutil.virtual_memory().total)]
    for group in _own_groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # "max" is no limit
                limits.append(int((group / name).read_text()))
    return min(limits)


def shared_memory_bytes() -> int:
    """Return the free bytes of the memory that processes share; a container's may have 64 MiB."""
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:  # not on Linux
        return memory_bytes()
    return found.f_bavail * found.f_frsize


def process_tree() -> list[psutil.Process]:
    """List this process and all its descendants."""
    here = psutil.Process()
    return [here, *here.children(recursive=True)]


def pss_bytes(processes: Iterable[psutil.Process]) -> int:
    """Sum the memory of several processes, each shared page counted once (proportional set size)."""
    total = 0
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it ended after it was listed
            found = process.memory_full_info()
            total += getattr(found, "pss", found.rss)
    return total


@dataclass(frozen=True)
class Feature:
    """Feature of the operating system that has a fallback; `loss` says what the fallback lacks."""

    name: str
    is_there: Callable[[], bool]
    loss: str


def _limits_memory() -> bool:
    """Whether a process may limit its own address space, tried in a child process."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 35, 1 << 35))"
    return not subprocess.run([sys.executable, "-S", "-c", limit], capture_output=True, check=False).returncode


FEATURES = (
    Feature(
        "limits of a process's memory",
        _limits_memory,
        "a picture or a user's step that wants all memory is not stopped by the sandbox",
    ),
    Feature(
        "files in memory (memfd)",
        lambda: hasattr(os, "memfd_create"),
        "decoded pictures come from the sandbox through nameless files in the temporary folder",
    ),
    Feature(
        "open files by number (/proc/self/fd)",
        Path("/proc/self/fd").exists,
        "files of an index, and files that a table names, are opened by their paths once more after they were checked",
    ),
    Feature(
        "control groups (/sys/fs/cgroup)",
        lambda: CGROUPS.exists() and OWN_CGROUPS.exists(),
        "CPUs are counted without regard to a container's quota",
    ),
    Feature(
        "shared pages of processes (PSS)",
        lambda: hasattr(psutil.Process().memory_full_info(), "pss"),
        "memory that processes share is counted in each of them",
    ),
)


def missing_features() -> dict[str, str]:
    """Return the features that this system lacks, and what is lost without each."""
    return {feature.name: feature.loss for feature in FEATURES if not feature.is_there()}
