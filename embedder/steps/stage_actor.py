"""Ray actor of a stage and its configuration; importing them loads no torch, which takes 2 s of CPU."""

import os
from dataclasses import dataclass

import pyarrow as pa

from embedder.compat.light_transformers import sparing_imports
from embedder.errors import USER_MISTAKES
from embedder.store.runs import Run
from embedder.store.step_metrics import LOAD, measure
from shards.ranges import ShardSpec


@dataclass(frozen=True)
class StageSpec:
    """Configuration of one replica of a stage.

    Attributes:
        index: number of the stage.
        model: folder or URI.
        shard: layers of both towers.
        dtype: compute dtype.
        device: torch device.
        num_threads: torch threads.
        batch_sizes: candidates in rows; among several, the stage finds the best one by trial.
        niceness: added to that of the process: its priority among the processes on the same cores.
    """

    index: int
    model: str
    shard: ShardSpec
    dtype: str
    device: str
    num_threads: int
    batch_sizes: tuple[int, ...]
    niceness: int = 0


class StageActor:
    """Actor around a `Stage`, which is imported where it runs.

    Ray reduces an exception in an actor's constructor to its text, so a mistake of the user's (no model on this node,
    a GPU without a driver) is kept and raised with the first block.
    """

    def __init__(self, spec: StageSpec, run: Run | None = None) -> None:
        """Load the shard.

        Args:
            spec: configuration of the stage.
            run: checked before each block for a stop request; later blocks give no row.
        """
        self._run = run
        with measure(f"{LOAD} {spec.index}") as start, sparing_imports(with_text=len(spec.shard.text) > 0):
            from embedder.steps.stage import Stage

            try:
                self._stage: Stage | Exception = Stage(spec, start)
            except USER_MISTAKES as mistake:
                self._stage = mistake
        os.nice(spec.niceness)  # not before: no stage has work until the last one is ready

    def __call__(self, table: pa.Table) -> pa.Table:
        """Apply the stage to a block.

        Raises:
            EmbedderError: the stage could not start.
            shards.ModelError: likewise.
        """
        if isinstance(self._stage, Exception):
            raise self._stage
        if self._run is not None and self._run.stop_requested():
            return table.slice(0, 0)
        return self._stage(table)
