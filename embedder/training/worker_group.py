"""Several training workers on Ray: they share one stream of decoded examples and train one model in lock-step.

    listed items, one block for each batch and worker -> decode and tokenise (CPU tasks) -> streaming_split -> workers

Pixels go from the decode tasks to the workers; this process only names the next batch, receives its
metrics, and writes the files. Batches, order and captions are those of one worker.

Why not ray.train: it would bring a controller that owns the loop, with its own checkpoints, reports and dependencies
(pandas, tensorboardX), where a handful of calls to plain actors let the one loop of `embedder.training.loop` stay.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.data import Dataset
from ray.exceptions import RayError, RayTaskError

from embedder.errors import RunFailedError
from embedder.training.batches import ExampleCounts, SamplerConfig
from embedder.training.decode_stream import share_stream
from embedder.training.examples import ExampleSpec
from embedder.training.items import Items
from embedder.training.rank_batches import cut_shares
from embedder.training.sampler import num_batches
from embedder.training.train_worker import START_TIMEOUT_S, THIS_MACHINE, TrainWorker, TrainWorkerSpec, packed, unpacked
from embedder.training.validation import Validation, ValidationRecall
from embedder.training.worker_resources import WorkerResources
from shards.training.trainer import StepMetrics, Trainer

GRACE_S = 10.0  # in which a worker's death is reported after those that waited for it have failed
# A stream takes two seconds to start and another two to end; on small data, one goes over several epochs.
BLOCKS_PER_STREAM = 256


@contextmanager
def start_workers(
    resources: WorkerResources, worker_spec: TrainWorkerSpec, trainer: Trainer
) -> Iterator["WorkerGroup"]:
    """Start workers that go on from a trainer's state, and end them with the block.

    Args:
        resources: number of workers, and what each reserves.
        worker_spec: settings of each.
        trainer: of this process, on the CPU; it takes no steps, it only writes files.

    Raises:
        RunFailedError: they don't start.
    """
    actor = ray.remote(TrainWorker).options(num_cpus=resources.num_cpus, num_gpus=resources.num_gpus, max_restarts=0)
    workers = [actor.remote(rank, resources.num_workers, worker_spec) for rank in range(resources.num_workers)]
    try:
        group = WorkerGroup(workers, trainer, worker_spec.timeout_s + START_TIMEOUT_S)
        group.connect()
        yield group
    finally:
        for worker in workers:
            ray.kill(worker)


@dataclass
class WorkerGroup:
    """Workers in lock-step; the loop uses them as one trainer.

    Attributes:
        workers: actors of `TrainWorker`, by rank.
        trainer: takes over their state where a file is to be written.
        timeout_s: of one step.
        num_steps_done: by the workers.
    """

    workers: list[Any]
    trainer: Trainer
    timeout_s: float

    def __post_init__(self) -> None:
        self.num_steps_done = self.trainer.num_steps_done

    def connect(self) -> None:
        """Connect the workers, and give them the trainer's state.

        Raises:
            RunFailedError: one of them doesn't start.
        """
        addresses = self._ask(self.workers, "address", timeout_s=START_TIMEOUT_S)
        host = THIS_MACHINE if len(set(addresses)) == 1 else addresses[0]
        (port,) = self._ask(self.workers[:1], "open_rendezvous", host)
        self._ask(self.workers, "join", host, port, ray.put(packed(self.trainer.state_dict())))

    def hold_out(self, validation: Validation) -> None:
        """Keep the held-out items; the first worker measures for all."""
        self._ask(self.workers[:1], "hold_out", validation)

    def measure(self) -> ValidationRecall:
        """R@k with the averaged weights."""
        found: ValidationRecall
        (found,) = self._ask(self.workers[:1], "measure")
        return found

    def step(self, epoch: int, batch: int, counts: ExampleCounts) -> StepMetrics | None:
        """Learn from the next batch of the stream; None where none of its items can be trained on.

        Args:
            epoch: passes over the data so far.
            batch: its number in the epoch.
            counts: counts every example.

        Raises:
            RunFailedError: a worker died, or the step takes longer than it may.
            shards.ModelError: the loss is no finite number.
        """
        done = self._ask(self.workers, "step", epoch, batch)
        for _, seen in done:
            counts.add(seen)
        metrics: StepMetrics | None = done[0][0]
        if metrics is not None:
            self.num_steps_done = metrics.step
        return metrics

    def listen(self, stream: Dataset) -> None:
        """Take batches from this stream from now on."""
        shares = stream.streaming_split(len(self.workers))
        asked = [worker.listen.remote(share) for worker, share in zip(self.workers, shares, strict=True)]
        self._answers(asked, self.timeout_s)

    def state_dict(self) -> dict[str, Any]:
        """State of the trainer, as a checkpoint holds it."""
        (state,) = self._ask(self.workers[:1], "state")
        return unpacked(state)

    def export(self, folder: str | Path, name: str, *, replace: bool = False) -> Path:
        """Write the averaged weights as a model folder; see `Trainer.export`.

        Args:
            folder: to write.
            name: of the model.
            replace: replace a folder that is there.
        """
        self.trainer.load_state_dict(self.state_dict())
        return self.trainer.export(folder, name, replace=replace)

    def _ask(self, workers: Sequence[Any], method: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """Call a method on workers, and wait for all answers."""
        asked = [getattr(worker, method).remote(*arguments) for worker in workers]
        return self._answers(asked, timeout_s or self.timeout_s)

    def _answers(self, asked: list[Any], timeout_s: float) -> list[Any]:
        """Wait for all answers; the first failure of any worker ends the waiting.

        Raises:
            RunFailedError: a worker died, or doesn't answer in time.
        """
        waiting = asked
        try:
            while waiting:
                done, waiting = ray.wait(waiting, timeout=timeout_s)
                if not done:
                    raise RunFailedError(
                        f"{len(waiting)} of {len(self.workers)} training workers gave no answer for {timeout_s:g} s "
                        f"after step {self.num_steps_done:,}: the cluster lacks CPUs or GPUs for them, or decoding is "
                        "stuck; the last checkpoint is whole, and the same command with --resume goes on (slow items "
                        "need a larger no_progress_timeout_s)"
                    )
                ray.get(done)
            return list(ray.get(asked))
        except RayTaskError as error:
            self._blame(asked)
            raise error.cause from error
        except RayError as error:
            raise self._died(error) from None

    def _blame(self, asked: list[Any]) -> None:
        """Name the worker that died, where another one fails because of it.

        Raises:
            RunFailedError: one died.
        """
        done, _ = ray.wait(asked, num_returns=len(asked), timeout=GRACE_S)
        for answer in done:
            try:
                ray.get(answer)
            except RayTaskError:
                continue
            except RayError as error:
                raise self._died(error) from None

    def _died(self, error: RayError) -> RunFailedError:
        reason = " ".join(str(error).split())[:200]
        return RunFailedError(
            f"one of {len(self.workers)} training workers died after step {self.num_steps_done:,} ({reason}); the last "
            "checkpoint is whole, and the same command with --resume goes on, also with fewer num_workers"
        )


def group_steps(
    group: WorkerGroup,
    items: Items,
    spec: ExampleSpec,
    sampler: SamplerConfig,
    resources: WorkerResources,
    counts: ExampleCounts,
) -> Callable[[int, int], Generator[tuple[int, StepMetrics | None], None, None]]:
    """Steps of an epoch from one batch on, as the loop takes them; epochs must follow one another.

    Args:
        group: takes the steps.
        items: all that is trained on.
        spec: of the decode tasks.
        sampler: decides the batches.
        resources: of the workers and of a decode task.
        counts: counts every example.
    """
    total, left = num_batches(len(items), sampler.batch_size), 0

    def steps(epoch: int, first: int) -> Generator[tuple[int, StepMetrics | None], None, None]:
        nonlocal left
        for batch in range(first, total):
            if not left:
                num_epochs = max(1, BLOCKS_PER_STREAM // (total * resources.num_workers))
                blocks = cut_shares(
                    items, sampler, resources.num_workers, epoch=epoch, first=batch, num_epochs=num_epochs
                )
                group.listen(share_stream(blocks, spec, resources.decode_cpus))
                left = num_epochs * total - batch
            left -= 1
            yield batch, group.step(epoch, batch, counts)

    return steps
