"""Build our index of vectors in a file, in a process of its own, and say how much memory that took.

python -m retrieval_bench.build_ours FOLDER OUT NUM_PICTURES
"""

import json
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from index.build import build_index

BLOCK = 65_536


def main() -> None:
    folder, out, num_pictures = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    manifest = build_index(
        blocks(folder / "pictures.npy", 0, num_pictures),
        ids(0, num_pictures),
        out,
        model_fingerprint="hard vectors",
        embeddings_version=1,
        queries=np.load(folder / "captions.npy"),
        say=lambda text: print(f"  {text}", file=sys.stderr, flush=True),
    )
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"peak_bytes": peak_bytes, "manifest": manifest.model_dump()}))


def blocks(path: Path, start: int, stop: int) -> Iterator[np.ndarray]:
    """Rows of an array file, block by block, each mapped only while it is read."""
    for first in range(start, stop, BLOCK):
        yield np.array(np.load(path, mmap_mode="r")[first : min(first + BLOCK, stop)])


def ids(start: int, stop: int) -> pa.Table:
    """Ids of rows."""
    numbers = np.arange(start, stop)
    return pa.table(
        {
            "item_id": [f"{number:09d}" for number in numbers],
            "segment": np.zeros(len(numbers), np.int32),
            "run_id": np.full(len(numbers), "run-1"),
        }
    )


if __name__ == "__main__":
    main()
