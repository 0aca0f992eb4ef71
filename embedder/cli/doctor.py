"""`embedder doctor`: what is installed, what the machine has, and what a run would choose."""

import platform
from importlib.metadata import PackageNotFoundError, version

from embedder.cli.options import ReadConfig, command
from embedder.cli.results import Result, new_table
from embedder.installation import describe

PACKAGES = (
    "ray",
    "torch",
    "timm",
    "transformers",
    "onnxruntime",
    "pyarrow",
    "deltalake",
    "faiss-cpu",
    "pillow",
    "av",
    "obstore",
)


@command
def doctor(read: ReadConfig) -> Result:
    """Print versions, devices, memory, and what would be chosen."""
    config = read()

    from embedder.engine import hardware
    from embedder.engine.fleet import Available
    from embedder.engine.resources import allocate

    versions = {name: _version(name) for name in PACKAGES}
    num_gpus, gpus = _gpus()
    allocation = allocate(config, Available(hardware.num_cpus(), num_gpus))
    stages = {
        f"stage {index} would take": f"{stage.num_cpus:g} CPU, {stage.num_gpus:g} GPU, {stage.num_threads} thread(s), "
        f"to compute on {stage.device}"
        for index, stage in enumerate(allocation.stages)
    }
    data = {
        "installation": describe(),
        "python": platform.python_version(),
        **versions,
        "cpus": hardware.num_cpus(),
        "memory_gib": round(hardware.memory_bytes() / 2**30, 1),
        "gpus": gpus,
        **stages,
        "a decode task would take": f"{allocation.decode_cpus:g} CPU",
    }
    return Result(data, [new_table("what", "found", rows=[(name, str(value)) for name, value in data.items()])])


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def _gpus() -> tuple[int, str]:
    """Number of GPUs, and which of them torch can use; it may find none of those that the driver counts for Ray."""
    from embedder.engine import hardware

    num_gpus = hardware.num_gpus()
    try:
        import torch

        from embedder.steps.stage import cuda_problem
    except ImportError:
        return num_gpus, f"{num_gpus or 'unknown'}: torch is missing"
    if num_gpus and (problem := cuda_problem()):
        return num_gpus, f'{num_gpus}, and torch can\'t use them ({problem}): fix the driver, or write device = "cpu"'
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return num_gpus or len(names), ", ".join(names) or "none"
