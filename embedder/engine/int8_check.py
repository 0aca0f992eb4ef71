"""Refusal of int8 where it doesn't help: measured on this machine's device, before a store is made or Ray is started.

On a cluster (`ray_address`) the stages' device isn't here, and nothing is refused; `embedder verify --dtype int8` on
one of its nodes measures there.
"""

from embedder.config import RunConfig
from embedder.engine import hardware
from embedder.engine.job import Model
from embedder.engine.resources import Available, requested
from embedder.errors import ConfigError


def stage_threads(config: RunConfig) -> int:
    """Return the torch threads of a stage on this machine."""
    return requested(config, Available(hardware.num_cpus())).stages[0].num_threads


def check_int8(config: RunConfig, model: Model) -> None:
    """Refuse int8 where it makes the model no faster or no smaller.

    Raises:
        ConfigError: it doesn't help; the message has the figures.
    """
    if config.dtype != "int8" or config.ray_address is not None:
        return
    import torch

    from shards.int8_benefit import measure_int8_benefit

    may_be_cuda = config.engine != "local" and config.devices != {"cpu"}
    device = "cuda" if may_be_cuda and torch.cuda.is_available() else "cpu"
    refusal = measure_int8_benefit(model.folder, device, num_threads=stage_threads(config)).refusal()
    if refusal is not None:
        raise ConfigError(f"dtype: {refusal}")
