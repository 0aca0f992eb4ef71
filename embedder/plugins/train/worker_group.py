"""Several training workers on Ray: they share one stream of decoded examples and train one model in lock-step.

Pixels go from decode tasks (CPU) through `streaming_split` to the workers; this process names the next batch, receives
its metrics, and writes the files. Batches, order and captions are those of one worker. Not ray.train: its controller
owns the loop, and brings its own checkpoints, reports and dependencies (pandas, tensorboardX).
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from embedder.errors import RunFailedError
from embedder.plugins.train.batches import sampler_of
from embedder.plugins.train.decode_stream import share_stream
from embedder.plugins.train.loop import PreparedTraining
from embedder.plugins.train.rank_batches import cut_shares
from embedder.plugins.train.sampler import num_batches
from embedder.plugins.train.train_worker import (
    START_TIMEOUT_S,
    THIS_MACHINE,
    TrainWorker,
    WorkerResources,
    pack_state,
    unpack_state,
)
from embedder.plugins.train.trainer.trainer import StepMetrics
from embedder.plugins.train.validation import Validation, ValidationRecall
from embedder.quantities import duration_text, plural

GRACE_S = 10.0  # within which a worker's death is reported after those that waited for it have failed
# A stream takes two seconds to start and two more to end; on small data, one covers several epochs.
BLOCKS_PER_STREAM = 256


@contextmanager
def start_workers(prepared: PreparedTraining, resources: WorkerResources) -> Iterator["WorkerGroup"]:
    """Start workers that continue from the trainer's state, and end them with the block.

    The run's trainer is on the CPU and takes no steps; it only writes files. Raises `RunFailedError` if they don't
    start.
    """
    config, model = prepared.config, prepared.trainer.config
    teacher = prepared.trainer.teacher
    of_teacher = None if teacher is None else (teacher.settings, teacher.teacher_dim)
    actor = ray.remote(TrainWorker).options(num_cpus=resources.num_cpus, num_gpus=resources.num_gpus, max_restarts=0)
    workers = [actor.remote(rank, config, model, resources, of_teacher) for rank in range(resources.num_workers)]
    try:
        group = WorkerGroup(workers, prepared, resources)
        group.connect()
        yield group
    finally:
        for worker in workers:
            ray.kill(worker)


@dataclass
class WorkerGroup:
    """Workers in lock-step, by rank, which the loop uses as one trainer.

    The run's trainer takes over their state when a file is to be written.
    """

    workers: list[Any]
    prepared: PreparedTraining
    resources: WorkerResources
    _left_in_stream: int = 0

    def __post_init__(self) -> None:
        self.num_steps_done = self.prepared.trainer.num_steps_done

    def connect(self) -> None:
        """Connect the workers, and give them the trainer's state; RunFailedError if one of them doesn't start."""
        addresses = self._ask(self.workers, "address", timeout_s=START_TIMEOUT_S)
        host = THIS_MACHINE if len(set(addresses)) == 1 else addresses[0]
        (port,) = self._ask(self.workers[:1], "open_rendezvous", host)
        self._ask(self.workers, "join", host, port, ray.put(pack_state(self.prepared.trainer.state_dict())))

    def hold_out(self, validation: Validation) -> None:
        """Keep the held-out items; the first worker measures for all."""
        self._ask(self.workers[:1], "hold_out", validation)

    def measure(self) -> ValidationRecall:
        """R@k with the averaged weights."""
        found: ValidationRecall
        (found,) = self._ask(self.workers[:1], "measure")
        return found

    def steps(self, epoch: int, first: int) -> Generator[tuple[int, StepMetrics | None], None, None]:
        """Take the steps of an epoch, as the loop asks; epochs must be consecutive.

        Raises `RunFailedError` if a worker died, or a step takes longer than it may; `shards.ModelError` if the loss or
        the gradients are not finite.
        """
        total = num_batches(len(self.prepared.train), self.prepared.config.batch_size)
        for batch in range(first, total):
            if not self._left_in_stream:
                num_epochs = max(1, BLOCKS_PER_STREAM // (total * len(self.workers)))
                self._listen(epoch, batch, num_epochs)
                self._left_in_stream = num_epochs * total - batch
            self._left_in_stream -= 1
            yield batch, self._step(epoch, batch)

    def _listen(self, epoch: int, first: int, num_epochs: int) -> None:
        """Start a stream of epochs, from batch `first` on, and let the workers take theirs from it."""
        num_workers, items, sampler = len(self.workers), self.prepared.train, sampler_of(self.prepared.config)
        blocks = cut_shares(items, sampler, num_workers, epoch=epoch, first=first, num_epochs=num_epochs)
        stream = share_stream(blocks, self.prepared.spec, self.resources.decode_cpus)
        shares = stream.streaming_split(num_workers)
        self._answers([worker.listen.remote(share) for worker, share in zip(self.workers, shares, strict=True)])

    def _step(self, epoch: int, batch: int) -> StepMetrics | None:
        """Learn from the next batch of the stream; None if none of its items can be trained on."""
        done = self._ask(self.workers, "step", epoch, batch)
        for _, seen in done:
            self.prepared.progress.counts.add(seen)
        metrics: StepMetrics | None = done[0][0]
        if metrics is not None:
            self.num_steps_done = metrics.step
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """State of the trainer, as a checkpoint holds it."""
        (state,) = self._ask(self.workers[:1], "state")
        return unpack_state(state)

    def export(self, folder: str | Path, name: str, *, replace: bool = False) -> Path:
        """Write the averaged weights as a model folder; see `Trainer.export`."""
        trainer = self.prepared.trainer
        trainer.load_state_dict(self.state_dict())
        return trainer.export(folder, name, replace=replace)

    def _ask(self, workers: Sequence[Any], method: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        asked = [getattr(worker, method).remote(*arguments) for worker in workers]
        return self._answers(asked, timeout_s)

    def _answers(self, asked: list[Any], timeout_s: float | None = None) -> list[Any]:
        """Wait for all answers, or the first failure; RunFailedError if a worker died, or doesn't answer in time."""
        waiting = asked
        timeout_s = timeout_s or self.prepared.config.no_progress_timeout_s + START_TIMEOUT_S
        try:
            while waiting:
                done, waiting = ray.wait(waiting, timeout=timeout_s)
                if not done:
                    raise RunFailedError(
                        f"{len(waiting)} of {plural(len(self.workers), 'training worker')} gave no answer for "
                        f"{duration_text(timeout_s)} after step {self.num_steps_done:,}: the cluster lacks CPUs or "
                        "GPUs for them, or decoding is stuck; the last checkpoint is whole, and the same command with "
                        "--resume continues (slow items need a larger no_progress_timeout_s)"
                    )
                ray.get(done)
            return list(ray.get(asked))
        except RayTaskError as error:
            self._blame(asked)
            raise error.cause from error
        except RayError as error:
            raise self._death_error(error) from None

    def _blame(self, asked: list[Any]) -> None:
        """Raise a RunFailedError that names the worker that died, if another one failed because of it."""
        done, _ = ray.wait(asked, num_returns=len(asked), timeout=GRACE_S)
        for answer in done:
            try:
                ray.get(answer)
            except RayTaskError:
                continue
            except RayError as error:
                raise self._death_error(error) from None

    def _death_error(self, error: RayError) -> RunFailedError:
        reason, num_workers = " ".join(str(error).split())[:200], len(self.workers)
        who = "the training worker" if num_workers == 1 else f"one of {num_workers} training workers"
        return RunFailedError(
            f"{who} died after step {self.num_steps_done:,} ({reason}); the last "
            "checkpoint is whole, and the same command with --resume continues it, also with fewer num_workers"
        )
