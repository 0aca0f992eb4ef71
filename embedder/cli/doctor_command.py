"""`embedder doctor`: what is installed, what the machine has, what a run would choose, and what is weaker here."""

import platform
from typing import TYPE_CHECKING

from embedder.cli.options import ReadConfig, command
from embedder.cli.results import Result, new_table
from embedder.cli.store_access import describe_vectors
from embedder.installation import describe, installed_version, missing, unmet_requirements
from embedder.quantities import plural

if TYPE_CHECKING:
    from embedder.config import RunConfig
    from embedder.placement.allocation import Allocation

PACKAGES = (
    "ray", "torch", "timm", "transformers", "onnxruntime", "pyarrow", "deltalake", "faiss-cpu", "pillow", "pillow-heif",
    "pillow-jxl-plugin", "rawpy", "av", "obstore",
)  # fmt: skip


@command
def doctor(read: ReadConfig) -> Result:
    """Print versions, devices, memory, what would be chosen, and what is too old or missing; exit 1 for the latter."""
    config = read()

    from embedder.placement import hardware
    from embedder.placement.fleet import Available
    from embedder.placement.resources import allocate

    versions = {name: installed_version(name) or "missing" for name in PACKAGES}
    num_gpus, gpus = _gpus()
    allocation = allocate(config.compute, Available(hardware.num_cpus(), num_gpus))
    data = {
        "installation": describe(),
        **({"model": _model(config.main_model)} if config.main_model is not None else {}),
        **({"vectors of the store": vectors} if (vectors := describe_vectors(config)) is not None else {}),
        "images it reads": _image_formats(),
        "python": platform.python_version(),
        **versions,
        "cpus": hardware.num_cpus(),
        "memory_gib": round(hardware.memory_bytes() / 2**30, 1),
        "gpus": gpus,
        "dtype": _dtype(config),
        **_stages(allocation),
        "a decode task would take": f"{allocation.decode_cpus:g} CPU",
    }
    table = new_table("what", "found", rows=[(name, str(value)) for name, value in data.items()])
    unmet = [each.describe() for each in unmet_requirements()]
    weaker = {"problems": unmet, "fallbacks": _fallbacks()}
    lines = [
        line for name, found in weaker.items() for line in ("", f"{name}:", *(f"  {each}" for each in found)) if found
    ]
    failure = f"doctor: {plural(len(unmet), 'package')} missing or too old; the cures are above" if unmet else ""
    return Result(data | weaker, [table, *lines], failure)


def _stages(allocation: "Allocation") -> dict[str, str]:
    return {
        f"stage {index} would take": f"{stage.num_cpus:g} CPU, {stage.num_gpus:g} GPU, "
        f"{plural(stage.num_threads, 'thread')}, to compute on {stage.device}"
        for index, stage in enumerate(allocation.stages)
    }


def _fallbacks() -> list[str]:
    """Describe the library patches that are off (none if Ray and torch aren't installed), and what the system lacks."""
    from embedder.placement.hardware import missing_features

    lacking = [f"{name}: not on this system; {loss}" for name, loss in missing_features().items()]
    if missing("embed"):
        return lacking
    from embedder.compat import describe_fallbacks

    return [*describe_fallbacks(), *lacking]


def _image_formats() -> str:
    from importlib.util import find_spec

    from embedder.media.formats import EXTRA_FORMATS, IMAGE_FORMATS

    lacking = [each.name for each in EXTRA_FORMATS if find_spec(each.package) is None]
    names = [each.name for each in (*IMAGE_FORMATS, *EXTRA_FORMATS) if each.name not in lacking]
    need = f"; {', '.join(lacking)}: pip install 'embedder[formats]'" if lacking else ""
    return ", ".join(names) + need


def _model(uri: str) -> str:
    """Return the name of the configuration's model, and whether it is trained; downloads nothing."""
    from pathlib import Path

    from embedder.storage.model_download import resolve_model
    from shards.model_config import load_model_config
    from shards.model_errors import ModelError
    from shards.model_summary import untrained_reason

    if not Path(uri).expanduser().exists():
        return f"{uri}: not in a local folder, so it is not looked at"
    try:
        folder = resolve_model(uri)
        name, untrained = load_model_config(folder).name, untrained_reason(folder)
    except ModelError as error:
        return str(error)
    return f"{name}, trained" if untrained is None else f"{name}, untrained: {untrained}"


def _dtype(config: "RunConfig") -> str:
    from embedder.executors.find_gpus import gpus_here
    from embedder.placement import hardware
    from embedder.placement.compute_dtype import choose_dtype

    if config.dtype == "auto" and config.ray_address is not None:
        return "auto: by the GPUs of the cluster, when a run begins"
    cpu = "" if hardware.has_bf16() else "; on this CPU bfloat16 is slower than float32"
    return f"{choose_dtype(config.compute, gpus_here)}{cpu}"


def _gpus() -> tuple[int, str]:
    """Return the number of GPUs, and which of them torch can use: perhaps none of those that the driver reports."""
    from embedder.placement import hardware

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
