"""Differences between versions of Ray Data: blocks that pass whole, pools of actors, settings, errors.

Only `WHOLE_BLOCKS` is private; the other names are public, but missing in older versions.
"""

import logging
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from inspect import signature
from typing import Any

import ray.data.exceptions
from ray.data import ActorPoolStrategy, DataContext, Dataset

from shards import compat
from shards.compat import Private

LOG = logging.getLogger(__name__)
UNCHECKED = ("map_batches_internal", "_map_batches_without_batch_size_validation")  # since Ray 2.58, and before
WHOLE_BLOCKS = Private(
    "the way of whole blocks to stages on GPUs",
    ("ray.data.dataset:Dataset.map_batches_internal(fn, batch_size)",),
    "ray 2.58.1 to 2.60.0",
    "blocks that hold fewer rows than a batch are copied together with others",
)


class NoTimeoutError(Exception):
    """Stands for Ray Data's own time-out in versions that have none; never raised."""


ExecutionTimeoutError: Any = getattr(ray.data.exceptions, "ExecutionTimeoutError", NoTimeoutError)


def map_blocks(
    dataset: Dataset, actor: type, arguments: Sequence[Any], *, rows_per_batch: int, num_gpus: float, **options: Any
) -> Dataset:
    """Append a pool of actors that take Arrow tables; each block is one call, as it was made.

    `map_batches` does this without GPUs. With GPUs it requires a number of rows, by which it joins and cuts blocks
    again; the function that it calls internally does not. `rows_per_batch` are the rows of a full block, for versions
    of Ray without that function; `options` are further ones of `Dataset.map_batches`.
    """
    options |= {"fn_constructor_args": tuple(arguments), "batch_format": "pyarrow"}
    if not num_gpus:
        return dataset.map_batches(actor, batch_size=None, **options)
    places = {name: f"ray.data.dataset:Dataset.{name}(fn, batch_size)" for name in UNCHECKED}
    name = next((name for name, place in places.items() if compat.has_name(place)), None)
    if name is None:
        WHOLE_BLOCKS.is_there()  # logs that it is missing
        return dataset.map_batches(actor, batch_size=rows_per_batch, num_gpus=num_gpus, **options)
    unchecked = getattr(dataset, name)
    unset = dict.fromkeys(signature(unchecked).parameters.keys() - {"fn", "ray_remote_args"})
    defaults = {"zero_copy_batch": True, "udf_modifying_row_count": True}
    return unchecked(actor, **unset | defaults | {"batch_size": None, "num_gpus": num_gpus} | options)


def actor_pool(min_size: int, max_size: int, calls_at_once: int | None = None) -> ActorPoolStrategy:
    """Return the bounds of a pool.

    `calls_at_once` is the number of concurrent calls of an actor, to overlap their copies; None means Ray's own number.
    """
    if calls_at_once is None:
        return ActorPoolStrategy(min_size=min_size, max_size=max_size)
    concurrency = {"max_concurrent_calls_per_actor": calls_at_once, "enable_true_multi_threading": True}
    if concurrency.keys() <= signature(ActorPoolStrategy).parameters.keys():
        return ActorPoolStrategy(min_size=min_size, max_size=max_size, **concurrency)
    _log_once("an actor computes one block at a time, and copies to a GPU do not overlap what it computes", "2.59")
    return ActorPoolStrategy(min_size=min_size, max_size=max_size)


def known_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Select the settings of Ray Data's context that the installed version has, and log the effect of missing ones."""
    known = {field.name for field in fields(DataContext)}
    if "execution_no_progress_timeout_s" not in known:
        _log_once("no_progress_timeout_s has no effect, and a run that is stuck waits until it is stopped", "2.58")
    return {name: value for name, value in settings.items() if name in known}


@cache
def _log_once(loss: str, since: str) -> None:
    LOG.warning(f"Ray {ray.__version__}: {loss}; Ray {since} and newer can do it")
