"""Our index and the one that autofaiss picks, brought to the same recall of captions."""

import sys
from pathlib import Path

import faiss
import numpy as np

from index import faiss_build
from index.search import Index, open_index
from retrieval_bench.measures import Find, K, in_process, latencies_ms, rates, recall, table

TARGET = 0.95
NUM_TIMED = 300
HERE = Path(__file__).parent
EFFORTS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)


def compare(folder: Path, num_pictures: int, autofaiss: str | None) -> dict:
    """Build both, each in a process of its own; measure them in turns, on one thread.

    Args:
        folder: that the vectors are in.
        num_pictures: how many of them to index.
        autofaiss: an interpreter that has it; without one, FAISS builds what it would pick.
    """
    ours_path, theirs_path = folder / "index" / "000001", folder / "theirs.faiss"
    print(f"building ours of {num_pictures:,} x 256", flush=True)
    built = in_process([sys.executable, "-m", "retrieval_bench.build_ours", folder, ours_path, str(num_pictures)])
    print("building theirs", flush=True)
    maker = [autofaiss or sys.executable, HERE / "build_theirs.py"]
    by = ["--by", "autofaiss" if autofaiss else "faiss"]
    theirs_built = in_process([*maker, folder, theirs_path, str(num_pictures), *by])
    queries = np.load(folder / "held_out.npy")
    exact = exact_rows(folder, num_pictures, queries)
    ours, theirs = open_index(ours_path), faiss.read_index(str(theirs_path))
    effort, their_recall = effort_for(theirs, queries, exact)
    contestants = {"ours": finder(ours), "theirs": their_finder(theirs, effort)}
    with faiss_build.threads(1):
        per_s = rates(contestants, queries[:NUM_TIMED])
        single_ms = latencies_ms(contestants, queries[:NUM_TIMED])
    our_memory, their_memory = (
        in_process([sys.executable, "-m", "retrieval_bench.resident", whose, path, folder, str(effort)])[
            "resident_bytes"
        ]
        for whose, path in (("ours", ours_path), ("theirs", theirs_path))
    )
    found = {
        "num_pictures": num_pictures,
        "ours": {
            "design": ours.manifest.design,
            "parameters": ours.manifest.parameters,
            "recall_at_10": recall(contestants["ours"](queries), exact),
            "queries_per_s": per_s["ours"],
            "p50_ms": float(np.median(single_ms["ours"])),
            "resident_bytes": our_memory,
            "file_bytes": ours.manifest.memory_bytes,
            "build_s": built["manifest"]["build_s"],
            "build_peak_bytes": built["peak_bytes"],
            "steps_s": built["manifest"]["steps_s"],
        },
        "theirs": {
            "design": theirs_built["design"],
            "parameters": {"ef_search": effort},
            "recall_at_10": their_recall,
            "queries_per_s": per_s["theirs"],
            "p50_ms": float(np.median(single_ms["theirs"])),
            "resident_bytes": their_memory,
            "file_bytes": theirs_path.stat().st_size,
            "build_s": theirs_built["build_s"],
            "build_peak_bytes": theirs_built["peak_bytes"],
            "by": theirs_built["by"],
        },
        "trials": built["manifest"]["trials"],
    }
    found["times_the_queries_per_s"] = per_s["ours"] / per_s["theirs"]
    show(found)
    return found


def finder(index: Index) -> Find:
    """Search with the effort of the manifest."""
    return lambda queries: index.search(queries, K, num_threads=1).rows


def their_finder(index: faiss.Index, effort: int) -> Find:
    """Search a graph with some effort."""
    parameters = faiss.SearchParametersHNSW(efSearch=effort)
    return lambda queries: index.search(queries, K, params=parameters)[1]


def effort_for(index: faiss.Index, queries: np.ndarray, exact: np.ndarray) -> tuple[int, float]:
    """The least effort that reaches the target with captions."""
    reached = 0.0
    for effort in EFFORTS:
        reached = recall(their_finder(index, effort)(queries), exact)
        if reached >= TARGET:
            return effort, reached
    return EFFORTS[-1], reached


def exact_rows(folder: Path, num_pictures: int, queries: np.ndarray) -> np.ndarray:
    """The ten nearest pictures of each query, by brute force."""
    pictures = np.load(folder / "pictures.npy", mmap_mode="r")[:num_pictures]
    return faiss.knn(queries, np.ascontiguousarray(pictures), K, metric=faiss.METRIC_INNER_PRODUCT)[1]


def show(found: dict) -> None:
    """Print the candidates that were measured, and both contestants."""
    rows: list[list[object]] = [["candidate, on a sample", "recall@10", "ms", "expected ms", "expected MiB", "verdict"]]
    for trial in found["trials"]:
        rows.append(
            [
                trial["design"],
                f"{trial['recall_at_10']:.3f}",
                f"{trial['latency_ms']:.3f}",
                f"{trial['expected_latency_ms']:.3f}",
                f"{trial['expected_bytes'] / 2**20:,.0f}",
                trial["verdict"],
            ]
        )
    table(rows)
    print()
    both: list[list[object]] = [
        ["", "design", "effort", "recall@10", "queries/s", "p50 ms", "file MiB", "resident MiB", "build s", "peak GiB"]
    ]
    for name in ("ours", "theirs"):
        each = found[name]
        both.append(
            [
                name,
                each["design"],
                " ".join(f"{key}={value}" for key, value in each["parameters"].items()),
                f"{each['recall_at_10']:.3f}",
                f"{each['queries_per_s']:,.0f}",
                f"{each['p50_ms']:.3f}",
                f"{each['file_bytes'] / 2**20:,.0f}",
                f"{each['resident_bytes'] / 2**20:,.0f}",
                f"{each['build_s']:.0f}",
                f"{each['build_peak_bytes'] / 2**30:.2f}",
            ]
        )
    table(both)
    print(
        f"{found['times_the_queries_per_s']:.1f} times the queries a second; theirs by {found['theirs']['by']}",
        flush=True,
    )
