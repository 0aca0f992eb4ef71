"""The decode step of training on Ray Data: listed items -> decode and tokenise (CPU tasks) -> the training process.

Decoding has its own tasks on whatever CPUs the cluster has, and runs ahead of the model as far as Ray's back-pressure
lets it. Several training workers share one such stream (`embedder.training.worker_group`).
"""

from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any

import pyarrow as pa
import ray.data
from ray.data import Dataset

from embedder.pipeline import MAX_RETRIES
from embedder.training.decoding import slices
from embedder.training.examples import ExampleSpec, decode_examples
from embedder.training.rank_batches import decode_share

BLOCKS_AHEAD = 4  # decoded blocks that are fetched before they are asked for


def decode_on_ray(
    listing: pa.Table, spec: ExampleSpec, items_per_task: int, num_cpus: float
) -> Generator[pa.Table, None, None]:
    """Decode listed items; tables of EXAMPLES, in the items' order."""
    dataset = _mapped(slices(listing, items_per_task), partial(decode_examples, spec=spec), num_cpus)
    yield from dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=BLOCKS_AHEAD)


def share_stream(blocks: Iterable[pa.Table], spec: ExampleSpec, num_cpus: float) -> Dataset:
    """The dataset of `decode_share` over blocks of `cut_shares`, for `streaming_split`; lazy."""
    stream = _mapped(blocks, partial(decode_share, spec=spec), num_cpus)
    # While workers measure, nothing is taken; how long a step may wait for its pictures, `Team` knows.
    stream.context.execution_no_progress_timeout_s = -1
    return stream


def _mapped(blocks: Iterable[pa.Table], decode: Callable[[pa.Table], Any], num_cpus: float) -> Dataset:
    """One decode task a block; tasks may finish in any order, what they give comes in the blocks' order, uncut."""
    # Not `from_arrow`: it asks a task about each block, and the task waits for ever for the CPU that a worker holds.
    dataset = ray.data.from_blocks(list(blocks))
    context = dataset.context  # the dataset's own copy
    context.execution_options.preserve_order = True
    context.target_max_block_size = None
    return dataset.map_batches(
        decode, batch_format="pyarrow", batch_size=None, num_cpus=num_cpus, max_retries=MAX_RETRIES
    )
