"""The decode step of training on Ray Data: listed items -> decode and tokenise (CPU tasks) -> the training process.

Decoding has its own tasks on whatever CPUs the cluster has, and runs ahead of the model as far as Ray's back-pressure
lets it. `example_stream` is a lazy dataset, so `shares` can deal it to several training workers as well.
"""

from collections.abc import Generator
from functools import partial

import pyarrow as pa
import ray.data
from ray.data import DataIterator, Dataset

from embedder.pipeline import MAX_RETRIES, blocks_of
from embedder.training.examples import ExampleSpec, decode_examples

BLOCKS_AHEAD = 4  # decoded blocks that are fetched before they are asked for


def decode_on_ray(
    listing: pa.Table, spec: ExampleSpec, items_per_task: int, num_cpus: float
) -> Generator[pa.Table, None, None]:
    """Decode listed items; tables of EXAMPLES, in the items' order."""
    (share,) = shares(example_stream(listing, spec, items_per_task, num_cpus), 1)
    yield from share.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=BLOCKS_AHEAD)


def example_stream(listing: pa.Table, spec: ExampleSpec, items_per_task: int, num_cpus: float) -> Dataset:
    """The dataset of examples; lazy. Tasks may finish in any order, their blocks come in the items' order."""
    dataset = ray.data.from_arrow(list(blocks_of([listing], items_per_task)))
    dataset.context.execution_options.preserve_order = True  # the dataset's own copy of the context
    return dataset.map_batches(
        partial(decode_examples, spec=spec),
        batch_format="pyarrow",
        batch_size=None,
        num_cpus=num_cpus,
        max_retries=MAX_RETRIES,
    )


def shares(dataset: Dataset, num_workers: int) -> list[DataIterator]:
    """One iterator a training worker, on whichever machine; read at the same time, they give each example once."""
    return [dataset.iterator()] if num_workers == 1 else list(dataset.streaming_split(num_workers))
