"""One of several training workers: a replica of the trainer in its own process, with its share of the stream.

Each reserves its resources; what all of them need together is checked before anything starts.
`embedder.plugins.train.worker_group` starts them as Ray actors and calls their methods.
"""

import io
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pyarrow as pa
import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, and not in the list of exports

from embedder.errors import ConfigError
from embedder.placement.fleet import TOLERANCE, Available
from embedder.placement.resources import decode_cpus
from embedder.plugins.train.batches import ExampleCounts, Pair, make_batch, sampler_of
from embedder.plugins.train.rank_batches import take_share
from embedder.plugins.train.train_config import TrainConfig
from embedder.plugins.train.trainer.batch import TrainBatch
from embedder.plugins.train.trainer.group import ProcessGroup
from embedder.plugins.train.trainer.train_settings import DistillSettings
from embedder.plugins.train.trainer.trainer import StepMetrics, Trainer
from embedder.plugins.train.validation import Validation, ValidationRecall
from shards.model_config import ModelConfig

BLOCKS_AHEAD = 2  # decoded shares that are fetched in advance
START_TIMEOUT_S = 120.0  # processes start and import; also those that decode, within a stream's first step
THIS_MACHINE = "127.0.0.1"


@dataclass(frozen=True)
class WorkerResources:
    """Requests of the workers and of one decode task.

    Workers start first and hold what they requested, so a CPU must be left to decode with, or the run waits forever.
    `num_cpus`, `num_gpus` and `num_threads` (of torch) are for each worker; `num_cpus` is reserved, not a limit.
    """

    num_workers: int
    num_cpus: float
    num_gpus: float
    num_threads: int
    decode_cpus: float

    @property
    def device(self) -> str:
        """Torch device of a worker, which sees only the GPU that Ray reserved for it."""
        return "cuda" if self.num_gpus > 0 else "cpu"


def allocate_workers(config: TrainConfig, available: Available) -> WorkerResources:
    """Divide the CPUs and GPUs among the workers; ConfigError, with what to change, if there are too few."""
    num_workers, decode = config.num_workers, decode_cpus(config.decode.num_cpus, available)
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


class TrainWorker:
    """Actor of one worker; its methods are called in the same order on all of them."""

    def __init__(
        self,
        rank: int,
        config: TrainConfig,
        model: ModelConfig,
        resources: WorkerResources,
        teacher: tuple[DistillSettings, int] | None = None,
    ) -> None:
        """Begin without weights; they come with `join`, so that no worker needs the model's folder.

        `teacher` is the settings of its losses and the size of its vectors; None without a teacher.
        """
        self.teacher = teacher
        self.rank, self.config, self.model, self.resources = rank, config, model, resources
        self._timeout = timedelta(seconds=config.no_progress_timeout_s + START_TIMEOUT_S)
        torch.set_num_threads(resources.num_threads)

    def address(self) -> str:
        """Address of this worker's machine."""
        import ray

        return str(ray.util.get_node_ip_address())

    def open_rendezvous(self, host: str) -> int:
        """Listen for the others, on the first worker; return the port."""
        # Torch's own socket would listen on every network of the machine.
        listening = socket.create_server((host, 0))
        port = int(listening.getsockname()[1])
        self._store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=self._timeout,
            master_listen_fd=listening.detach(),
        )
        return port

    def join(self, host: str, port: int, state: bytes) -> None:
        """Join the process group at the first worker's address, and take over a trainer's state, from `pack_state`."""
        if host == THIS_MACHINE:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # it need not be reachable from outside
        if self.rank > 0:
            self._store = TCPStore(host, port, timeout=self._timeout)
        device, size = self.resources.device, self.resources.num_workers
        backend = "nccl" if device == "cuda" else "gloo"
        distributed.init_process_group(
            backend, store=self._store, rank=self.rank, world_size=size, timeout=self._timeout
        )
        self._group = ProcessGroup()
        self.trainer = Trainer(self.model, self.config.train, device=device, group=self._group, teacher=self.teacher)
        self.trainer.load_state_dict(unpack_state(state))

    def listen(self, share: Any) -> None:
        """From now on take batches from this share (a Ray Data iterator) of a stream of `decode_share`."""
        self._blocks: Iterator[pa.Table] = iter(
            share.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=BLOCKS_AHEAD)
        )

    def step(self, epoch: int, batch: int) -> tuple[StepMetrics | None, ExampleCounts]:
        """Learn from this worker's share of a batch; no metrics if no worker's share has a pair."""
        block = next(self._blocks, None)
        if block is None:
            raise RuntimeError(f"the stream ended before batch {batch} of epoch {epoch}")
        counts = ExampleCounts(num_items=block.num_rows)
        pairs = take_share(block, (epoch, batch, self.rank), self.model.preprocess.image_size, counts)
        if not self._group.total(len(pairs), self.trainer.device):
            return None, counts
        return self.trainer.step(self._batch(pairs, epoch)), counts

    def _batch(self, pairs: list[Pair], epoch: int) -> TrainBatch:
        made = make_batch(pairs, sampler_of(self.config), epoch)
        if made is not None:
            return made
        side, none = self.model.preprocess.image_size, torch.empty(0, dtype=torch.int64)
        empty = TrainBatch(torch.empty(0, side, side, 3, dtype=torch.uint8), none, none.int(), none, none, none, epoch)
        if self.teacher is None:
            return empty
        no_rows = torch.empty(0, self.teacher[1])
        return replace(empty, teacher_images=no_rows, teacher_captions=no_rows)

    def hold_out(self, validation: Validation) -> None:
        """Keep the held-out items."""
        self._validation = validation

    def measure(self) -> ValidationRecall:
        """R@k on the held-out items."""
        return self._validation.measure(self.trainer)

    def state(self) -> bytes:
        """State of the trainer, which is the same on all workers."""
        return pack_state(self.trainer.state_dict())


def pack_state(state: dict[str, Any]) -> bytes:
    """Serialise a trainer's state, from any device."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def unpack_state(state: bytes) -> dict[str, Any]:
    """Read the bytes of `pack_state`, onto the CPU."""
    found: dict[str, Any] = torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)
    return found
