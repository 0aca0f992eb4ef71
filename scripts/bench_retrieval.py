"""Our index beside the one that autofaiss picks, updates beside rebuilds, filtered beside exact search.

    python scripts/bench_retrieval.py                                  # 300,000 hard vectors: minutes on two cores
    python scripts/bench_retrieval.py 1000000                          # half an hour
    python scripts/bench_retrieval.py 1000000 --autofaiss PYTHON       # an interpreter that has autofaiss installed

On these vectors an index that was tuned with pictures fails captions, which people search with: both are brought to a
recall@10 of 0.95 on captions that neither has seen. A query of the graph over whole vectors waits for memory, a
kilobyte a hop; ours reads projections of a few dozen numbers, and whole vectors only of the best. Times are of one
thread, medians of rounds in which the contestants take turns. The last line is one JSON document.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from retrieval_bench.comparison import compare
from retrieval_bench.demonstration import show_the_trap
from retrieval_bench.filtering import compare_filters
from retrieval_bench.updating import compare_update
from retrieval_bench.vectors import make_vectors

NUM_ASKED, NUM_HELD_OUT = 4000, 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("num_pictures", nargs="?", type=int, default=300_000)
    parser.add_argument(
        "--autofaiss", metavar="PYTHON", help="interpreter that has autofaiss; else FAISS does as it does"
    )
    parser.add_argument("--trap", action="store_true", help="first show what indexes find for pictures and captions")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-retrieval-") as name:
        folder, num_pictures = Path(name), arguments.num_pictures
        write_vectors(folder, num_pictures)
        found: dict = {"trap": show_the_trap(folder, num_pictures)} if arguments.trap else {}
        found["comparison"] = compare(folder, num_pictures, arguments.autofaiss)
        found["filters"] = compare_filters(folder, num_pictures)
        found["update"] = compare_update(folder, num_pictures)
    print(json.dumps(found))


def write_vectors(folder: Path, num_pictures: int) -> None:
    """Pictures, a tenth more to add later, captions to build with, and captions held out from everything."""
    vectors = make_vectors(num_pictures + num_pictures // 10, NUM_ASKED + NUM_HELD_OUT)
    np.save(folder / "pictures.npy", vectors.pictures)
    np.save(folder / "captions.npy", vectors.captions[:NUM_ASKED])
    np.save(folder / "held_out.npy", vectors.captions[NUM_ASKED:])


if __name__ == "__main__":
    main()
