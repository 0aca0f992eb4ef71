"""Backends of the training loop: this process alone, or several training workers."""

from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial

from embedder.training.batches import epoch_batches
from embedder.training.example_cache import ExampleCache
from embedder.training.frozen_towers import feature_batches, run_towers
from embedder.training.loop import Steps, TrainingBackend
from embedder.training.setup import PreparedTraining
from embedder.training.validation import Validation, ValidationRecall
from embedder.training.worker_resources import allocate_workers
from shards.training.batch import FeatureBatch, TrainBatch
from shards.training.trainer import StepMetrics


@dataclass(frozen=True)
class TrainingSetup:
    """Backend of the loop and its functions.

    Attributes:
        trainer: one trainer, or a group of workers.
        steps: takes the steps of an epoch.
        measure: R@k on held-out items; None where there are none.
        device: for the report.
    """

    trainer: TrainingBackend
    steps: Steps
    measure: Callable[[], ValidationRecall] | None
    device: str


@contextmanager
def training_setup(
    prepared: PreparedTraining,
    cache: ExampleCache,
    validation: Validation | None,
    should_stop: Callable[[], bool],
    say: Callable[[str], None],
) -> Iterator[TrainingSetup]:
    """Start the backend, and end it with the block.

    Args:
        prepared: the run.
        cache: decodes for this process; several workers have a stream of their own.
        validation: the held-out items; None of none.
        should_stop: whether the run should end.
        say: receives progress messages.

    Raises:
        ConfigError: there are too few CPUs or GPUs for the workers.
        RunFailedError: the workers don't start.
    """
    if prepared.config.num_workers > 1:
        with _worker_steps(prepared, validation, say) as found:
            yield found
    else:
        trainer = prepared.trainer
        measure = None if validation is None else partial(validation.measure, trainer)
        yield TrainingSetup(trainer, _own_steps(prepared, cache, should_stop, say), measure, str(trainer.device))


def _own_steps(
    prepared: PreparedTraining, cache: ExampleCache, should_stop: Callable[[], bool], say: Callable[[str], None]
) -> Steps:
    config, trainer, sampler, counts = prepared.config, prepared.trainer, prepared.sampler, prepared.progress.counts
    batches: Callable[..., Generator[tuple[int, TrainBatch | FeatureBatch | None], None, None]]
    if config.train.what == "projections":
        say("running the frozen towers once over all items; augmentation is off")
        features = run_towers(prepared.train, cache, trainer, config.batch_size, counts, should_stop)
        batches = partial(feature_batches, prepared.train, features, sampler)
    else:
        batches = partial(epoch_batches, prepared.train, cache, sampler, counts)

    def steps(epoch: int, first: int) -> Generator[tuple[int, StepMetrics | None], None, None]:
        with closing(batches(epoch=epoch, first=first)) as numbered:
            for number, batch in numbered:
                yield number, None if batch is None else trainer.step(batch)

    return steps


@contextmanager
def _worker_steps(
    prepared: PreparedTraining, validation: Validation | None, say: Callable[[str], None]
) -> Iterator[TrainingSetup]:
    from embedder.engine.ray_session import cluster
    from embedder.training.train_worker import TrainWorkerSpec
    from embedder.training.worker_group import group_steps, start_workers

    config, trainer = prepared.config, prepared.trainer
    resources = allocate_workers(config, cluster())
    worker_spec = TrainWorkerSpec(
        model=trainer.config,
        settings=config.train,
        sampler=prepared.sampler,
        device=resources.device,
        num_threads=resources.num_threads,
        timeout_s=config.no_progress_timeout_s,
    )
    say(f"starting {resources.num_workers} training workers")
    with start_workers(resources, worker_spec, trainer) as group:
        if validation is not None:
            group.hold_out(validation)
        steps = group_steps(group, prepared.train, prepared.spec, prepared.sampler, resources, prepared.progress.counts)
        device = f"{resources.num_workers} x {resources.device}"
        yield TrainingSetup(group, steps, None if validation is None else group.measure, device)
