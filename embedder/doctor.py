"""What is installed, what the machine has, and what a run would choose."""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from embedder.config import RunConfig
from embedder.run import machine
from embedder.run.resources import Available, allocate

PACKAGES = ("ray", "torch", "timm", "transformers", "pyarrow", "deltalake", "faiss-cpu", "pillow", "av", "obstore")


def examine(config: RunConfig) -> dict[str, Any]:
    """Look, and name what is missing rather than fail.

    Raises:
        ConfigError: the configuration asks for more than there is.
    """
    versions = {name: _version(name) for name in PACKAGES}
    num_gpus, gpu = _gpus()
    allocation = allocate(config, Available(machine.num_cpus(), num_gpus))
    stages = {
        f"stage {index} would take": f"{stage.num_cpus:g} CPU, {stage.num_gpus:g} GPU, {stage.num_threads} thread(s)"
        for index, stage in enumerate(allocation.stages)
    }
    return {
        "python": platform.python_version(),
        **versions,
        "cpus": machine.num_cpus(),
        "memory_gib": round(machine.memory_bytes() / 2**30, 1),
        "gpus": gpu,
        **stages,
        "a decode task would take": f"{allocation.decode_cpus:g} CPU",
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def _gpus() -> tuple[int, str]:
    """How many, and which; no torch, no GPU."""
    try:
        import torch
    except ImportError:
        return 0, "unknown: torch is missing"
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return len(names), ", ".join(names) or "none"
