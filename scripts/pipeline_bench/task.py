"""What a contestant's process receives, and what it leaves behind: vectors, and when they were finished.

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
SIDES = ("image_embedding", "text_embedding")
SUFFIXES = (".jpg", ".png")

Event = tuple[float, int]
"""Unix time, and how many items were finished then: their vectors were in the memory of a CPU."""


@dataclass(frozen=True)
class Task:
    """Model and items of one contestant's run, and with which numbers it runs."""

    model: str  # model folder
    items: str  # folder of files `000000.jpg` with `000000.txt`
    num_items: int  # pairs in it
    num_distinct: int  # pairs after which the contents begin anew
    dtype: str  # compute dtype
    out: str = ""  # folder to leave the results in
    batch_size: int = 32  # items of one forward pass
    num_threads: int = 1  # torch threads of one process that runs the model
    num_workers: int = 1  # processes that decode, or for the limit, that run the model
    prefetch: int = 4  # batches that each process that decodes may be ahead

    @staticmethod
    def from_command_line() -> "Task":
        """The task that this process was started with, its last argument."""
        return Task(**json.loads(sys.argv[-1]))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def images(self) -> list[Path]:
        """The images of all pairs, in the order of their names."""
        return sorted(path for path in Path(self.items).iterdir() if path.suffix in SUFFIXES)[: self.num_items]


def note_finished(out: str | Path, num_items: int) -> None:
    """Note that further items are finished now; several processes may write into one file."""
    with (Path(out) / FINISHED_FILE).open("a") as file:
        file.write(f"{time.time():.6f} {num_items}\n")  # one small write at the end: none falls into another


def read_finished(out: Path) -> list[Event]:
    """What all processes have noted, in the order of time."""
    lines = (out / FINISHED_FILE).read_text().splitlines()
    return sorted((float(time_s), int(number)) for time_s, number in map(str.split, lines))


def write_vectors(out: str | Path, name: str, ids: Sequence[str], images: np.ndarray, texts: np.ndarray) -> None:
    """Write one Parquet file of the results, with columns item_id, image_embedding and text_embedding."""
    folder = Path(out) / VECTORS_FOLDER
    folder.mkdir(exist_ok=True)
    vectors = {
        side: pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values).reshape(-1)), values.shape[1])
        for side, values in zip(SIDES, (images, texts), strict=True)
    }
    table = pa.table({"item_id": list(ids)} | vectors)
    pq.write_table(table, folder / f"{name}.parquet", use_dictionary=["item_id"])
