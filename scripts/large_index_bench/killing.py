"""Updates that are killed: the index of before must stay whole, and no half of a new one may be left in its place."""

import json
import shutil
import subprocess
import time
from pathlib import Path

from index.atomic_folder import sweep_leftovers
from large_index_bench.cgroups import run_limited, start_limited

SHARES = (0.05, 0.3, 0.5, 0.7, 0.95)  # of the time that an update takes


def kill_updates(folder: Path, settings: dict, parent: Path | None, limit_bytes: int) -> dict:
    """Start updates and kill each after a share of the time that a whole one takes; then open the index of before.

    Opening compares the hash of every file with that of the manifest.
    """
    files = _files(folder / "000001")
    command = ["-m", "large_index_bench.steps", "update", str(folder), json.dumps(settings | {"version": "000003"})]
    started = time.perf_counter()
    with start_limited(command, parent, limit_bytes) as process:
        process.communicate()
    whole_s, after_s, num_left = time.perf_counter() - started, [], 0
    for share in SHARES:
        with start_limited(command, parent, limit_bytes) as process:
            try:
                process.wait(share * whole_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                after_s.append(round(share * whole_s, 2))
        if _files(folder / "000001") != files:
            raise SystemExit(f"{folder / '000001'}: an update that was killed changed it")
        num_left += len(list(folder.glob(".*")))
        sweep_leftovers(folder)
        shutil.rmtree(folder / "000003", ignore_errors=True)
    opened = ["-c", "import sys; from index.search import open_index; print(len(open_index(sys.argv[1])))"]
    line, _ = run_limited([*opened, str(folder / "000001")], parent, limit_bytes)
    left = {"num_leftovers_swept": num_left, "num_vectors_after": int(line)}
    return {"whole_s": round(whole_s, 2), "killed_after_s": after_s} | left


def _files(version: Path) -> dict[str, tuple[int, int, int]]:
    stats = {path.name: path.stat() for path in version.iterdir()}
    return {name: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}
