"""Our merge of parts and our scan of the rows that a filter leaves, beside FAISS's own functions.

    python -m large_index_bench.faiss_own               # 200,000 x 256; from the folder scripts

The merge is bound by the disk, the scan by the memory that it touches. The first round does not count; the last line is
one JSON document.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import faiss
import numpy as np
from faiss.contrib.ondisk import merge_ondisk

from index import faiss_build, faiss_merge, faiss_search
from index.designs import parse_design
from index.faiss_scan import RowScan
from index.selector import Selector
from index.vectors import VectorTable
from large_index_bench.vectors import blocks, write_vectors

WIDTH, NUM_PARTS, NUM_ROUNDS, K = 256, 8, 5, 10
DESIGN = parse_design("IVF512,SQ8,Refine(SQfp16)")


def main() -> None:
    """Measure both, and print what was found."""
    num_images = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
    with tempfile.TemporaryDirectory(prefix="faiss-own-") as name:
        folder = Path(name)
        write_vectors(folder, "low-rank", num_images, 100, 0, WIDTH)
        images = np.concatenate(list(blocks(folder, WIDTH, 0, num_images)))
        queries = np.load(folder / "captions.npy")[:20]
        print(json.dumps({"merge": merging(folder, images), "scan": scanning(images, queries)}))


def merging(folder: Path, images: np.ndarray) -> dict[str, float]:
    """Seconds to merge parts on the disk: ours with the vectors for re-ranking, FAISS's of the lists alone."""
    template = faiss_build.train(DESIGN, VectorTable(len(images), WIDTH, images))
    faiss.write_index(template, str(folder / "template"))
    faiss.write_index(faiss_build.innermost(template), str(folder / "lists"))
    ours, theirs = [folder / f"ours-{number}" for number in range(NUM_PARTS)], []
    start = 0
    for number, rows in enumerate(np.array_split(images, NUM_PARTS)):
        faiss_merge.build_part(folder / "template", [rows], ours[number])
        lists = faiss.read_index(str(folder / "lists"))
        lists.add_with_ids(rows, np.arange(start, start + len(rows)))
        theirs.append(str(folder / f"theirs-{number}"))
        faiss.write_index(lists, theirs[-1])
        start += len(rows)

    def merge_theirs() -> None:
        merged = faiss.read_index(str(folder / "lists"))
        merge_ondisk(merged, theirs, str(folder / "merged.ivfdata"))
        faiss.write_index(merged, str(folder / "merged.index"))

    def merge_ours() -> None:
        faiss_merge.merge_parts(folder / "template", ours, folder / "merged")

    return {"ours_s": seconds(merge_ours), "faiss_s": seconds(merge_theirs)}


def scanning(images: np.ndarray, queries: np.ndarray) -> dict[str, dict[str, float]]:
    """Milliseconds of a query among the rows that a filter leaves, by the share that it leaves."""
    directions = np.linalg.svd(queries, full_matrices=True)[2][:32]
    design = parse_design("LeanVec32,IVF512,SQ8,Refine(SQfp16)")
    index = faiss_build.build(design, VectorTable(len(images), WIDTH, images), np.ascontiguousarray(directions))
    scan, found = RowScan(index), {}
    for share in (1e-4, 1e-3, 1e-2, 1e-1):
        mask = np.random.default_rng(0).random(len(images)) < share
        mask[:K] = True
        selector = Selector(mask)

        def ours(selector: Selector = selector) -> None:
            for query in queries:
                scan.find(query[None], K, selector)

        def theirs(selector: Selector = selector) -> None:
            for query in queries:
                faiss_search.search(index, query[None], K, {"nprobe": 512, "k_factor": 16}, selector)

        with faiss_build.threads(1):
            times = {name: 1000 / len(queries) * seconds(run) for name, run in {"ours": ours, "faiss": theirs}.items()}
        found[f"{share:g}"] = {f"{name}_ms": round(each, 3) for name, each in times.items()}
    return found


def seconds(run: Callable[[], None]) -> float:
    """Median of rounds, the first of which does not count."""
    times = []
    for _ in range(NUM_ROUNDS + 1):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return round(median(times[1:]), 4)


if __name__ == "__main__":
    main()
