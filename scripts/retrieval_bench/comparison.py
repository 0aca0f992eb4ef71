"""Our index and the one that autofaiss picks, brought to the same recall of captions."""

import sys
from pathlib import Path

import faiss
import numpy as np

from harness import GIB, MIB, json_of, show
from index import faiss_build
from index.search import open_index
from retrieval_bench.measures import Find, K, latencies_ms, rates, recall

TARGET = 0.95
NUM_TIMED = 300
TIMEOUT_S = 3600.0
EFFORTS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
TRIALS = {
    "candidate, on a sample": "{design}",
    "recall@10": "{recall_at_10:.3f}",
    "ms": "{latency_ms:.3f}",
    "expected ms": "{expected_latency_ms:.3f}",
    "expected MiB": "{expected_mib:,.0f}",
    "verdict": "{verdict}",
}
CONTESTANTS = {
    "": "{name}",
    "design": "{design}",
    "effort": "{effort}",
    "recall@10": "{recall_at_10:.3f}",
    "queries/s": "{queries_per_s:,.0f}",
    "p50 ms": "{p50_ms:.3f}",
    "file MiB": "{file_mib:,.0f}",
    "resident MiB": "{resident_mib:,.0f}",
    "build s": "{build_s:.0f}",
    "peak GiB": "{peak_gib:.2f}",
}


def compare(folder: Path, num_images: int, autofaiss: str | None) -> dict:
    """Build both, each in a process of its own; measure them in turns, on one thread."""
    paths = {"ours": folder / "index" / "000001", "theirs": folder / "theirs.faiss"}
    process = [sys.executable, "-m", "retrieval_bench.processes"]
    print(f"building ours of {num_images:,} x 256", flush=True)
    built = json_of([*process, "build", folder, paths["ours"], str(num_images)], TIMEOUT_S)
    print("building theirs", flush=True)
    program = [autofaiss or sys.executable, Path(__file__).parent / "build_theirs.py"]
    by = ["--by", "autofaiss" if autofaiss else "faiss"]
    theirs_built = json_of([*program, folder, paths["theirs"], str(num_images), *by], TIMEOUT_S)
    queries = np.load(folder / "held_out.npy")
    exact = exact_rows(folder, num_images, queries)
    ours, theirs = open_index(paths["ours"]), faiss.read_index(str(paths["theirs"]))
    effort, their_recall = effort_for(theirs, queries, exact)

    def find(asked: np.ndarray) -> np.ndarray:
        return ours.search(asked, K, num_threads=1).rows

    contestants = {"ours": find, "theirs": their_finder(theirs, effort)}
    with faiss_build.threads(1):
        per_s = rates(contestants, queries[:NUM_TIMED])
        single_ms = latencies_ms(contestants, queries[:NUM_TIMED])
    measured = {
        name: {
            "queries_per_s": per_s[name],
            "p50_ms": float(np.median(single_ms[name])),
            **json_of([*process, "resident", folder, paths[name], str(effort)], TIMEOUT_S),
        }
        for name in contestants
    }
    found = {
        "num_pictures": num_images,
        "ours": {
            "design": ours.manifest.design,
            "parameters": ours.manifest.parameters,
            "recall_at_10": recall(find(queries), exact),
            **measured["ours"],
            "file_bytes": ours.manifest.memory_bytes,
            "build_s": built["manifest"]["build_s"],
            "build_peak_bytes": built["peak_bytes"],
            "steps_s": built["manifest"]["steps_s"],
        },
        "theirs": {
            "design": theirs_built["design"],
            "parameters": {"ef_search": effort},
            "recall_at_10": their_recall,
            **measured["theirs"],
            "file_bytes": paths["theirs"].stat().st_size,
            "build_s": theirs_built["build_s"],
            "build_peak_bytes": theirs_built["peak_bytes"],
            "by": theirs_built["by"],
        },
        "trials": built["manifest"]["trials"],
    }
    found["times_the_queries_per_s"] = per_s["ours"] / per_s["theirs"]
    show_comparison(found)
    return found


def their_finder(index: faiss.Index, effort: int) -> Find:
    parameters = faiss.SearchParametersHNSW(efSearch=effort)
    return lambda queries: index.search(queries, K, params=parameters)[1]


def effort_for(index: faiss.Index, queries: np.ndarray, exact: np.ndarray) -> tuple[int, float]:
    """The least effort that reaches the target with captions, else the greatest; and its recall."""
    reached = 0.0
    for effort in EFFORTS:
        reached = recall(their_finder(index, effort)(queries), exact)
        if reached >= TARGET:
            break
    return effort, reached


def exact_rows(folder: Path, num_images: int, queries: np.ndarray) -> np.ndarray:
    """The ten nearest images of each query, by brute force."""
    images = np.load(folder / "images.npy", mmap_mode="r")[:num_images]
    return faiss.knn(queries, np.ascontiguousarray(images), K, metric=faiss.METRIC_INNER_PRODUCT)[1]


def show_comparison(found: dict) -> None:
    """Print the candidates that were measured, and both contestants."""
    show([trial | {"expected_mib": trial["expected_bytes"] / MIB} for trial in found["trials"]], TRIALS)
    print()
    both = []
    for name in ("ours", "theirs"):
        each = found[name]
        effort = " ".join(f"{key}={value}" for key, value in each["parameters"].items())
        sizes = {"file_mib": each["file_bytes"] / MIB, "resident_mib": each["resident_bytes"] / MIB}
        both.append(each | sizes | {"name": name, "effort": effort, "peak_gib": each["build_peak_bytes"] / GIB})
    show(both, CONTESTANTS)
    print(
        f"{found['times_the_queries_per_s']:.1f} times the queries a second; theirs by {found['theirs']['by']}",
        flush=True,
    )
