"""A model that no single stage may hold, embedded through three: makes it, runs it on Ray, watches each stage's memory.

    python scripts/embed_large_model.py [--params 2e9] [--items 20] [--folder DIR]

What is compared, for each stage's process: the peak of its proportional set size (PSS), without the object store's
shared memory, which all processes map and none owns, against the bytes of its own weights and `ALLOWANCE_BYTES`: Python
with torch, Ray and the tower libraries (0.6 GiB), a batch on its way, one tensor of the file beside its copy. The size
is read from /proc, a few times a second, from the start of the process on, so that loading is seen. The stages start in
parallel if the last process is there before the first has loaded its weights.

Needs twice the model's bytes of memory and its bytes of disk; for 2e9 parameters about three minutes on two cores, most
of them spent computing. The last line is one JSON document; exit 1 if a promise is broken.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import embedder
from corpus import shipped_pairs, write_pairs
from harness import EMBEDDER, GIB, SCRIPTS, descendants, json_of, title
from shards.plan import ShardPlan

DTYPE = "bfloat16"
ALLOWANCE_BYTES = 5 << 28  # 1.25 GiB
INTERVAL_S = 0.3
ROWS_PER_BATCH = 4  # so that the stages of a short run work at the same time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=2e9)
    parser.add_argument("--items", type=int, default=20)
    parser.add_argument("--cap-gib", type=float, default=2.0, help="weights that one stage may hold")
    parser.add_argument("--folder", type=Path, help="where to put the model; the system's temporary folder else")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="large-model-", dir=options.folder) as root:
        found = prove(Path(root), options.params, options.items, options.cap_gib)
    print(json.dumps(found))
    sys.exit(0 if found["passed"] else 1)


def prove(root: Path, num_parameters: float, num_items: int, cap_gib: float) -> dict:
    made = make_model(root / "model", num_parameters)
    plan = check_cap(root, cap_gib)
    shipped = shipped_pairs()
    write_pairs(root / "items", num_items, shipped[:: len(shipped) // num_items][:num_items])
    report, peaks, begun_s = embed_watched(root)
    check_vectors(root / "store", num_items)

    stages = []
    first_s = min(begun_s[load["pid"]] for load in report["loads"])
    for load in report["loads"]:
        stage = plan.stages[load["stage"]]
        weights, peak, allowed = stage.weight_bytes, peaks[load["pid"]], stage.weight_bytes + ALLOWANCE_BYTES
        stages.append({"weights": weights, "peak": peak, "allowed": allowed})
        process_s, start_s = begun_s[load["pid"]] - first_s, load["started_s"] - first_s
        print(
            f"stage {load['stage']}: weights {weights / GIB:.2f} GiB, peak {peak / GIB:.2f} of {allowed / GIB:.2f} GiB "
            f"allowed; there from {process_s:.1f} s on, loading from {start_s:.1f} to {start_s + load['wall_s']:.1f} s"
        )
    last_s = max(begun_s[load["pid"]] for load in report["loads"])
    parallel = last_s < min(load["started_s"] + load["wall_s"] for load in report["loads"])
    print(f"the stages started {'at the same time' if parallel else 'ONE AFTER ANOTHER'}")
    print(f"{report['num_items']} items embedded, {report['num_rejected']} rejected, in {report['wall_s']:.0f} s")
    passed = (
        parallel
        and {load["stage"] for load in report["loads"]} == {0, 1, 2}
        and all(stage["peak"] <= stage["allowed"] for stage in stages)
    )
    return {"num_parameters": made["num_parameters"], "stages": stages, "parallel": parallel, "passed": passed}


def make_model(folder: Path, num_parameters: float) -> dict:
    """Write the model, in a process of its own."""
    needed = num_parameters * 2 * 1.1
    free = shutil.disk_usage(folder.parent).free
    if free < needed:
        sys.exit(f"{folder.parent}: {free / GIB:.1f} GiB free, {needed / GIB:.1f} needed; name another --folder")
    options = ["--params", str(num_parameters), "--dtype", DTYPE]
    made = json_of([sys.executable, SCRIPTS / "make_large_model.py", folder, *options])
    print(
        f"model: {made['num_parameters']:,} parameters, {made['size_bytes'] / GIB:.2f} GiB in {made['num_files']} "
        f"files (images {made['vision']}, texts {made['text']}); written in {made['wall_s']} s, "
        f"peak {made['peak_rss_bytes'] / GIB:.2f} GiB"
    )
    return made


def check_cap(root: Path, cap_gib: float) -> ShardPlan:
    """Plan under a cap on weights: one stage would hold too many, three don't; gives the plan that is run."""
    for num_stages in (1, 3):
        command = [*EMBEDDER, "plan", "--model", root / "model", "--stages", str(num_stages)]
        command += ["--dtype", DTYPE, "--estimate", "--weights-cap", f"{cap_gib:g}GiB", "--out", root / "plan.json"]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        verdict = "accepted" if done.returncode == 0 else f"refused: {done.stderr.strip()}"
        print(f"{num_stages} stage(s) under a cap of {cap_gib:g} GiB of weights: {verdict}")
        if (done.returncode == 0) != (num_stages == 3):
            sys.exit("the size of the model is wrong for this cap")
    return ShardPlan.from_json((root / "plan.json").read_text(encoding="utf-8"))


def embed_watched(root: Path) -> tuple[dict, dict[int, int], dict[int, float]]:
    """Embed with the command, on Ray; gives its report, and by pid each worker's peak and when it was first seen."""
    command = [*EMBEDDER, "embed", root / "items", "--model", root / "model", "--store", root / "store"]
    command += ["--engine", "ray", "--plan", root / "plan.json", "--dtype", DTYPE, "--json"]
    command += ["--set", f"batch_size={ROWS_PER_BATCH}", "--set", "no_progress_timeout_s=3600"]
    peaks: dict[int, int] = {}
    begun_s: dict[int, float] = {}
    with (root / "report.txt").open("w+") as output, subprocess.Popen(command, stdout=output) as process:
        while process.poll() is None:
            for pid in (each.pid for each in descendants(process.pid) if title(each).startswith("ray::")):
                begun_s.setdefault(pid, time.time())
                peaks[pid] = max(peaks.get(pid, 0), own_bytes(pid))
            time.sleep(INTERVAL_S)
        output.seek(0)
        lines = output.read().splitlines()
    if process.returncode:
        sys.exit(f"embedder embed: exit {process.returncode}")
    return json.loads(lines[-1]), peaks, begun_s


def own_bytes(pid: int) -> int:
    """PSS of a process without shared memory; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Pss_Anon:", "Pss_File:")))


def check_vectors(store: Path, num_items: int) -> None:
    """All items are there, with both vectors, of length 1, and no two alike."""
    rows = embedder.open_store(store).to_arrow()
    if rows.num_rows != num_items:
        sys.exit(f"{rows.num_rows} rows, expected {num_items}")
    for name in ("image_embedding", "text_embedding"):
        vectors = np.array(rows[name].to_pylist(), np.float32)
        similarity = vectors @ vectors.T
        if not np.allclose(np.diag(similarity), 1, atol=1e-4):
            sys.exit(f"{name}: not all vectors have length 1")
        largest = float((similarity - np.eye(num_items)).max())
        print(f"{name}: {num_items} x {vectors.shape[1]}, largest cosine of two items {largest:.4f}")


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    main()
