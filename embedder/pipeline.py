"""The complete Ray Data graph: listed items -> decode and tokenise -> stage 0 -> stage 1 -> stage 2 -> part files.

    items   blocks of listed items, made by the driver
    decode  CPU tasks; each outputs batches of rows (`embedder.batch_schema`)
    models  further models of the run, if any: one pool of actors for those that share one
    stages  one pool of actors for each shard; batches pass whole from stage to stage
    write   tasks that gather rows into part files and journal them

Nothing here is committed: `embedder.store.publish.publish` does that when the graph has finished.
"""

import re
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import pyarrow as pa
import ray.data
from ray.data import ActorPoolStrategy, Dataset
from ray.exceptions import OutOfDiskError, RayError, RayTaskError

from embedder.compat import worker_options
from embedder.compat.draining import DrainedError, draining
from embedder.compat.ray_attempts import delete_notes
from embedder.compat.ray_data import ExecutionTimeoutError, actor_pool, map_blocks
from embedder.errors import EmbedderError, RunFailedError
from embedder.executors.block_size import cut_listing
from embedder.executors.capacity import type_selector
from embedder.executors.carried import PIECE_BYTES, detach_carried_columns
from embedder.executors.datasink import PartSink, drop_empty_blocks
from embedder.executors.job import Job, block_items, handed_on_bytes
from embedder.executors.ray_session import TYPE_LABEL
from embedder.executors.signals import StopRequest
from embedder.models.model_actor import ModelActor
from embedder.placement.allocation import Allocation
from embedder.placement.device_settings import CPU_SETTINGS
from embedder.steps.decode import decode_at_low_priority
from embedder.steps.further_inputs import select_for_model, without_vectors
from embedder.steps.stage_actor import StageActor
from embedder.steps.stage_spec import StageSpec
from embedder.store.journal.model_parts import write_parts
from embedder.store.journal.part_writer import LAST_TASK
from embedder.store.journal.runs import Run
from shards.model_errors import ModelError

MAX_ERROR_CHARACTERS = 300  # of Ray's messages


def embed_on_ray(listing: Iterable[pa.Table], job: Job, stop: StopRequest | None = None) -> None:
    """Run the graph to its end; Ray must be up (`embedder.executors.ray_session`).

    Ray retries endlessly what is lost with a node or process; each step limits that for work that kills its process
    (`embedder.steps.attempts`).

    Raises:
        RunFailedError: no step finished anything for `no_progress_timeout_s`, something killed its process repeatedly,
            an actor could not start, or the journal doesn't match what the write tasks returned.
        EmbedderError: as a task raised it.
    """
    listing, carried = detach_carried_columns(
        listing, job.carried_inputs, keep=ray.put, fetch=ray.get, piece_bytes=PIECE_BYTES
    )
    embedded = embedding_graph(listing, job)
    write_args = {"num_cpus": job.allocation.write_cpus}
    sink = PartSink(job.parts, job.compute.rows_per_part, job.before_write, carried)
    try:
        with draining(stop):
            embedded.write_datasink(sink, ray_remote_args=write_args, concurrency=job.allocation.num_writers)
        delete_notes()
    except DrainedError as drained:
        if rows := drop_empty_blocks(ray.get(drained.finished)):
            finished = job.before_write(carried.join(pa.concat_tables(rows)))
            write_parts(job.parts, LAST_TASK, finished)
    except ExecutionTimeoutError:
        raise RunFailedError(
            f"no step finished anything for {job.compute.no_progress_timeout_s:g} s: a node or a stage is stuck, or "
            "the cluster lost the CPUs that the run needs; what is finished is kept, and the same command continues "
            "(slow items need a larger no_progress_timeout_s)"
        ) from None
    except RayError as error:
        raise translate_ray_error(error) from None


def translate_ray_error(error: Exception) -> Exception:
    """Return the error that a task raised; a failed run where Ray lost a process; a bug keeps its traceback."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, EmbedderError | RunFailedError | ModelError):
        cause.args = (str(cause).strip().partition("\n")[0],)  # without the number of tries, which Ray appends
        return cause
    if isinstance(error, OutOfDiskError) or isinstance(cause, OutOfDiskError):
        node = re.search(r"\bip=([^,)\s]+)", str(error))
        return RunFailedError(
            f"node {node[1] if node else 'unknown'}: Ray's object store and the disk that it spills to are full; make "
            "room on the disk of Ray's temporary folder there (/tmp/ray, unless Ray was started with another), or run "
            "with a smaller batch_size; what is finished is kept, and the same command continues"
        )
    is_bug = isinstance(error, RayTaskError)
    if is_bug:
        return error
    lines = str(error).strip().split("\n")
    if getattr(error, "actor_init_failed", False):
        what = f"a process of a step could not start ({lines[-1].strip()[:MAX_ERROR_CHARACTERS]}); the traceback is in "
        what += "the log of the run"
    else:
        happened = " ".join(line for line in lines if line and not line.startswith("\t"))  # Ray indents a list of ids
        what = f"Ray lost a process that the run needs ({type(error).__name__}: {happened[:MAX_ERROR_CHARACTERS]})"
    failure = RunFailedError(f"{what}; what is finished is kept, and the same command continues")
    failure.details = str(error)  # Ray keeps only this text of what a constructor raised
    return failure


def embedding_graph(listing: Iterable[pa.Table], job: Job) -> Dataset:
    """Return the graph up to the last stage; lazy."""
    listing = list(listing)
    bytes_per_row = max(handed_on_bytes(job.model, job.plan, job.decode))
    num_items = block_items(job, sum(table.num_rows for table in listing))
    is_large = num_items > job.decode.rows_per_batch and num_items * bytes_per_row > CPU_SETTINGS.block_bytes
    # Not `from_arrow`, which runs a task with one CPU for each block.
    dataset = ray.data.from_blocks(list(cut_listing(listing, num_items, job.settings)))
    dataset = dataset.map_batches(
        partial(
            decode_at_low_priority,
            spec=job.decode,
            run=job.run,
            table_bytes=job.settings.max_block_bytes if is_large else None,
        ),
        batch_format="pyarrow",
        batch_size=None,
        num_cpus=job.allocation.decode_cpus,
    )
    dataset = through_models(dataset, job)
    if job.groups and not any(
        select_for_model(table).num_rows for table in listing
    ):  # don't load its towers for nothing
        return dataset.map_batches(
            without_vectors, batch_format="pyarrow", batch_size=None, num_cpus=job.allocation.decode_cpus
        )
    return through_stages(dataset, job.stages, job.allocation, job.run, job.compute.cluster.type_label)


def through_models(dataset: Dataset, job: Job) -> Dataset:
    """Append one pool of actors for each group of further models; each block passes whole.

    They precede the stages: their outputs are small, and the main model's inputs, which they may share, end there.
    """
    for number, (group, resources) in enumerate(zip(job.groups, job.allocation.models, strict=True)):
        dataset = map_blocks(
            dataset,
            ModelActor,
            (group, job.decode.limits, job.run if number == 0 else None),
            rows_per_batch=job.decode.rows_per_batch,
            num_gpus=resources.num_gpus,
            compute=ActorPoolStrategy(size=resources.replicas),
            num_cpus=resources.num_cpus,
            **_nodes_of(resources.node_ids, {}),
            **worker_options(),
        )
    return dataset


def through_stages(
    dataset: Dataset,
    stages: Sequence[StageSpec],
    allocation: Allocation,
    run: Run | None = None,
    type_label: str = TYPE_LABEL,
) -> Dataset:
    """Append one pool of actors for each stage to a dataset of decoded rows; each block passes whole, as it was made.

    The first stage checks for a request to stop `run` before each block. `type_label` is the label whose value is the
    type of a node's devices.
    """
    for number, (spec, resources) in enumerate(zip(stages, allocation.stages, strict=True)):
        dataset = map_blocks(
            dataset,
            StageActor,
            (spec, run if number == 0 else None),
            rows_per_batch=max(spec.batch_sizes),
            num_gpus=resources.num_gpus,
            compute=actor_pool(resources.min_replicas, resources.max_replicas, spec.calls_at_once),
            num_cpus=resources.num_cpus,
            **_nodes_of(resources.node_ids, type_selector(resources.device_types, type_label)),
            **worker_options(),
        )
    return dataset


def _nodes_of(node_ids: Sequence[str], of_type: dict[str, str]) -> dict[str, Any]:
    """Return the options that place each replica on its node; if that is full, elsewhere on devices of its type."""
    if not node_ids:
        return {"label_selector": of_type} if of_type else {}
    next_id = cycle(node_ids)

    def options() -> dict[str, Any]:
        on_node = {"ray.io/node-id": next(next_id)}
        return {"label_selector": on_node, "fallback_strategy": [{"label_selector": of_type}]}

    return {"ray_remote_args_fn": options}
