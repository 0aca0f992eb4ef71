"""A query service under load beside the same searches in process: CPU a query, queries a second, times of answers.

    python scripts/bench_serve.py                                  # a million vectors, two models: half an hour
    python scripts/bench_serve.py --vectors 100000 --model shipped
    python scripts/bench_serve.py --store runs/demo/store          # a store that is there, as of `embedder demo`

64 clients in a process of their own ask different texts, so that neither remembered answers nor the clients' own work
count. What bounds the service is CPU: the text tower, the index, and what HTTP and JSON add; that last part is the
difference to the same number of queries by `Store.search` in batches of 32. Then they ask half of what was sustained,
and the slowest hundredth of the answers is compared with the median of one query alone in process. Models: the shipped
one, and a text tower of CLIP-B/32's size with random weights. The last line is one JSON document.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from harness import json_of, show
from serve_bench.server import Server, serving
from serve_bench.stores import make_model, make_store

MODELS = ("shipped", "clip-b32")
TIMEOUT_S = 3600.0
WARM_UP_S = 3.0
TEXTS_PER_LOAD = 1_000_000
MAX_EXTRA_CPU_MS, MAX_P99_RATIO = 1.0, 5.0
COLUMNS = {
    "store": "{name}",
    "vectors": "{num_vectors:,}",
    "in process CPU ms": "{process[cpu_ms]:.2f}",
    "service CPU ms": "{full[cpu_ms]:.2f}",
    "more": "{extra_cpu_ms:.2f}",
    "one in process ms": "{process[median_of_one_ms]:.2f}",
    "queries/s": "{full[queries_per_s]:,.0f}",
    "at half: p50 ms": "{half[p50_ms]:.1f}",
    "p99 ms": "{half[p99_ms]:.1f}",
    "p99/one": "{p99_ratio:.1f}",
    "errors": "{num_errors}",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vectors", type=int, default=1_000_000, help="of a store that is made")
    parser.add_argument("--model", action="append", choices=MODELS, help="of a store that is made; by default both")
    parser.add_argument("--store", help="a store that is there, instead of those")
    parser.add_argument("--index", default="ivf", help="kind of index of a store that is made")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load")
    parser.add_argument("--queries", type=int, default=2000, help="asked in process")
    parser.add_argument("--folder", type=Path, help="keep the stores that are made there, and use them again")
    parser.add_argument(
        "--serve-option", action="append", default=[], help="of `embedder serve`, as --limit=max_batch=64"
    )
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="bench-serve-"))
    try:
        found = [measure(name, store, folder, options) for name, store in stores(folder, options)]
    finally:
        if options.folder is None:
            shutil.rmtree(folder)
    show(found, COLUMNS)
    print(json.dumps({"clients": options.clients, "stores": found}))
    sys.exit(1 if any(each["num_errors"] for each in found) else 0)


def stores(folder: Path, options: argparse.Namespace) -> list[tuple[str, str]]:
    """Names and addresses of the stores to measure; those that are missing are made."""
    if options.store is not None:
        return [(Path(options.store).name, options.store)]
    made = []
    for kind in options.model or MODELS:
        store = folder / f"{kind}-{options.vectors}"
        if not store.exists():
            model = folder / f"model-{kind}"
            model = model if model.exists() else make_model(model, kind)
            print(f"making a store of {options.vectors:,} vectors for the model {kind}", flush=True)
            make_store(store.with_suffix(".making"), model, options.vectors, options.index)
            store.with_suffix(".making").rename(store)
        made.append((kind, str(store)))
    return made


def measure(name: str, store: str, folder: Path, options: argparse.Namespace) -> dict:
    """Measure one store: in process, at full load, and at half of what that sustained."""
    process = json_of([sys.executable, "-m", "serve_bench.in_process", store, str(options.queries)], TIMEOUT_S)
    with serving(store, folder / "serve.log", options.serve_option) as server:
        load(server, options, 0, seconds=WARM_UP_S)
        full = load(server, options, 1)
        half = load(server, options, 2, rate=full["queries_per_s"] / 2)
        found = {"ready_s": server.ready_s, "memory_bytes": server.memory_bytes}
    extra_cpu_ms, p99_ratio = full["cpu_ms"] - process["cpu_ms"], half["p99_ms"] / process["median_of_one_ms"]
    return found | {
        "name": name,
        "num_vectors": process["num_vectors"],
        "process": process,
        "full": full,
        "half": half,
        "extra_cpu_ms": extra_cpu_ms,
        "p99_ratio": p99_ratio,
        "num_errors": full["num_errors"] + half["num_errors"],
        "keeps_promise": extra_cpu_ms <= MAX_EXTRA_CPU_MS and p99_ratio <= MAX_P99_RATIO,
    }


def load(
    server: Server, options: argparse.Namespace, number: int, *, seconds: float | None = None, rate: float | None = None
) -> dict:
    """Let the clients ask; gives their figures, and the CPU that the service took for each answer."""
    before_s = server.cpu_s
    arguments = [server.url, options.clients, seconds or options.seconds, number * TEXTS_PER_LOAD]
    arguments += [] if rate is None else [rate]
    found = json_of([sys.executable, "-m", "serve_bench.clients", *map(str, arguments)], TIMEOUT_S)
    return found | {"cpu_ms": 1e3 * (server.cpu_s - before_s) / max(found["num_answered"], 1)}


if __name__ == "__main__":
    main()
