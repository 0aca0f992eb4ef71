"""The end of the graph: write tasks. In a file of its own, so that their processes load neither torch nor a decoder."""

from collections.abc import Iterable

import pyarrow as pa
from ray.data import Datasink
from ray.data._internal.execution.interfaces import TaskContext
from ray.data.block import Block

from embedder.engine.ray_metrics import count_part
from embedder.store.files import StoreFiles
from embedder.store.part_writer import RunMetadata, write_part


def with_rows(blocks: Iterable[Block]) -> list[pa.Table]:
    """The blocks that hold rows; of the others, some lack columns."""
    return [block for block in blocks if block.num_rows]


class PartSink(Datasink[None]):  # type: ignore[misc]  # Ray ships no types
    """Write tasks: each gathers some hundred rows into part files and leaves one journal entry."""

    def __init__(self, files: StoreFiles, stamp: RunMetadata, rows_per_part: int) -> None:
        self.files, self.stamp, self.rows_per_part = files, stamp, rows_per_part

    def write(self, blocks: Iterable[Block], ctx: TaskContext) -> None:
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
