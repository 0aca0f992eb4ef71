"""A query service under load, and the same searches in process: CPU a query, queries a second, times of answers.

    python scripts/bench_serve.py                                  # a million vectors, two models: half an hour
    python scripts/bench_serve.py --vectors 100000 --model shipped
    python scripts/bench_serve.py --store runs/demo/store          # a store that is there, as of `embedder demo`

64 clients in their own process ask different texts. What bounds the service is CPU: text tower, index, HTTP and
JSON, whose part is the difference to `Store.search` in batches of 32. Then they ask half of what was sustained.
docs/serve.md has figures of both models. The last line is one JSON document.
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
from published_rows import as_embedded, listed_items, publish_rows
from vector_shapes import make_shape

from corpus import DEMO_MODEL, make_clip, read_shipped
from embedder import build_index
from embedder.batch_schema import VECTOR
from embedder.config import RunConfig
from embedder.config_toml.sections import IndexConfig
from embedder.executors.job import store_info
from embedder.models.model_folder import open_model
from embedder.retrieval.store_api import open_store
from embedder.store.files import StoreFiles
from harness import Server, json_of, serving, show

PART_ROWS = 65_536
CLIP_B32 = {"hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8, "intermediate_size": 2048}
NUM_CATEGORIES = 20


def make_store(folder: Path, model: Path, num_vectors: int, index: str) -> Path:
    """Make a store of images, with an index; gives its folder."""
    opened = open_model(str(model))
    files = StoreFiles(folder)
    images, _ = make_shape("few directions", num_vectors, 1, opened.config.embedding_dim, seed=0)
    config = RunConfig(store=files.address, model=str(model), index=IndexConfig(min_recall=0))
    publish_rows(files, store_info(config.rows, opened, "float32"), _parts(images))
    build_index(config, kind=index, force=True)
    return folder


def _parts(images: np.ndarray) -> Iterator[pa.Table]:
    for start in range(0, len(images), PART_ROWS):
        names = [f"{number:09d}.jpg" for number in range(start, min(start + PART_ROWS, len(images)))]
        captions = [f"image {int(name[:9])} of category {int(name[:9]) % NUM_CATEGORIES}" for name in names]
        vectors = pa.array(list(images[start : start + PART_ROWS]), VECTOR)
        yield as_embedded(listed_items(names, "/images/", captions), vectors, content_version="1")


class Texts:
    """Different texts of the words that the shipped captions have, each by its number."""

    def __init__(self) -> None:
        _, captions = read_shipped()
        self._words = sorted({word for caption in captions for word in caption.split()})
        self._lengths = [len(caption.split()) for caption in captions]

    def __getitem__(self, number: int) -> str:
        """Text of a number; it is as long as a caption, and its first words distinguish it from all others."""
        base = len(self._words)
        places = [number % base, number // base % base]
        places += [(number * 7919 + place * 104_729) % base for place in range(self._lengths[number % 997] - 2)]
        return " ".join(self._words[place] for place in places)


K = 10


def ask_all(url: str, num_clients: int, seconds: float, first_text: int, rate: float | None) -> dict:
    """Let clients with a connection each ask one query after another until the time is over."""
    sys.setswitchinterval(0.0005)  # a thread that has its answer notes the time at once
    texts, numbers, start_s = Texts(), itertools.count(), time.perf_counter()
    times_ms, errors = list[float](), list[str]()

    def ask() -> None:
        connection = HTTPConnection(urlsplit(url).netloc, timeout=60)
        for number in numbers:
            began_s = time.perf_counter() if rate is None else start_s + number / rate
            if began_s >= start_s + seconds:
                break
            time.sleep(max(began_s - time.perf_counter(), 0))
            body = {"queries": [{"text": texts[first_text + number]}], "k": K}
            try:
                connection.request("POST", "/search", json.dumps(body), {"Content-Type": "application/json"})
                answer = connection.getresponse()
                content = answer.read()
            except OSError as error:
                connection.close()
                errors.append(f"{type(error).__name__}: {error}")
                continue
            if answer.status == 200 and b'"hits":[{' in content:
                times_ms.append(1e3 * (time.perf_counter() - began_s))
            else:
                errors.append(f"{answer.status}: {content[:200]!r}")
        connection.close()

    with ThreadPoolExecutor(num_clients) as threads:
        for running in [threads.submit(ask) for _ in range(num_clients)]:
            running.result()
    p50_ms, p99_ms = np.percentile(times_ms or [float("nan")], (50, 99)).tolist()
    found = {"num_answered": len(times_ms), "num_errors": len(errors), "errors": errors[:3]}
    return found | {"queries_per_s": len(times_ms) / seconds, "p50_ms": p50_ms, "p99_ms": p99_ms}


BATCH = 32
FIRST_TEXT = 10_000_000  # those before are asked through the service
MAX_SINGLE = 300


def search_here(store: str, num_queries: int) -> dict:
    """Ask texts in batches, then others one by one."""
    opened, texts = open_store(store), Texts()
    opened.search([texts[FIRST_TEXT - 1 - number] for number in range(BATCH)], K)  # loads all
    batches = [[texts[FIRST_TEXT + at + number] for number in range(BATCH)] for at in range(0, num_queries, BATCH)]
    cpu_s, began_s = time.process_time(), time.perf_counter()
    for batch in batches:
        opened.search(batch, K)
    num_asked = BATCH * len(batches)
    cpu_ms = 1e3 * (time.process_time() - cpu_s) / num_asked
    wall_s = time.perf_counter() - began_s
    times = []
    for text in [texts[2 * FIRST_TEXT + number] for number in range(min(num_queries, MAX_SINGLE))]:
        began = time.perf_counter()
        opened.search(text, K)
        times.append(1e3 * (time.perf_counter() - began))
    return {
        "num_vectors": len(opened.searcher.snapshot.vectors), "cpu_ms": cpu_ms, "queries_per_s": num_asked / wall_s,
        "median_of_one_ms": median(times),
    }  # fmt: skip


MODELS = ("shipped", "clip-b32")
TIMEOUT_S = 3600.0
WARM_UP_S = 3.0
TEXTS_PER_LOAD = 1_000_000
MAX_EXTRA_CPU_MS, MAX_P99_RATIO = 1.0, 5.0
COLUMNS = {
    "store": "{name}", "vectors": "{num_vectors:,}", "in process CPU ms": "{process[cpu_ms]:.2f}",
    "service CPU ms": "{full[cpu_ms]:.2f}", "more": "{extra_cpu_ms:.2f}",
    "one in process ms": "{process[median_of_one_ms]:.2f}", "queries/s": "{full[queries_per_s]:,.0f}",
    "at half: p50 ms": "{half[p50_ms]:.1f}", "p99 ms": "{half[p99_ms]:.1f}", "p99/one": "{p99_ratio:.1f}",
    "errors": "{num_errors}",
}  # fmt: skip


STEPS = {"search": search_here, "ask": ask_all}


def main() -> None:
    if sys.argv[1:2] and sys.argv[1] in STEPS:  # one of its own processes
        print(json.dumps(STEPS[sys.argv[1]](*map(json.loads, sys.argv[2:]))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vectors", type=int, default=1_000_000, help="of a store that is made")
    parser.add_argument("--model", action="append", choices=MODELS, help="of a store that is made; by default both")
    parser.add_argument("--store", help="a store that is there, instead of those")
    parser.add_argument("--index", default="ivf", help="kind of index of a store that is made")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load")
    parser.add_argument("--queries", type=int, default=2000, help="asked in process")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-serve-") as folder:
        found = [measure(name, store, Path(folder), options) for name, store in stores(Path(folder), options)]
    show(found, COLUMNS)
    print(json.dumps({"clients": options.clients, "stores": found}))
    sys.exit(1 if any(each["num_errors"] for each in found) else 0)


def stores(folder: Path, options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Names and addresses of the stores to measure, made one at a time where none is given."""
    if options.store is not None:
        yield Path(options.store).name, options.store
        return
    for kind in options.model or MODELS:
        folder_of = folder / f"model-{kind}"
        model = DEMO_MODEL if kind == "shipped" else make_clip(folder_of, CLIP_B32["hidden_size"], CLIP_B32)
        print(f"making a store of {options.vectors:,} vectors for the model {kind}", flush=True)
        yield kind, str(make_store(folder / kind, model, options.vectors, options.index))


def measure(name: str, store: str, folder: Path, options: argparse.Namespace) -> dict:
    """Measure one store: in process, at full load, and at half of what that sustained."""
    process = run_step("search", store, options.queries)
    with serving(store, folder / "serve.log") as server:
        load(server, options, 0, seconds=WARM_UP_S)
        full = load(server, options, 1)
        half = load(server, options, 2, rate=full["queries_per_s"] / 2)
        found = {"ready_s": server.ready_s, "memory_bytes": server.memory_bytes}
    extra_cpu_ms, p99_ratio = full["cpu_ms"] - process["cpu_ms"], half["p99_ms"] / process["median_of_one_ms"]
    return found | {
        "name": name, "num_vectors": process["num_vectors"], "process": process, "full": full, "half": half,
        "extra_cpu_ms": extra_cpu_ms, "p99_ratio": p99_ratio, "num_errors": full["num_errors"] + half["num_errors"],
        "keeps_promise": extra_cpu_ms <= MAX_EXTRA_CPU_MS and p99_ratio <= MAX_P99_RATIO,
    }  # fmt: skip


def run_step(name: str, *arguments: object) -> dict:
    return json_of([sys.executable, __file__, name, *map(json.dumps, arguments)], TIMEOUT_S)


def load(
    server: Server, options: argparse.Namespace, number: int, *, seconds: float | None = None, rate: float | None = None
) -> dict:
    """Let the clients ask; gives their figures, and the CPU that the service took for each answer."""
    before_s = server.cpu_s
    found = run_step("ask", server.url, options.clients, seconds or options.seconds, number * TEXTS_PER_LOAD, rate)
    return found | {"cpu_ms": 1e3 * (server.cpu_s - before_s) / max(found["num_answered"], 1)}


if __name__ == "__main__":
    main()
