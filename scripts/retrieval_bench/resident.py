"""How much memory a process takes to search an index: what it grows by when it opens it and asks a thousand captions.

python -m retrieval_bench.resident ours|theirs PATH FOLDER EFFORT
"""

import json
import sys
from pathlib import Path

import faiss
import numpy as np
import psutil

from index.search import open_index


def main() -> None:
    whose, path, folder, effort = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    queries = np.load(folder / "held_out.npy")
    faiss.omp_set_num_threads(1)
    before = psutil.Process().memory_info().rss
    if whose == "ours":
        index = open_index(path)
        index.search(queries, 10, num_threads=1)
    else:
        index = faiss.read_index(str(path))
        index.hnsw.efSearch = effort
        index.search(queries, 10)
    print(json.dumps({"resident_bytes": psutil.Process().memory_info().rss - before}))


if __name__ == "__main__":
    main()
