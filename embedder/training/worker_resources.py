"""Resources that each training worker reserves, and whether all of them can start. Pure."""

from dataclasses import dataclass

from embedder.engine.resources import TOLERANCE, Available, decode_cpus
from embedder.errors import ConfigError
from embedder.training.config import TrainConfig


@dataclass(frozen=True)
class WorkerResources:
    """Requests of the workers and of one decode task.

    Workers start first and hold what they asked for, so a CPU must be left to decode with, or the run waits for ever.

    Attributes:
        num_workers: processes that train together.
        num_cpus: of each worker; a share to reserve, and no limit.
        num_gpus: of each worker.
        num_threads: torch threads of each worker.
        decode_cpus: of one decode task.
    """

    num_workers: int
    num_cpus: float
    num_gpus: float
    num_threads: int
    decode_cpus: float

    @property
    def device(self) -> str:
        """Torch device of a worker; Ray shows it only the GPU that it reserved."""
        return "cuda" if self.num_gpus > 0 else "cpu"


def allocate_workers(config: TrainConfig, available: Available) -> WorkerResources:
    """Share out the CPUs and GPUs, and refuse what could not run.

    Raises:
        ConfigError: there are too few; the message says what to change.
    """
    num_workers, decode = config.num_workers, decode_cpus(config.decode, available)
    is_on_gpus = config.device == "cuda" or (config.device == "auto" and available.num_gpus > 0)
    if is_on_gpus and available.num_gpus < num_workers:
        raise ConfigError(
            f"num_workers = {num_workers}: each takes one GPU, and there are {available.num_gpus:g}; "
            'lower num_workers, or write device = "cpu"'
        )
    share = (available.num_cpus - decode) / num_workers
    if share < TOLERANCE:
        raise ConfigError(
            f"num_workers = {num_workers}: one decode task takes {decode:g} CPUs of {available.num_cpus:g}, and the "
            "workers would wait for ever; lower decode.num_cpus"
        )
    num_threads = config.num_threads or max(1, int(share))
    return WorkerResources(num_workers, min(num_threads, share), 1.0 if is_on_gpus else 0.0, num_threads, decode)
