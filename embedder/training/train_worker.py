"""One of several training workers: a replica of the trainer in a process of its own, with its share of the stream.

`embedder.training.worker_group` starts them as Ray's actors and calls their methods.
"""

import io
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pyarrow as pa
import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, and not in the list of exports

from embedder.training.batches import ExampleCounts, Pair, SamplerConfig, make_batch
from embedder.training.rank_batches import take_share
from embedder.training.validation import Validation, ValidationRecall
from shards.config import ModelConfig
from shards.training.batch import TrainBatch
from shards.training.group import ProcessGroup
from shards.training.settings import TrainSettings
from shards.training.trainer import StepMetrics, Trainer

BLOCKS_AHEAD = 2  # decoded shares that are fetched before they are asked for
START_TIMEOUT_S = 120.0  # processes start and import; also those that decode, within a stream's first step
THIS_MACHINE = "127.0.0.1"


@dataclass(frozen=True)
class TrainWorkerSpec:
    """Settings of a worker; equal for all of them.

    Attributes:
        model: whose weights come with `join`, so that no worker needs the model's folder.
        settings: of the trainer.
        sampler: decides the batches.
        device: torch device.
        num_threads: of torch.
        timeout_s: nothing that is done together may take longer, the starts of processes aside.
    """

    model: ModelConfig
    settings: TrainSettings
    sampler: SamplerConfig
    device: str
    num_threads: int
    timeout_s: float


class TrainWorker:
    """Actor of one worker; its methods are called in the same order on all of them."""

    def __init__(self, rank: int, size: int, spec: TrainWorkerSpec) -> None:
        self.rank, self.size, self.spec = rank, size, spec
        torch.set_num_threads(spec.num_threads)

    def address(self) -> str:
        """Address of this worker's machine."""
        import ray

        return str(ray.util.get_node_ip_address())

    def open_rendezvous(self, host: str) -> int:
        """Listen for the others, on the first worker; gives the port."""
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
        """Join the process group, and take over a trainer's state.

        Args:
            host: of the first worker.
            port: that it listens on.
            state: from `packed`.
        """
        if host == THIS_MACHINE:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # it need not be reached from outside
        if self.rank > 0:
            self._store = TCPStore(host, port, timeout=self._timeout)
        backend = "nccl" if self.spec.device == "cuda" else "gloo"
        distributed.init_process_group(
            backend, store=self._store, rank=self.rank, world_size=self.size, timeout=self._timeout
        )
        self._group = ProcessGroup()
        self.trainer = Trainer(self.spec.model, self.spec.settings, device=self.spec.device, group=self._group)
        self.trainer.load_state_dict(unpacked(state))

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self.spec.timeout_s + START_TIMEOUT_S)

    def listen(self, share: Any) -> None:
        """Take batches from this share (a Ray Data iterator) of a stream of `decode_share` from now on."""
        self._blocks: Iterator[pa.Table] = iter(
            share.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=BLOCKS_AHEAD)
        )

    def step(self, epoch: int, batch: int) -> tuple[StepMetrics | None, ExampleCounts]:
        """Learn from this worker's share of a batch; no metrics where no worker's share has a pair."""
        block = next(self._blocks, None)
        if block is None:
            raise RuntimeError(f"the stream ended before batch {batch} of epoch {epoch}")
        counts = ExampleCounts(num_items=block.num_rows)
        pairs = take_share(block, (epoch, batch, self.rank), self.spec.model.preprocess.image_size, counts)
        if not self._group.total(len(pairs), self.trainer.device):
            return None, counts
        return self.trainer.step(self._batch(pairs, epoch)), counts

    def _batch(self, pairs: list[Pair], epoch: int) -> TrainBatch:
        made = make_batch(pairs, self.spec.sampler, epoch)
        if made is not None:
            return made
        side, none = self.spec.model.preprocess.image_size, torch.empty(0, dtype=torch.int64)
        return TrainBatch(torch.empty(0, side, side, 3, dtype=torch.uint8), none, none.int(), none, none, none, epoch)

    def hold_out(self, validation: Validation) -> None:
        """Keep the held-out items."""
        self._validation = validation

    def measure(self) -> ValidationRecall:
        """R@k on the held-out items."""
        return self._validation.measure(self.trainer)

    def state(self) -> bytes:
        """State of the trainer, which is the same on all workers."""
        return packed(self.trainer.state_dict())


def packed(state: dict[str, Any]) -> bytes:
    """Serialise a trainer's state, from any device."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def unpacked(state: bytes) -> dict[str, Any]:
    """Read the bytes of `packed`, onto the CPU."""
    found: dict[str, Any] = torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)
    return found
