"""Ray actors of stages; importing them doesn't load torch, which takes 2 s of CPU."""

import hashlib
import os
import platform
import traceback
from abc import ABC, abstractmethod
from typing import ClassVar

import pyarrow as pa

from embedder.batch_schema import CARRIED
from embedder.compat.light_imports import sparing_imports
from embedder.compat.ray_attempts import attempt_number
from embedder.errors import USER_MISTAKES, RunFailedError
from embedder.quantities import plural
from embedder.steps.attempts import MAX_CAUSE_CHARACTERS, limit_deaths
from embedder.steps.stage_contract import Stage
from embedder.steps.stage_spec import StageSpec
from embedder.store.journal.runs import Run
from embedder.store.journal.step_metrics import LOAD, measure


class RowActor(ABC):
    """Actor around a `Stage`, which is imported and set up where it runs.

    Ray reduces an exception in an actor's constructor to its text, so it is kept and raised with the first block: a
    user's mistake (no model on this node, a GPU without a driver) unchanged, anything else with its traceback.
    """

    load_cure: ClassVar[str]
    block_cure: ClassVar[str]

    def __init__(self, title: str, loading: str, run: Run | None = None) -> None:
        """Set the stage up.

        `title` names the stage and `loading` describes its start, both for messages. `run` is checked before each block
        for a stop request; later blocks give no row.
        """
        self._title, self._run = title, run
        self._is_restarted = attempt_number() > 0
        self._failure: Exception | None = None
        try:
            with limit_deaths(lambda: f"{title}: {loading}", self.load_cure):
                self._stage = self._load()
        except (*USER_MISTAKES, RunFailedError) as error:
            self._failure = error
        except Exception as error:  # noqa: BLE001  # of any library that loads a model
            self._failure = _failed_start(title, error)

    @abstractmethod
    def _load(self) -> Stage:
        """Make the stage and set it up."""

    def __call__(self, table: pa.Table) -> pa.Table:
        """Apply the stage to a block; raises its start's error, or a RunFailedError for a deadly block."""
        if self._failure is not None:
            raise self._failure
        if self._run is not None and self._run.stop_requested():
            return table.slice(0, 0)
        if table.num_rows == 0 or not self._is_restarted:
            return self._stage(table) if table.num_rows else table
        key = _block_key(self._title, table)
        with limit_deaths(lambda: f"{self._title}: {_describe(table)}", self.block_cure, key=key):
            return self._stage(table)


class StageActor(RowActor):
    """Actor of a stage of the towers."""

    load_cure = "give the node more memory, or cut the model into more stages (num_stages)"
    block_cure = "a smaller batch_size or decode.items_per_task needs less memory"

    def __init__(self, spec: StageSpec, run: Run | None = None) -> None:
        """Load the shard; `run` is as in `RowActor`."""
        self._spec = spec.on_this_node()
        super().__init__(f"stage {spec.index}", f"loading its shard of {spec.model}", run)
        os.nice(spec.niceness)  # not before: no stage has work until the last one is ready

    def _load(self) -> Stage:
        spec = self._spec
        with measure(f"{LOAD} {spec.index}") as start, sparing_imports(with_text=len(spec.shard.text) > 0):
            from embedder.steps.stage import TowerStage

            return TowerStage(spec, start).load()


def _failed_start(title: str, error: Exception) -> RunFailedError:
    cause = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_CAUSE_CHARACTERS]
    failure = RunFailedError(
        f"{title} could not start on node {platform.node()} ({cause}); the traceback is in the log"
    )
    failure.details = "".join(traceback.format_exception(error))
    return failure


def _block_key(title: str, table: pa.Table) -> str:
    """Return a key of a block, the same in each attempt: a hash of its first row's own columns."""
    names = [name for name in table.column_names if name in ("item_id", "segment") or name.startswith(CARRIED)]
    first = repr((title, table.num_rows, table.select(names).slice(0, 1).to_pylist()))
    return hashlib.blake2b(first.encode(), digest_size=16).hexdigest()


def _describe(table: pa.Table) -> str:
    first = f", the first of item {table['item_id'][0]}," if "item_id" in table.column_names and table.num_rows else ""
    return f"a block of {plural(table.num_rows, 'row')}{first}"
