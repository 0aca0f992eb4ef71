"""The light installation: its size, how long its commands take, and what the time goes to.

    python scripts/measure_light.py runs/demo/store                  # in a fresh environment, which takes a minute
    python scripts/measure_light.py runs/demo/store --python PATH    # with an interpreter whose environment is there

The fresh environment gets `embedder`, then `embedder[serve]`, in the versions of constraints.txt, from a package index,
and is deleted at the end. The store has to have its query towers, as each run writes them; `scripts/demo` makes one.
The page cache is warm: each command runs once before it is measured. Run it on a quiet machine: the times are the
clock's, and beside them stand the CPU seconds of the process.

Sizes are of all files in site-packages, as the disk counts them; what a virtual environment brings itself (pip) is told
apart. What the first search spends its time on are its own steps, and of the imports those of each package itself. The
last line is one JSON document.
"""

import argparse
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parent.parent
INSTALLED = ("embedder", "shards", "index", "pyproject.toml", "README.md", "LICENSE")
QUERY = "red heart"
MIB = 1 << 20
NUM_SHOWN = 10  # packages
READY_LIMIT_S = 60.0

FIRST_SEARCH = """
import time
started = time.perf_counter()
import json, sys
import embedder
store = embedder.open_store(sys.argv[1])
opened = time.perf_counter()
store.encode_text([sys.argv[2]])
encoded = time.perf_counter()
assert store.search(sys.argv[2])
searched = time.perf_counter()
steps = {"import_and_open_s": opened - started, "encode_first_s": encoded - opened, "search_s": searched - encoded}
print(json.dumps(steps | {"all_s": searched - started, "encoder": store.encoder.kind}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, help="folder of a store")
    parser.add_argument("--python", type=Path, help="interpreter of an environment; by default a fresh one is made")
    parser.add_argument("--runs", type=int, default=5, help="runs of each command; their median is told")
    options = parser.parse_args()
    store = options.store.absolute()
    with environment(options.python) as (python, size):
        found = {"size": size}
        search = [str(python), "-m", "embedder", "search", QUERY, "--store", str(store)]
        found["search"] = measure(lambda: timed(search)[0], options.runs)
        first = [str(python), "-c", FIRST_SEARCH, str(store), QUERY]
        found["first_search"] = measure(lambda: first_search(first), options.runs)
        found["imports_ms"] = imports(first)
        if has_serve(python):
            found["serve"] = measure(lambda: start_serving(python, store), options.runs)
    show(found)
    print(json.dumps(found))


@contextmanager
def environment(python: Path | None) -> Iterator[tuple[Path, dict]]:
    """Give the interpreter of an environment, and its sizes."""
    if python is not None:
        yield python, sizes(python)
        return
    with tempfile.TemporaryDirectory(prefix="measure-light-") as name:
        python = Path(name) / "venv/bin/python"
        subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
        before_bytes = sum(package_bytes(python).values())
        install(python, Path(name) / "source")
        size = sizes(python, before_bytes)
        install(python, Path(name) / "source", "[serve]")
        size["with_serve_mib"] = sizes(python, before_bytes)["installation_mib"]
        os.chdir(name)  # what runs from now on finds the installation, not this checkout
        os.environ.pop("PYTHONPATH", None)
        yield python, size


def install(python: Path, source: Path, extras: str = "") -> None:
    """Install the light installation from a copy of this checkout, in which pip may write."""
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir()
    for name in INSTALLED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "-c", ROOT / "constraints.txt", f"{source}{extras}"], check=True)


def package_bytes(python: Path) -> dict[str, int]:
    """Bytes on disk of each package of an environment."""
    place = "import sysconfig; print(sysconfig.get_path('purelib'))"
    folder = Path(subprocess.run([python, "-c", place], check=True, capture_output=True, text=True).stdout.strip())
    sizes: Counter[str] = Counter()
    for path in folder.rglob("*"):
        name = path.relative_to(folder).parts[0].partition(".")[0].partition("-")[0]
        sizes[name] += path.lstat().st_blocks * 512
    return dict(sizes)


def sizes(python: Path, before_bytes: int = 0) -> dict:
    """Size of the installation and its largest packages, in MiB."""
    packages = package_bytes(python)
    largest = sorted(packages, key=lambda name: -packages[name])[:NUM_SHOWN]
    total = sum(packages.values())
    return {
        "installation_mib": round((total - before_bytes) / MIB),
        "environment_mib": round(total / MIB),
        "largest_mib": {name: round(packages[name] / MIB) for name in largest},
    }


def measure(run: Callable[[], dict], num_runs: int) -> dict:
    """Medians of what a command reports, after a run that warms the page cache."""
    run()
    runs = [run() for _ in range(num_runs)]
    numbers = [name for name in runs[0] if name.endswith(("_s", "_mib"))]
    return runs[0] | {name: round(statistics.median(each[name] for each in runs), 3) for name in numbers}


def timed(command: list[str]) -> tuple[dict, str]:
    """Clock and CPU of a process that has to succeed, and its output."""
    before, started_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    elapsed_s, after = time.perf_counter() - started_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{' '.join(command[:4])} ... failed: {done.stderr.strip()}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"process_s": elapsed_s, "cpu_s": cpu_s}, done.stdout


def first_search(command: list[str]) -> dict:
    """Clock and CPU of a fresh process that opens a store and searches once, and its steps."""
    took, output = timed(command)
    return took | json.loads(output)


def imports(command: list[str]) -> dict[str, float]:
    """Milliseconds that the modules of each package take themselves, of a command's imports."""
    traced = subprocess.run([command[0], "-X", "importtime", *command[1:]], capture_output=True, text=True, check=True)
    own: Counter[str] = Counter()
    for line in traced.stderr.splitlines():
        own_us, _, name = line.removeprefix("import time:").partition("|")
        if own_us.strip().isdigit():
            own[name.rpartition("|")[2].strip().partition(".")[0]] += int(own_us)
    shown = dict(own.most_common(NUM_SHOWN))
    return {name: round(spent / 1000, 1) for name, spent in [*shown.items(), ("all", own.total())]}


def has_serve(python: Path) -> bool:
    """Whether the environment has the service."""
    return subprocess.run([python, "-c", "import fastapi, uvicorn"], capture_output=True, check=False).returncode == 0


def start_serving(python: Path, store: Path) -> dict:
    """Start the service, wait until it is ready, and stop it."""
    command = [str(python), "-m", "embedder", "serve", "--store", str(store), "--port", "0"]
    started_s = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            url = next((line.split()[-1] for line in server.stdout or () if "http://" in line), None)
            if url is None:
                sys.exit(f"{' '.join(command[:4])} ... ended before it served")
            while not is_ready(url):
                if time.perf_counter() - started_s > READY_LIMIT_S:
                    sys.exit(f"the service at {url} is not ready after {READY_LIMIT_S:.0f} s")
                time.sleep(0.01)
            ready_s = time.perf_counter() - started_s
            return {"ready_s": ready_s, "resident_mib": resident_bytes(server.pid) / MIB}
        finally:
            server.send_signal(signal.SIGTERM)


def is_ready(url: str) -> bool:
    """Whether the service answers `/readyz` with 200."""
    try:
        with urlopen(f"{url}/readyz", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    num_pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return num_pages * os.sysconf("SC_PAGE_SIZE")


def show(found: dict) -> None:
    """Print the figures for people."""
    size = found["size"]
    serve = f", {size['with_serve_mib']} with the service" if "with_serve_mib" in size else ""
    print(f"size: {size['installation_mib']} MiB{serve}; {size['environment_mib']} with what the environment brings")
    print("  largest, MiB: " + ", ".join(f"{name} {mib}" for name, mib in size["largest_mib"].items()))
    for name in ("search", "first_search", "serve"):
        if name in found:
            print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in found[name].items()))
    print("imports of the first search, ms: " + ", ".join(f"{name} {ms}" for name, ms in found["imports_ms"].items()))


if __name__ == "__main__":
    main()
