"""What the benchmarks of plans share: items, predictions, and runs on Ray whose actors are up before they begin."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa

from corpus import read_shipped
from embedder.config import RunConfig, load_config
from embedder.models.model_folder import Model, open_model
from embedder.placement import hardware
from embedder.placement.allocation import Allocation
from embedder.placement.device_settings import rows_per_batch
from embedder.placement.fleet import Available
from embedder.placement.resources import allocate
from embedder.planning.profile import measure
from embedder.report.plan_review import host_of
from embedder.report.prediction import RunPrediction, StageShape, predict, problem_of
from embedder.sources.listing import list_sources

NUM_WARM = 64  # items of the run that is thrown away: it starts the processes of tasks, which later runs find


@dataclass(frozen=True)
class Items:
    """What is embedded: every `image_every`-th item has an image; captions are `captions` shipped ones, joined."""

    image_every: int = 1
    captions: int = 1


def write_items(folder: Path, num_items: int, items: Items) -> Path:
    """Write images with captions, or captions alone, from the shipped emoji.

    Args:
        folder: to make.
        num_items: captions to write.
        items: what each has.
    """
    folder.mkdir(parents=True)
    images, captions = read_shipped()
    for number in range(num_items):
        words = (captions[(number + k * 7) % len(captions)] for k in range(items.captions))
        (folder / f"{number:06d}.txt").write_text(", ".join(words), encoding="utf-8")
        if number % items.image_every == 0:
            (folder / f"{number:06d}.png").write_bytes(images[number % len(images)])
    return folder


@contextmanager
def warm_ray() -> Iterator[None]:
    """One Ray for all runs; each waits for its actors, so that its window begins when all of them compute."""
    import ray
    from ray.data import DataContext

    from embedder.executors.ray_session import start_ray

    start_ray()
    DataContext.get_current().wait_for_min_actors_s = 300
    try:
        yield
    finally:
        ray.shutdown()


def configured(model: Path, source: Path, store: Path, **settings: object) -> tuple[RunConfig, Model]:
    """A run on Ray.

    Args:
        model: model folder.
        source: folder of the items.
        store: folder of the store.
        settings: other keys of the configuration.
    """
    overrides = {
        "model": str(model),
        "store": str(store),
        "source": [{"path": str(source)}],
        "engine": "ray",
        "rows_per_part": 256,
        **settings,
    }
    return load_config(overrides=overrides), open_model(str(model))


def predictor_of(config: RunConfig, model: Model) -> tuple[Callable[[Sequence[StageShape]], RunPrediction], Allocation]:
    """Measure this machine and a sample of the run's items; gives how to predict stages, and the run's resources."""
    costs, around, mix = measure(config, model, pa.concat_tables(list(list_sources(config.source))))
    available = Available(hardware.num_cpus())
    allocation = allocate(config.compute, available)
    host = host_of(config.ray_address, allocation, available)
    problem = problem_of(
        model.config, config.compute.settled_dtype, costs, around, mix, rows_per_batch(config.batch_size)
    )
    return partial(predict, problem, host=host), allocation
