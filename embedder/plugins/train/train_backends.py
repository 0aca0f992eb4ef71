"""Backends of the training loop: only this process, or several training workers."""

import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from functools import partial

from embedder.plugins.train.batches import ExampleCache, epoch_batches, sampler_of
from embedder.plugins.train.frozen_towers import feature_batches, run_towers
from embedder.plugins.train.loop import PreparedTraining, Steps, TrainingSetup
from embedder.plugins.train.train_worker import allocate_workers
from embedder.plugins.train.trainer.batch import FeatureBatch, TrainBatch
from embedder.plugins.train.trainer.trainer import StepMetrics
from embedder.plugins.train.validation import Validation
from embedder.quantities import plural

LOG = logging.getLogger(__name__)


@contextmanager
def training_setup(
    prepared: PreparedTraining,
    cache: ExampleCache,
    validation: Validation | None,
    should_stop: Callable[[], bool],
) -> Iterator[TrainingSetup]:
    """Start the backend, and end it with the block.

    The cache decodes for this process; several workers have their own stream. `validation` is None without held-out
    items. Raises `ConfigError` if there are too few CPUs or GPUs for the workers; `RunFailedError` if the workers don't
    start.
    """
    if prepared.config.num_workers == 1:
        trainer = prepared.trainer
        measure = None if validation is None else partial(validation.measure, trainer)
        yield TrainingSetup(trainer, _own_steps(prepared, cache, should_stop), measure, str(trainer.device))
        return
    from embedder.executors.ray_session import cluster
    from embedder.plugins.train.worker_group import start_workers

    resources = allocate_workers(prepared.config, cluster())
    LOG.info(f"starting {plural(resources.num_workers, 'training worker')}")
    with start_workers(prepared, resources) as group:
        if validation is not None:
            group.hold_out(validation)
        device = f"{resources.num_workers} x {resources.device}"
        yield TrainingSetup(group, group.steps, None if validation is None else group.measure, device)


def _own_steps(prepared: PreparedTraining, cache: ExampleCache, should_stop: Callable[[], bool]) -> Steps:
    config, trainer, counts = prepared.config, prepared.trainer, prepared.progress.counts
    batches: Callable[..., Generator[tuple[int, TrainBatch | FeatureBatch | None], None, None]]
    if config.train.what == "projections":
        LOG.info("running the frozen towers once over all items; augmentation is off")
        features = run_towers(prepared.train, cache, trainer, config.batch_size, counts, should_stop)
        batches = partial(feature_batches, prepared.train, features, sampler_of(config))
    else:
        batches = partial(epoch_batches, prepared.train, cache, sampler_of(config), counts)

    def steps(epoch: int, first: int) -> Generator[tuple[int, StepMetrics | None], None, None]:
        with closing(batches(epoch=epoch, first=first)) as numbered:
            for number, batch in numbered:
                yield number, None if batch is None else trainer.step(batch)

    return steps
