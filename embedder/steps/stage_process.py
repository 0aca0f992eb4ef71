"""A stage as Ray starts it: the process that builds the graph names it without importing torch (2 s of CPU)."""

import pyarrow as pa

from embedder.steps.stage_spec import StageSpec


class StageProcess:
    """A `Stage`, imported where it runs."""

    def __init__(self, spec: StageSpec) -> None:
        from embedder.steps.stage import Stage

        self._stage = Stage(spec)

    def __call__(self, table: pa.Table) -> pa.Table:
        """Move a block one shard further."""
        return self._stage(table)
