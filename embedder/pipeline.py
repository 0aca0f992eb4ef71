"""Whole Ray Data graph: listed items -> decode and tokenise -> stage 0 -> stage 1 -> stage 2 -> part files.

    items   blocks of listed items, made by the driver
    decode  CPU tasks; each hands on batches of rows (`embedder.batch_schema`)
    stages  one pool of actors for each shard; batches pass whole from stage to stage
    write   tasks that gather rows into part files and journal them

Nothing here is committed: `embedder.store.publish` does that when the graph has run dry.
"""

import warnings
from collections.abc import Iterable, Sequence
from functools import partial

import pyarrow as pa
import ray.data
from ray.data import ActorPoolStrategy, Dataset
from ray.data.exceptions import ExecutionTimeoutError
from ray.exceptions import RayError, RayTaskError
from ray.util.annotations import RayDeprecationWarning

from embedder.compat import worker_options
from embedder.compat.draining import DrainedError, draining
from embedder.engine.block_size import cut_listing, items_per_block
from embedder.engine.datasink import PartSink, with_rows
from embedder.engine.job import Job, handed_on_bytes
from embedder.engine.resources import Allocation
from embedder.engine.signals import StopRequest
from embedder.errors import EmbedderError, RunFailedError
from embedder.steps.decode import decode_at_low_priority
from embedder.steps.stage_actor import StageActor, StageSpec
from embedder.store.part_writer import LAST_TASK, write_part
from embedder.store.runs import Run
from shards.errors import ModelError

# Ray's own retries are endless. A decoder that dies costs its file (embedder.media); anything else that kills a worker
# again and again does not pass. Ray 2.60 calls the arguments that bound them deprecated and has no others yet;
# pyproject.toml keeps Ray below 2.64, which drops them.
MAX_RETRIES = 3
MAX_ERROR_CHARACTERS = 200  # of what Ray says
warnings.filterwarnings("ignore", message="`ray_remote_args` is deprecated", category=RayDeprecationWarning)


def embed_on_ray(listing: Iterable[pa.Table], job: Job, stop: StopRequest | None = None) -> None:
    """Run the graph to its end; Ray must be up (`embedder.engine.ray_session`).

    Args:
        listing: listed items.
        job: model, plan, resources and run.
        stop: request to end early, if one may come.

    Raises:
        RunFailedError: no step finished anything for `no_progress_timeout_s`, or Ray lost a process for good.
        EmbedderError: as a task raised it.
    """
    embedded = embedding_graph(listing, job)
    write_args = {"num_cpus": job.allocation.write_cpus, "max_retries": MAX_RETRIES}
    sink = PartSink(job.run.files, job.stamp, job.config.rows_per_part)
    try:
        with draining(stop):
            embedded.write_datasink(sink, ray_remote_args=write_args, concurrency=job.allocation.num_writers)
    except DrainedError as drained:
        if rows := with_rows(ray.get(drained.finished)):
            write_part(job.run.files, job.stamp, LAST_TASK, pa.concat_tables(rows))
    except ExecutionTimeoutError:
        raise RunFailedError(
            f"no step finished anything for {job.config.no_progress_timeout_s:g} s: a node or a stage is stuck, or the "
            "cluster lost the CPUs that the run needs; what is finished is kept, and the same command goes on (slow "
            "items need a larger no_progress_timeout_s)"
        ) from None
    except RayError as error:
        raise as_ours(error) from None


def as_ours(error: Exception) -> Exception:
    """Return the error that a task raised; a failed run where Ray lost a process; a bug keeps its traceback."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, EmbedderError | RunFailedError | ModelError):
        cause.args = (_first_line(cause),)  # Ray appends how often it has tried
        return cause
    # Of what an actor raised in its constructor, Ray keeps no more than the text of the traceback.
    has_traceback = isinstance(error, RayTaskError) or getattr(error, "actor_init_failed", False)
    if has_traceback:
        return error
    return RunFailedError(
        f"Ray lost a process that the run needs, more often than it is tried again ({type(error).__name__}: "
        f"{_first_line(error)[:MAX_ERROR_CHARACTERS]}); what is finished is kept, and the same command goes on"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def embedding_graph(listing: Iterable[pa.Table], job: Job) -> Dataset:
    """Return the graph up to the last stage; lazy."""
    listing = list(listing)
    num_items = items_per_block(
        job.config,
        job.decode.rows_per_batch,
        max(handed_on_bytes(job.model, job.plan)),
        sum(table.num_rows for table in listing),
    )
    # Not `from_arrow`, which asks a task of one CPU about each block.
    dataset = ray.data.from_blocks(list(cut_listing(listing, num_items)))
    dataset = dataset.map_batches(
        partial(decode_at_low_priority, spec=job.decode, run=job.run),
        batch_format="pyarrow",
        batch_size=None,
        num_cpus=job.allocation.decode_cpus,
        max_retries=MAX_RETRIES,
    )
    return through_stages(dataset, job.stages, job.allocation, job.run)


def through_stages(
    dataset: Dataset, stages: Sequence[StageSpec], allocation: Allocation, run: Run | None = None
) -> Dataset:
    """Append one pool of actors for each stage to a dataset of decoded rows; each block passes whole, as it was made.

    Args:
        dataset: decoded rows.
        stages: shard and settings of each stage.
        allocation: CPUs, GPUs and replicas of each stage.
        run: run whose request to stop the first stage looks for before each block.
    """
    for number, (spec, resources) in enumerate(zip(stages, allocation.stages, strict=True)):
        # `map_batches` refuses GPUs without a number of rows, and with one it merges blocks and cuts them anew. This is
        # what it calls once it has checked that, and what Ray's own `map_groups` calls for the same reason.
        dataset = dataset.map_batches_internal(
            StageActor,
            fn_constructor_args=(spec, run if number == 0 else None),
            batch_format="pyarrow",
            batch_size=None,
            compute=ActorPoolStrategy(min_size=resources.min_replicas, max_size=resources.max_replicas),
            num_cpus=resources.num_cpus,
            num_gpus=resources.num_gpus or None,
            max_task_retries=MAX_RETRIES,
            **worker_options(),
        )
    return dataset
