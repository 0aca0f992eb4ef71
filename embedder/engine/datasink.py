"""The end of the graph: write tasks. In a file of its own, so that their processes load neither torch nor a decoder.

Each write task adds its counts to Ray's own metrics, for clusters whose Ray exports them (`ray[default]`):
`ray_embedder_items`, `_rejects`, `_vectors` and `_step_seconds{step="stage 0"}`.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from ray.data import Datasink
from ray.data.block import Block

from embedder.store.files import StoreFiles
from embedder.store.journal import JournalEntry
from embedder.store.part_writer import RunMetadata, write_part

if TYPE_CHECKING:
    from ray.data._internal.execution.interfaces import TaskContext


def with_rows(blocks: Iterable[Block]) -> list[pa.Table]:
    """Select the blocks that hold rows; of the others, some lack columns."""
    return [block for block in blocks if block.num_rows]


class PartSink(Datasink[None]):  # type: ignore[misc]  # Ray ships no types
    """Write tasks: each gathers some hundred rows into part files and leaves one journal entry."""

    def __init__(self, files: StoreFiles, stamp: RunMetadata, rows_per_part: int) -> None:
        self.files, self.stamp, self.rows_per_part = files, stamp, rows_per_part

    def write(self, blocks: Iterable[Block], ctx: "TaskContext") -> None:
        """Write one part; the same task again writes the same files."""
        if tables := with_rows(blocks):
            count_part(write_part(self.files, self.stamp, ctx.task_idx, pa.concat_tables(tables)))

    @property
    def min_rows_per_write(self) -> int:
        """Rows that Ray gathers before it starts a write task."""
        return self.rows_per_part

    def get_name(self) -> str:
        """Name of the operator in Ray's plan and logs."""
        return "parts"


def count_part(entry: JournalEntry) -> None:
    """Add the counts of what a write task has finished to Ray's metrics; called inside the task."""
    counters = _counters()
    num_vectors = sum(part.num_rows for part in entry.parts if part.table == "embeddings")
    for name, number in (("items", entry.num_items), ("rejects", entry.num_rejects), ("vectors", num_vectors)):
        if number:  # Ray's counters refuse a zero
            counters[name].inc(number)
    for call in entry.trace:
        if call["wall_s"] > 0:
            counters["step_seconds"].inc(call["wall_s"], {"step": call["step"]})


@lru_cache(maxsize=1)
def _counters() -> dict[str, Any]:
    """Counters of this process by name, made once: two of a name would be two series."""
    from ray.util.metrics import Counter

    descriptions = {
        "items": "Items finished, embedded or rejected.",
        "rejects": "Items that could not be embedded.",
        "vectors": "Rows with vectors written.",
        "step_seconds": "Seconds inside each step.",
    }
    return {
        name: Counter(f"embedder_{name}", text, tag_keys=("step",) if name == "step_seconds" else ())
        for name, text in descriptions.items()
    }
