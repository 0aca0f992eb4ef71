"""Number of items of one block: what a decode task takes, and what then passes from stage to stage whole. Pure.

Each call of a step costs Ray some 10 to 20 ms of CPU, whatever is in it: with 64 items in each call, a small model
spends a third of all time on that. Blocks of a large model last seconds; there, smaller ones fill and drain the stages
sooner.
"""

from collections.abc import Iterable, Iterator

import pyarrow as pa
import pyarrow.compute as pc

from embedder.config import RunConfig

BLOCK_BYTES = 12 << 20  # of the widest hand-over: a large block for a stage, and little beside Ray's shared memory
MAX_ITEMS = 512  # a part file, which is the step of progress
MIN_BLOCKS = 16  # of a run: fewer would leave stages without work at its start and end
FEW_ITEMS = 64  # where items are large, or of unknown size
FIRST_ITEMS = 512  # of a run come in small blocks: the last stage has work soon, and a part is soon written
MAX_FILE_BYTES = 16 << 20  # of a block with more: of videos, a few keep a task busy for minutes


def items_per_block(config: RunConfig, rows_per_batch: int, bytes_per_row: int, num_items: int) -> int:
    """Return the items of one block: whole batches, as many as the configuration says or as suit the model and the run.

    Args:
        config: configuration of the run.
        rows_per_batch: rows that a stage computes together.
        bytes_per_row: bytes of an image with its caption, where they are largest between two steps.
        num_items: items of the whole run.
    """
    if config.decode.items_per_task != "auto":
        return config.decode.items_per_task
    most = min(MAX_ITEMS, BLOCK_BYTES // bytes_per_row, num_items // MIN_BLOCKS)
    return max(1, most // rows_per_batch) * rows_per_batch


def cut_listing(listing: Iterable[pa.Table], num_items: int) -> Iterator[pa.Table]:
    """Cut a listing into blocks; at first and where files are large or of unknown size, of `FEW_ITEMS` at most."""
    num_cut = 0
    for table in listing:
        start = 0
        while start < table.num_rows:
            block = table.slice(start, num_items)
            if num_items > FEW_ITEMS and (num_cut < FIRST_ITEMS or not _is_small(block)):
                block = block.slice(0, FEW_ITEMS)
            yield block
            start += block.num_rows
            num_cut += block.num_rows


def _is_small(block: pa.Table) -> bool:
    sizes = block["size_bytes"]
    return sizes.null_count == 0 and bool(pc.sum(sizes).as_py() <= MAX_FILE_BYTES)
