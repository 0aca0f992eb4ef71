"""Ray actor of a stage; importing it loads no torch, which takes 2 s of CPU."""

import hashlib
import os
import platform
import traceback
from typing import TYPE_CHECKING

import pyarrow as pa

from embedder.batch_schema import CARRIED
from embedder.compat.light_transformers import sparing_imports
from embedder.compat.ray_attempts import attempt_number
from embedder.errors import USER_MISTAKES, RunFailedError
from embedder.quantities import plural
from embedder.steps.attempts import MAX_CAUSE_CHARACTERS, limit_deaths
from embedder.steps.stage_spec import StageSpec
from embedder.store.journal.runs import Run
from embedder.store.journal.step_metrics import LOAD, measure

if TYPE_CHECKING:
    from embedder.steps.stage import Stage

LOAD_CURE = "give the node more memory, or cut the model into more stages (num_stages)"
BLOCK_CURE = "a smaller batch_size or decode.items_per_task needs less memory"


class StageActor:
    """Actor around a `Stage`, which is imported where it runs.

    Ray reduces an exception in an actor's constructor to its text, so it is kept and raised with the first block: a
    mistake of the user's (no model on this node, a GPU without a driver) as it is, anything else with its traceback.
    """

    def __init__(self, spec: StageSpec, run: Run | None = None) -> None:
        """Load the shard.

        Args:
            spec: configuration of the stage.
            run: checked before each block for a stop request; later blocks give no row.
        """
        self._run, self._spec = run, spec.on_this_node()
        self._is_restarted = attempt_number() > 0
        try:
            with limit_deaths(lambda: f"stage {spec.index}: loading its shard of {spec.model}", LOAD_CURE):
                self._stage = self._load()
        except (*USER_MISTAKES, RunFailedError) as error:
            self._failure: Exception | None = error
        except Exception as error:  # noqa: BLE001  # of any library that loads a model
            self._failure = _failed_start(spec, error)
        else:
            self._failure = None
        os.nice(spec.niceness)  # not before: no stage has work until the last one is ready

    def _load(self) -> "Stage":
        spec = self._spec
        with measure(f"{LOAD} {spec.index}") as start, sparing_imports(with_text=len(spec.shard.text) > 0):
            from embedder.steps.stage import Stage

            return Stage(spec, start)

    def __call__(self, table: pa.Table) -> pa.Table:
        """Apply the stage to a block.

        Raises:
            EmbedderError: the stage could not start.
            shards.ModelError: likewise.
            RunFailedError: likewise, or the block has killed several processes.
        """
        if self._failure is not None:
            raise self._failure
        if self._run is not None and self._run.stop_requested():
            return table.slice(0, 0)
        if not self._is_restarted:
            return self._stage(table)
        index = self._spec.index
        with limit_deaths(lambda: f"stage {index}: {_describe(table)}", BLOCK_CURE, key=block_key(index, table)):
            return self._stage(table)


def _failed_start(spec: StageSpec, error: Exception) -> RunFailedError:
    cause = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_CAUSE_CHARACTERS]
    failure = RunFailedError(
        f"stage {spec.index} could not start on node {platform.node()} ({cause}); the traceback is in the log"
    )
    failure.details = "".join(traceback.format_exception(error))
    return failure


def block_key(step: int | str, table: pa.Table) -> str:
    """Key that tells a block apart, the same in each attempt: a hash of its first row's own columns.

    Args:
        step: that the block is for.
        table: the block.
    """
    names = [name for name in table.column_names if name in ("item_id", "segment") or name.startswith(CARRIED)]
    first = repr((step, table.num_rows, table.select(names).slice(0, 1).to_pylist()))
    return hashlib.blake2b(first.encode(), digest_size=16).hexdigest()


def _describe(table: pa.Table) -> str:
    first = f", the first of item {table['item_id'][0]}," if "item_id" in table.column_names and table.num_rows else ""
    return f"a block of {plural(table.num_rows, 'row')}{first}"
