"""Build the index that autofaiss picks, in a process of its own; imports nothing of this project.

    python scripts/build_theirs.py FOLDER OUT.faiss NUM_IMAGES --by autofaiss    # or `faiss`: the same by FAISS alone

autofaiss 2.18 takes HNSW32 of whole vectors where memory allows, adds them, and tunes efSearch on vectors of the index.
Its tuning is done again by the caller, on captions; here it gets the least of time.
"""

import json
import resource
import sys
import time
from pathlib import Path

import faiss
import numpy as np

MEMORY, MEMORY_TO_BUILD = "4GB", "8GB"


def main() -> None:
    folder, out, num_images, maker = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[5]
    images = np.load(folder / "images.npy", mmap_mode="r")[:num_images]
    started = time.perf_counter()
    if maker == "autofaiss":
        from autofaiss import build_index, version

        index, _ = build_index(
            np.ascontiguousarray(images), save_on_disk=False, metric_type="ip", max_index_memory_usage=MEMORY,
            current_memory_available=MEMORY_TO_BUILD, max_index_query_time_ms=10.0,
        )  # fmt: skip
        picked = faiss.downcast_index(index).hnsw.efSearch
        by = f"autofaiss {version.__version__}, which took efSearch {picked} for itself"
    else:
        index = faiss.index_factory(images.shape[1], "HNSW32", faiss.METRIC_INNER_PRODUCT)
        for first in range(0, num_images, 65_536):
            index.add(np.ascontiguousarray(images[first : first + 65_536]))
        by = f"FAISS {faiss.__version__}, as autofaiss 2.18 does"
    faiss.write_index(index, str(out))
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    design = f"HNSW{faiss.downcast_index(index).hnsw.nb_neighbors(1)}"
    found = {"by": by, "design": design, "build_s": time.perf_counter() - started, "peak_bytes": peak_bytes}
    print(f"\n{json.dumps(found)}")


if __name__ == "__main__":
    main()
