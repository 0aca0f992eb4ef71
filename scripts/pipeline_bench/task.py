"""What a contestant's process is told, and what it leaves behind: vectors, and when they were finished.

Imports neither this project's application nor Ray, so that a contestant may run in an environment of its own.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FINISHED_FILE = "finished.txt"
VECTORS_FOLDER = "vectors"
SUFFIXES = (".jpg", ".png")

Event = tuple[float, int]
"""Unix time, and how many items were finished then: their vectors were in the memory of a CPU."""


@dataclass(frozen=True)
class Task:
    """What a contestant is told.

    Attributes:
        model: model folder.
        items: folder of pairs.
        out: folder to leave the results in.
        dtype: compute dtype.
        num_distinct: pairs after which the contents begin anew.
        batch_size: items of one forward pass.
        num_threads: torch threads of one process that runs the model.
        num_workers: processes that decode, or for the limit, that run the model.
    """

    model: str
    items: str
    out: str
    dtype: str
    num_distinct: int
    batch_size: int = 32
    num_threads: int = 1
    num_workers: int = 1

    @staticmethod
    def from_command_line() -> "Task":
        """The task that this process was started with."""
        return Task(**json.loads(sys.argv[1]))

    def to_json(self) -> str:
        """What `from_command_line` reads."""
        return json.dumps(asdict(self))

    def pictures(self) -> list[Path]:
        """The pictures of all pairs, in the order of their names."""
        return sorted(path for path in Path(self.items).iterdir() if path.suffix in SUFFIXES)


class FinishLog:
    """Notes when items were finished; several processes may write into one."""

    def __init__(self, out: str | Path) -> None:
        self._path = Path(out) / FINISHED_FILE

    def note(self, num_items: int) -> None:
        """So many more items are finished now."""
        with self._path.open("a") as file:
            file.write(f"{time.time():.6f} {num_items}\n")  # one small write at the end: none falls into another


def read_finished(out: Path) -> list[Event]:
    """What all processes have noted, in the order of time."""
    lines = (out / FINISHED_FILE).read_text().splitlines()
    return sorted((float(time_s), int(number)) for time_s, number in map(str.split, lines))


def vector_table(ids: Sequence[str], images: np.ndarray, texts: np.ndarray) -> pa.Table:
    """Columns item_id, image_embedding and text_embedding (`list<float>`).

    Args:
        ids: names of the pictures' files.
        images: float32 (N, E).
        texts: float32 (N, E).
    """
    columns = {"image_embedding": images, "text_embedding": texts}
    vectors = {
        name: pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values).reshape(-1)), values.shape[1])
        for name, values in columns.items()
    }
    return pa.table({"item_id": list(ids)} | vectors)


def write_vectors(task: Task, name: str, ids: Sequence[str], images: np.ndarray, texts: np.ndarray) -> None:
    """Write one Parquet file of the results."""
    folder = Path(task.out) / VECTORS_FOLDER
    folder.mkdir(exist_ok=True)
    pq.write_table(vector_table(ids, images, texts), folder / f"{name}.parquet", use_dictionary=["item_id"])
