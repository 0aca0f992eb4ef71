"""Decode step of training, in this process or on Ray Data: listed items -> tables of `EXAMPLES`, in the same order.

On Ray, decoding has its own tasks on whatever CPUs the cluster has, and runs ahead of the model as far as Ray's
back-pressure allows. Several training workers share one such stream (`embedder.plugins.train.worker_group`).
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from embedder.executors.choose_engine import EngineChoice
from embedder.executors.local import ahead
from embedder.placement.device_settings import FEW_ITEMS
from embedder.placement.resources import decode_cpus
from embedder.plugins.train.batches import Decode
from embedder.plugins.train.examples import ExampleSpec, decode_examples
from embedder.plugins.train.rank_batches import decode_share
from embedder.plugins.train.train_config import TrainConfig
from embedder.quantities import duration_text, plural
from embedder.steps.attempts import limit_deaths
from embedder.steps.decode import DECODE_CURE
from shards.planning.planning_costs import IMAGE_DECODE_S, STARTUP_S

if TYPE_CHECKING:
    from ray.data import Dataset

BLOCKS_AHEAD = 4  # decoded blocks that are fetched in advance


def choose_decode_engine(config: TrainConfig, num_items: int, num_cpus: int, *, has_ray: bool = True) -> EngineChoice:
    """Follow the configuration; for `auto`, take Ray if decoding takes longer than Ray's start. Pure."""
    if config.engine != "auto":
        return EngineChoice(config.engine, "as configured")
    if config.num_workers > 1:
        return EngineChoice("ray", f"{config.num_workers} training workers")
    if config.ray_address is not None:
        return EngineChoice("ray", f"a cluster was given: {config.ray_address}")
    if not has_ray:
        return EngineChoice("local", "Ray is not installed")
    decode_s = num_items * IMAGE_DECODE_S / num_cpus
    work = f"{plural(num_items, 'image')}, about {duration_text(round(decode_s))} of decoding"
    if decode_s < STARTUP_S:
        return EngineChoice("local", f"{work}, less than Ray's start ({STARTUP_S:.0f} s)")
    return EngineChoice("ray", f"{work}, more than Ray's start ({STARTUP_S:.0f} s)")


@contextmanager
def decode_stream(config: TrainConfig, spec: ExampleSpec, choice: EngineChoice) -> Iterator[Decode]:
    """Start an engine, yield a function that decodes a listing, and stop the engine with the block."""
    num_items = FEW_ITEMS if config.decode.items_per_task == "auto" else config.decode.items_per_task
    if choice.engine == "local":
        yield lambda listing: ahead(
            table for block in _blocks(listing, num_items) for table in decode_examples(block, spec=spec)
        )
        return
    from embedder.executors.ray_session import ray_session

    with ray_session(config.ray_address, config.no_progress_timeout_s) as available:
        num_cpus = decode_cpus(config.decode.num_cpus, available)
        yield lambda listing: decode_on_ray(listing, spec, num_items, num_cpus)


def decode_on_ray(
    listing: pa.Table, spec: ExampleSpec, items_per_task: int, num_cpus: float
) -> Generator[pa.Table, None, None]:
    """Decode rows of `embedder.sources.listing` into tables of EXAMPLES, in their order; a task reserves `num_cpus`."""
    dataset = _map_blocks(_blocks(listing, items_per_task), partial(decode_examples, spec=spec), num_cpus)
    yield from dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=BLOCKS_AHEAD)


def share_stream(blocks: Iterable[pa.Table], spec: ExampleSpec, num_cpus: float) -> "Dataset":
    """Lazy dataset of `decode_share` over blocks of `cut_shares`, for `streaming_split`."""
    stream = _map_blocks(blocks, partial(decode_share, spec=spec), num_cpus)
    # While workers measure, nothing is taken; `WorkerGroup` limits how long a step may wait for its images.
    stream.context.execution_no_progress_timeout_s = -1
    return stream


def _blocks(listing: pa.Table, num_items: int) -> Iterator[pa.Table]:
    for start in range(0, listing.num_rows, num_items):
        yield listing.slice(start, num_items)


def _map_blocks(blocks: Iterable[pa.Table], decode: Callable[[pa.Table], Any], num_cpus: float) -> "Dataset":
    """Run one decode task for each block; tasks may finish in any order, results come in the blocks' order, whole."""
    import ray.data

    # Not `from_arrow`: it asks a task about each block, which waits forever for the CPU that a worker holds.
    dataset = ray.data.from_blocks(list(blocks))
    context = dataset.context  # the dataset's own copy
    context.execution_options.preserve_order = True
    context.target_max_block_size = None
    return dataset.map_batches(
        partial(_limit_attempts, decode), batch_format="pyarrow", batch_size=None, num_cpus=num_cpus
    )


def _limit_attempts(decode: Callable[[pa.Table], Any], block: pa.Table) -> Iterator[Any]:
    """Run a decode task that may be retried."""
    with limit_deaths(lambda: f"decoding {plural(block.num_rows, 'item')} of the training data", DECODE_CURE):
        tables = decode(block)
        yield from [tables] if isinstance(tables, pa.Table) else tables
