"""The end of the graph: write tasks. A separate file, so that their processes load neither torch nor a decoder.

Each write task adds its counts to Ray's own metrics, for clusters whose Ray exports them (`ray[default]`):
`ray_embedder_items`, `_rejects`, `_vectors` and `_step_seconds{step="stage 0"}`.
"""

import platform
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import pyarrow as pa
from ray.data import Datasink
from ray.data.block import Block

from embedder.compat.ray_attempts import attempt_number
from embedder.errors import RunFailedError
from embedder.executors.carried import NOTHING_CARRIED, CarriedColumns
from embedder.quantities import plural
from embedder.steps.attempts import limit_deaths
from embedder.store.journal.journal import JournalEntry, entry_name, entry_names
from embedder.store.journal.journal_segments import find_entry
from embedder.store.journal.model_parts import ModelPart, write_parts
from embedder.user_steps.written_rows import NO_STEPS, WrittenSteps

if TYPE_CHECKING:
    from ray.data.datasource import WriteResult

RAY_COUNTERS = {
    "items": "Items finished, embedded or rejected.",
    "rejects": "Items that could not be embedded.",
    "vectors": "Rows with vectors written.",
    "part_bytes": "Bytes of finished part files.",
    "step_seconds": "Seconds inside each step.",
    "step_rows": "Rows that each step has handled.",
    "step_bytes": "Bytes that each step has handed on.",
}
"""Counters of Ray's own metrics and their meaning; those of steps have the label `step`."""
WRITE_CURE = "a smaller rows_per_part needs less memory"


class WriteTask(Protocol):
    """What a write task learns from Ray about itself."""

    task_idx: int


class WrittenPart(NamedTuple):
    """Name of the journal entry that a write task has left, and of the node that it ran on."""

    entry: str
    node: str


def drop_empty_blocks(blocks: Iterable[Block]) -> list[pa.Table]:
    """Select the blocks that hold rows; some of the others lack columns."""
    return [block for block in blocks if block.num_rows]


class PartSink(Datasink["WrittenPart | None"]):  # type: ignore[misc]  # Ray ships no types
    """Write tasks: each gathers some hundred rows into part files and leaves one journal entry."""

    def __init__(
        self,
        models: Sequence[ModelPart],
        rows_per_part: int,
        before_write: WrittenSteps = NO_STEPS,
        carried: CarriedColumns = NOTHING_CARRIED,
    ) -> None:
        self.models, self.rows_per_part = tuple(models), rows_per_part
        self.files, self.stamp = models[0].files, models[0].metadata
        self.before_write, self.carried = before_write, carried

    def write(self, blocks: Iterable[Block], ctx: WriteTask) -> WrittenPart | None:
        """Write one part, unless an earlier attempt of the task, whose answer was lost, has done so.

        Raises `RunFailedError` if the task has killed several processes.
        """
        tables = drop_empty_blocks(blocks)
        if not tables:
            return None
        with limit_deaths(lambda: f"write task {ctx.task_idx}", WRITE_CURE):
            name = entry_name(self.stamp.session, ctx.task_idx)
            attempt = attempt_number()
            if attempt == 0 or find_entry(self.files, self.stamp.run_id, name) is None:
                rows = self.before_write(self.carried.join(pa.concat_tables(tables)))
                count_part(write_parts(self.models, ctx.task_idx, rows, attempt=attempt))
        return WrittenPart(name, platform.node())

    def on_write_complete(self, write_result: "WriteResult[WrittenPart | None]") -> None:
        """Compare what the tasks returned with the journal that this process reads.

        Raises `RunFailedError` if they differ.
        """
        written = [part for part in write_result.write_returns if part is not None]
        check_journal(written, entry_names(self.files, self.stamp.run_id, self.stamp.session), str(self.files))

    @property
    def min_rows_per_write(self) -> int:
        """Rows that Ray gathers before it starts a write task."""
        return self.rows_per_part

    def get_name(self) -> str:
        """Name of the operator in Ray's plan and logs."""
        return "parts"


def check_journal(written: Iterable[WrittenPart], journal: set[str], store: str) -> None:
    """Check that a session's write tasks returned what its journal, read by the publishing process, holds. Pure.

    Raises `RunFailedError` if they differ.
    """
    by_name = {part.entry: part.node for part in written}
    if missing := sorted(by_name.keys() - journal):
        nodes = ", ".join(sorted({by_name[name] for name in missing}))
        raise RunFailedError(
            f"store {store}: {len(missing):,} of {plural(len(by_name), 'part')} that write tasks finished on {nodes} "
            f"can't be seen on {platform.node()} (first: {missing[0]}); all nodes must share the store: give a bucket "
            "or a shared folder; nothing is published"
        )
    if unknown := sorted(journal - by_name.keys()):
        raise RunFailedError(
            f"store {store}: its journal has {plural(len(unknown), 'part')} that no write task returned (first: "
            f"{unknown[0]}); another process writes there under this run; nothing is published, and the same command "
            "continues"
        )


def count_part(entry: JournalEntry) -> None:
    """Add the counts of a finished write task to Ray's metrics; called inside the task."""
    counters = _counters()
    num_vectors = sum(part.num_rows for part in entry.parts if part.table == "embeddings")
    of_part = {
        "items": entry.num_items,
        "rejects": entry.num_rejects,
        "vectors": num_vectors,
        "part_bytes": sum(part.size_bytes for part in entry.parts),
    }
    for name, number in of_part.items():
        if number:  # Ray's counters refuse a zero
            counters[name].inc(number)
    for call in entry.trace:
        for name, key in (("step_seconds", "wall_s"), ("step_rows", "num_rows"), ("step_bytes", "bytes_out")):
            if call[key] > 0:
                counters[name].inc(call[key], {"step": call["step"]})


@lru_cache(maxsize=1)
def _counters() -> dict[str, Any]:
    """Return the counters of this process by name, made once: two with the same name would be two series."""
    from ray.util.metrics import Counter

    return {
        name: Counter(f"embedder_{name}", text, tag_keys=("step",) if name.startswith("step_") else ())
        for name, text in RAY_COUNTERS.items()
    }
