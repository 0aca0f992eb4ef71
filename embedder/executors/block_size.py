"""Number of items in a block: what a decode task takes and then passes from stage to stage as a whole. Pure.

Each call of a step costs Ray some 10 to 20 ms of CPU: with 64 items per call, a third of a small model's time. Smaller
blocks of a large model fill and drain the stages sooner.
"""

import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from embedder.config import ComputeSettings
from embedder.placement.device_settings import (
    BYTES_PER_CAPTION_BYTE,
    CPU_SETTINGS,
    FEW_ITEMS,
    FIRST_ITEMS,
    UNKNOWN_FILE_BYTES,
    DeviceSettings,
    rows_per_batch,
    widest_bytes,
)
from embedder.sources.file_names import CLIP_SUFFIXES
from embedder.sources.uris import ROW
from shards.model_config import ModelConfig
from shards.plan import PlannedStage
from shards.planning.planning_costs import CallSizes

_CLIP = rf"(?i)({'|'.join(map(re.escape, sorted(CLIP_SUFFIXES)))})([?#]|$)"


def items_per_block(
    items_per_task: int | Literal["auto"],
    rows_per_batch: int,
    bytes_per_row: int,
    num_items: int,
    item_s: float | None = None,
    settings: DeviceSettings = CPU_SETTINGS,
) -> int:
    """Return the items of one block: whole batches, as many as configured or as suit the model and the run.

    `rows_per_batch` is the rows that a stage computes together, `bytes_per_row` the bytes of an image with its caption
    at the widest hand-over between steps, `num_items` those of the whole run, `item_s` the seconds of the fastest stage
    for one item, if known.
    """
    if items_per_task != "auto":
        return items_per_task
    fitting = settings.block_bytes // bytes_per_row
    if item_s is not None:
        fitting = max(fitting, min(math.ceil(settings.min_call_s / item_s), settings.max_block_bytes // bytes_per_row))
    most = min(settings.max_items, fitting, num_items // settings.min_blocks)
    return max(1, most // rows_per_batch) * rows_per_batch


def call_sizes(compute: ComputeSettings, config: ModelConfig, settings: DeviceSettings) -> CallSizes:
    """Return the rows of calls in a long run of fast stages, before the cut is known."""
    whole, cut = (
        items_per_block(
            compute.items_per_task,
            rows_per_batch(compute.batch_size, settings),
            widest_bytes(config, is_cut=is_cut),
            num_items=sys.maxsize,
            item_s=settings.min_call_s / settings.max_items,
            settings=settings,
        )
        for is_cut in (False, True)
    )
    return CallSizes(whole, cut, compute.rows_per_part)


def fastest_item_s(stages: Sequence[PlannedStage]) -> float | None:
    """Return the seconds of the fastest stage for one item; None if the plan has only operations."""
    seconds = [stage.seconds_per_item for stage in stages]
    return min((each for each in seconds if each), default=None) if all(seconds) else None


def cut_listing(
    listing: Iterable[pa.Table], num_items: int, settings: DeviceSettings = CPU_SETTINGS
) -> Iterator[pa.Table]:
    """Cut a listing into blocks: at first of `FEW_ITEMS`; while its files are too large, a block is halved."""
    num_cut = 0
    for table in listing:
        start = 0
        while start < table.num_rows:
            block = table.slice(start, num_items if num_cut >= FIRST_ITEMS else min(num_items, FEW_ITEMS))
            while block.num_rows > FEW_ITEMS and not _is_small(block, settings.max_file_bytes):
                block = block.slice(0, max(FEW_ITEMS, block.num_rows // 2))
            yield block
            start += block.num_rows
            num_cut += block.num_rows


def _is_small(block: pa.Table, max_bytes: int) -> bool:
    sizes = block["size_bytes"]
    if sizes.null_count:
        uris = block["uri"]
        assumed = pc.if_else(pc.match_substring_regex(uris, _CLIP), max_bytes + 1, UNKNOWN_FILE_BYTES)
        of_captions = pc.multiply(pc.binary_length(block["caption"]).cast(pa.int64()), BYTES_PER_CAPTION_BYTE)
        sizes = pc.coalesce(sizes, pc.if_else(pc.match_substring_regex(uris, f"{ROW}$"), of_captions, assumed), 0)
    return bool(pc.sum(sizes).as_py() <= max_bytes)
