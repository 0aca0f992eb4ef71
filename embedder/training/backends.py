"""Who takes the steps: this process alone, or several training workers."""

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
    """What the loop drives.

    Attributes:
        trainer: one trainer, or a team of them.
        steps: take the steps of an epoch.
        measure: R@k on held-out items; None where there are none.
        device: where it happens, for the report.
    """

    trainer: TrainingBackend
    steps: Steps
    measure: Callable[[], ValidationRecall] | None
    device: str


@contextmanager
def learning(
    prepared: PreparedTraining,
    feed: ExampleCache,
    validation: Validation | None,
    should_stop: Callable[[], bool],
    say: Callable[[str], None],
) -> Iterator[TrainingSetup]:
    """Make ready what takes the steps, and end it with the block.

    Args:
        prepared: the run.
        feed: decodes for this process; several workers have a stream of their own.
        validation: what is held out.
        should_stop: whether somebody wants the run to end.
        say: is told what happens.

    Raises:
        ConfigError: there are too few CPUs or GPUs for the workers.
        RunFailedError: the workers don't start.
    """
    if prepared.config.num_workers > 1:
        with _together(prepared, validation, say) as found:
            yield found
    else:
        trainer = prepared.trainer
        measure = None if validation is None else partial(validation.measure, trainer)
        yield TrainingSetup(trainer, _own_steps(prepared, feed, should_stop, say), measure, str(trainer.device))


def _own_steps(
    prepared: PreparedTraining, feed: ExampleCache, should_stop: Callable[[], bool], say: Callable[[str], None]
) -> Steps:
    config, trainer, draw, tally = prepared.config, prepared.trainer, prepared.draw, prepared.standing.tally
    batches: Callable[..., Generator[tuple[int, TrainBatch | FeatureBatch | None], None, None]]
    if config.train.what == "projections":
        say("running the frozen towers once over all items; augmentation is off")
        features = run_towers(prepared.train, feed, trainer, config.batch_size, tally, should_stop)
        batches = partial(feature_batches, prepared.train, features, draw)
    else:
        batches = partial(epoch_batches, prepared.train, feed, draw, tally)

    def steps(epoch: int, first: int) -> Generator[tuple[int, StepMetrics | None], None, None]:
        with closing(batches(epoch=epoch, first=first)) as numbered:
            for number, batch in numbered:
                yield number, None if batch is None else trainer.step(batch)

    return steps


@contextmanager
def _together(
    prepared: PreparedTraining, validation: Validation | None, say: Callable[[str], None]
) -> Iterator[TrainingSetup]:
    from embedder.engine.ray_session import cluster
    from embedder.training.train_worker import TrainWorkerSpec
    from embedder.training.worker_group import team_of, team_steps

    config, trainer = prepared.config, prepared.trainer
    places = allocate_workers(config, cluster())
    replica = TrainWorkerSpec(
        model=trainer.config,
        settings=config.train,
        draw=prepared.draw,
        device=places.device,
        num_threads=places.num_threads,
        timeout_s=config.no_progress_timeout_s,
    )
    say(f"starting {places.num_workers} training workers")
    with team_of(places, replica, trainer) as team:
        if validation is not None:
            team.hold_out(validation)
        steps = team_steps(team, prepared.train, prepared.spec, prepared.draw, places, prepared.standing.tally)
        device = f"{places.num_workers} x {places.device}"
        yield TrainingSetup(team, steps, None if validation is None else team.measure, device)
